"""`twell prune`: our models and stock ones, from a folder to a folder."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("typer")
from typer.testing import CliRunner

import twell
from twell.cli.app import app
from twell.evaluation import evaluate_text, load_model
from twell.hf import SparseLlamaForCausalLM


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


@pytest.mark.parametrize(("name", "sizes"), [("ours", [32, 24]), ("gpt2", [32, 32])])
def test_saves_a_smaller_model_that_says_the_same(saved, tmp_path, name, sizes):
    root, corpus = saved
    out = tmp_path / "pruned"
    result = run("prune", root / name, "--text", corpus, "--out", out, "--tokens", 600)
    assert result.exit_code == 0, result.output
    before, tokenizer = load_model(str(root / name))
    after, _ = load_model(str(out))
    assert type(after) is type(before)
    twell.sparsify_(after)
    assert [block.intermediate_size for _, block in twell.sparsify.blocks.named_blocks(after)] == sizes
    documents = [file.read_text() for file in sorted(corpus.iterdir())]
    expected, found = (
        evaluate_text(model, tokenizer, documents, max_tokens=600).cross_entropy for model in (before, after)
    )
    assert found == pytest.approx(expected, rel=1e-5)
    for model in (before, after):
        assert f"{sum(p.numel() for p in model.parameters()):,}" in result.output
    assert result.output.count(f"{expected:.4f}") == 2
    assert "tokens/s" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["pruned"]


def test_keeps_the_dtype_of_the_checkpoint(saved, tmp_path):
    root, corpus = saved
    few = ("--text", corpus, "--tokens", 40, "--min-fires", 30)
    assert run("prune", root / "ours", *few, "--out", tmp_path / "auto").exit_code == 0
    assert run("prune", root / "ours", *few, "--out", tmp_path / "wide", "--dtype", "float32").exit_code == 0
    for name, dtype in [("auto", torch.bfloat16), ("wide", torch.float32)]:
        model = SparseLlamaForCausalLM.from_pretrained(tmp_path / name, dtype="auto")
        assert model.dtype == dtype
        assert max(model.config.neurons_per_layer()) < 32


def test_sizes_are_drawn(saved, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from twell import plots

    root, corpus = saved
    drawn = []
    real = plots.layer_sizes

    def draw(before, after, *arguments, **options):
        drawn.append((before, after))
        real(before, after, *arguments, **options)

    monkeypatch.setattr(plots, "layer_sizes", draw)
    out, plot = tmp_path / "pruned", tmp_path / "sizes.png"
    done = run("prune", root / "ours", "--text", corpus, "--out", out, "--tokens", 600, "--plot", plot)
    assert done.output.splitlines()[-1] == f"plot: {plot}"
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert drawn == [([64, 64], [32, 24])]


def test_bad_input(saved, tmp_path):
    root, corpus = saved
    out = tmp_path / "out"
    (tmp_path / "there").mkdir()
    for arguments, message in [
        (
            (root / "ours", "--text", corpus, "--out", tmp_path / "there"),
            "out: got .*that does not exist yet",
        ),
        ((root / "ours", "--text", corpus, "--out", tmp_path / "no" / "where"), "out: got .*one that exists"),
        ((tmp_path / "nowhere", "--text", corpus, "--out", out), "model: got"),
        ((root / "ours", "--text", tmp_path / "nowhere", "--out", out), "nowhere"),
        (
            (root / "silu", "--text", corpus, "--out", out),
            "model: got a LlamaForCausalLM without blocks .*relufy",
        ),
        ((root / "ours", "--text", corpus, "--out", out, "--dtype", "int4"), "dtype: got 'int4'"),
        ((root / "ours", "--text", corpus, "--out", out, "--sequence-length", 65), "sequence_length: got 65"),
    ]:
        with pytest.raises(ValueError, match=message):
            run("prune", *arguments)
    assert run("prune", root / "ours", "--text", corpus).exit_code == 2
    assert run("prune", root / "ours", "--text", corpus, "--out", out, "--min-fires", 0).exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
