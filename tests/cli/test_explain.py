"""`twell explain`: our models and stock ones, on a text."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("typer")
from typer.testing import CliRunner

from twell.cli.app import app


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
