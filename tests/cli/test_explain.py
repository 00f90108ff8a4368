"""`twell explain`: our models and stock ones, on a text."""

from __future__ import annotations

import json
import shutil

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("typer")
from transformers import AutoConfig
from typer.testing import CliRunner

from twell.cli.app import app
from twell.shares import FIELD, SIZES, stored_shares
from twell.train.checkpoints import write_manifest


def run(*arguments):
    return CliRunner().invoke(app, ["explain", *map(str, arguments)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("model", "block"), [("ours", "model.layers.0.mlp"), ("gpt2", "transformer.h.0.mlp")]
)
def test_every_block_has_a_row(saved, model, block):
    root, corpus = saved
    done = run(root / model, "--text", corpus, "--tokens", 200)
    assert done.exit_code == 0
    header, first, second, *_ = done.output.splitlines()
    assert header.split()[:5] == ["layer", "D", "x", "H", "plan"]
    assert first.startswith(block)
    assert second.split()[0] == block.replace("0", "1")
    assert "192 tokens on the CPU" in done.output  # whole windows of 64


def test_fewer_tokens_than_a_window(saved):
    root, corpus = saved
    assert "10 tokens on the CPU" in run(root / "ours", "--text", corpus, "--tokens", 10).output


def test_a_model_without_zeros_is_refused(saved):
    root, corpus = saved
    with pytest.raises(ValueError, match=r"without blocks that have exact zeros.*relufy"):
        run(root / "silu", "--text", corpus)


def test_a_missing_text_is_named(saved):
    root, _ = saved
    with pytest.raises(ValueError, match=r"nowhere\.txt"):
        run(root / "ours", "--text", "nowhere.txt")


def test_how_active_layers_are_is_saved(saved, tmp_path):
    root, corpus = saved
    model = shutil.copytree(root / "ours", tmp_path / "model")
    before = json.loads((model / "config.json").read_text())
    done = run(model, "--text", corpus, "--tokens", 640, "--save")
    assert f"saved the shares of active neurons in {model / 'config.json'}" in done.output
    after = json.loads((model / "config.json").read_text())
    assert after == {**before, FIELD: after[FIELD]}
    first, second = stored_shares(AutoConfig.from_pretrained(model))
    assert list(first) == list(second) == list(SIZES)
    assert 0 < first[1] < first[4] <= first[64] < 1


def test_what_cannot_be_saved_is_refused(saved):
    root, corpus = saved
    with pytest.raises(ValueError, match=r"tokens: got 64; accepted: at least 128 tokens"):
        run(root / "ours", "--text", corpus, "--tokens", 64, "--save")
    with pytest.raises(ValueError, match="on the Hub"):
        run("someone/model", "--text", corpus, "--save")


def test_a_checkpoint_stays_as_its_manifest_has_it(saved, tmp_path):
    root, corpus = saved
    checkpoint = shutil.copytree(root / "ours", tmp_path / "checkpoint-4")
    write_manifest(checkpoint)
    with pytest.raises(ValueError, match=r"checkpoint-4; accepted: a finished run"):
        run(checkpoint, "--text", corpus, "--save")
