"""`twell prune`: our models and stock ones, from a folder to a folder."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("typer")
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

import twell
from twell.cli.app import app
from twell.evaluation import evaluate_text, load_model
from twell.hf import SparseLlamaConfig, SparseLlamaForCausalLM, to_stock
from twell.train.data import DataConfig, prepare

from ..pruning.neurons import kill
from ..train.runs import write_corpus


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with models of several classes and their tokenizer, with many silent neurons; and text."""
    root = tmp_path_factory.mktemp("prune")
    corpus = write_corpus(root / "corpus")
    options = {"source": str(corpus), "vocab_size": 384, "sequence_length": 16, "cache": str(root / "cache")}
    tokenizer = prepare(DataConfig(**options), quiet=True).tokenizer
    special = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    ours = SparseLlamaForCausalLM(
        SparseLlamaConfig(
            vocab_size=384,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
            initializer_range=0.3,
            **special,
        )
    )
    kill(ours, 30, 20)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=384, activation_function="relu", **sizes, **special))
    twell.sparsify_(gpt2)
    kill(gpt2, 30, 20)
    twell.densify_(gpt2)
    silu = to_stock(ours)
    silu.config.hidden_act = "silu"
    for name, model in {"ours": ours.bfloat16(), "gpt2": gpt2, "silu": silu}.items():
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root, corpus


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
