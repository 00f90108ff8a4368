"""Models in folders, for the commands that read them."""

from __future__ import annotations

import gc

import pytest
import torch


@pytest.fixture(scope="module")
def _imported_objects_left_alone():
    """Measuring collects garbage again and again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def small_bench(monkeypatch, _imported_objects_left_alone):
    """`twell bench` builds a small model, quickly."""
    from twell.measure import models

    from .small_bench import SMALL

    monkeypatch.setitem(models.PRESETS, "tiny", SMALL)
    monkeypatch.setattr(models, "_SAMPLE", 512)


@pytest.fixture
def patient(monkeypatch):
    """On a busy machine many rounds may pass until a few tokens take longer than none."""
    from twell.measure import contest

    monkeypatch.setattr(contest, "_MOST_NOISY", 10_000)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with models of several classes and their tokenizer, with many silent neurons; and text."""
    pytest.importorskip("transformers")
    pytest.importorskip("datasets")
    from transformers import GPT2Config, GPT2LMHeadModel

    import twell
    from twell.hf import SparseLlamaConfig, SparseLlamaForCausalLM, to_stock
    from twell.train.data import DataConfig, prepare

    from ..pruning.neurons import kill
    from ..train.runs import write_corpus

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
