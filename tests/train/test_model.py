"""Settings that contradict a checkpoint are refused in one line, before any text is read."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from transformers import LlamaConfig, Qwen2Config

from twell.train.data import token_files
from twell.train.model import with_checkpoint
from twell.train.run import train

from .data.corpora import small
from .runs import QUIET, small_run, write_corpus

SIZES = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Text that no test gets to tokenise."""

    def fail(*_arguments, **_options):
        raise AssertionError("text was tokenised")

    monkeypatch.setattr(token_files, "write_token_files", fail)
    return write_corpus(tmp_path / "corpus")


@pytest.fixture
def tokenizer(tmp_path, corpus):
    from twell.train.data.tokenizer import obtain_tokenizer

    return obtain_tokenizer(small(corpus, tmp_path / "other-cache"), quiet=True)


def saved(folder, config, tokenizer):
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def refused(corpus, folder, *overrides):
    with pytest.raises(ValueError, match=r"^\S+: got .*; accepted: ") as caught:
        train(small_run(corpus, *overrides), folder, console=QUIET)
    assert not folder.exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_kind_that_nobody_knows(corpus, tmp_path):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "nobody_knows"}')
    said = refused(corpus, tmp_path / "run", f"model.init_from={tmp_path / 'odd'}")
    assert said.startswith(f"model.init_from: got '{tmp_path / 'odd'}', which cannot be read (")
    assert "accepted: a causal language model" in said


def test_the_architecture_of_a_checkpoint_is_taken(corpus, tmp_path, tokenizer):
    path = saved(tmp_path / "qwen2", Qwen2Config(**SIZES), tokenizer)
    found = with_checkpoint(small_run(corpus, f"model.init_from={path}"))
    assert found.model.architecture == "qwen2"
    said = refused(
        corpus,
        tmp_path / "run",
        f"model.init_from={saved(tmp_path / 'llama', LlamaConfig(**SIZES), tokenizer)}",
        "model.architecture=qwen2",
    )
    assert said.startswith("model.architecture: got 'qwen2'; accepted: 'llama'")


def test_settings_against_a_checkpoint(corpus, tmp_path, tokenizer):
    path = saved(tmp_path / "llama", LlamaConfig(**SIZES), tokenizer)
    start = f"model.init_from={path}"
    for setting, message in [
        ("model.gated=false", "model.gated: got False; accepted: true"),
        ("model.activation=gelu", "model.activation: got 'gelu'; accepted: 'silu'"),
        ("model.hidden_size=64", "model.hidden_size: got 64; accepted: 32"),
        ("data.sequence_length=65", "data.sequence_length: got 65; accepted: at most the 64 positions"),
    ]:
        assert refused(corpus, tmp_path / "run", start, setting).startswith(message)
    fewer = saved(tmp_path / "fewer", LlamaConfig(**SIZES | {"vocab_size": 270}), tokenizer)
    said = refused(corpus, tmp_path / "run", f"model.init_from={fewer}")
    assert said.startswith(f"data.tokenizer: got a vocabulary of {len(tokenizer)}; accepted: at most 270")


def test_reporters(corpus, tmp_path):
    said = refused(corpus, tmp_path / "run", "train.report=nobody")
    assert said.startswith("train.report: got 'nobody'; accepted: any of ")
    missing = [name for name in ("wandb", "mlflow", "clearml", "swanlab") if not find_spec(name)]
    if not missing:
        pytest.skip("everything is installed")
    said = refused(corpus, tmp_path / "run", f"train.report=[{missing[0]}]")
    assert said.startswith(f"train.report: got '{missing[0]}', whose package is not installed; accepted: ")
