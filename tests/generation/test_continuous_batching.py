"""transformers' continuous batching (`generate_batch`) gives the tokens of the dense twin's `generate`."""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("psutil")  # transformers asks it for the size of the machine

from transformers import ContinuousBatchingConfig, GenerationConfig

import twell
from twell.generation import accelerate_
from twell.hf import (
    SparseLlamaConfig,
    SparseLlamaForCausalLM,
    SparseQwen2Config,
    SparseQwen2ForCausalLM,
    to_stock,
)

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # large, so that greedy tokens do not hang on roundings
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# Without these, the cache takes more than half of the machine's memory.
SMALL = {"num_blocks": 16, "max_batch_tokens": 64}
SPARSE = {
    "sparse llama": (SparseLlamaForCausalLM, SparseLlamaConfig, {}),
    "sparse qwen2": (SparseQwen2ForCausalLM, SparseQwen2Config, {"tie_word_embeddings": True}),
    "plain llama": (
        SparseLlamaForCausalLM,
        SparseLlamaConfig,
        {"sparsity_gated_mlp": False, "mlp_bias": True, "sparsity_activation": "fatrelu(0.1)"},
    ),
}
KINDS = [*SPARSE, "sparsified", "accelerated"]


def build(kind):
    """(a model, its dense twin)"""
    torch.manual_seed(3)
    if kind in SPARSE:
        model_class, config_class, fields = SPARSE[kind]
        model = model_class(config_class(**SIZES | fields)).eval()
        return model, to_stock(model).eval() if kind != "plain llama" else copy.deepcopy(model)
    stock = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, hidden_act="relu")).eval()
    model = copy.deepcopy(stock)
    assert len(twell.sparsify_(model).blocks) == 2
    return (accelerate_(model) if kind == "accelerated" else model), stock


def prompts(count):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 41, (count,), generator=generator).tolist()
    return [torch.randint(1, 97, (length,), generator=generator).tolist() for length in lengths]


def greedy(model, asked, **options):
    config = GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0, **options)
    made = [model.generate(torch.tensor([ids]), generation_config=config)[0] for ids in asked]
    return [tokens[len(ids) :].tolist() for tokens, ids in zip(made, asked, strict=True)]


def batched(model, asked, limits=SMALL, **options):
    config = GenerationConfig(max_new_tokens=12, do_sample=False, **{"eos_token_id": -1} | options)
    small = ContinuousBatchingConfig(**limits)
    done = model.generate_batch(asked, generation_config=config, continuous_batching_config=small)
    assert [request.error for request in done.values()] == [None] * len(asked)
    return [request.generated_tokens for request in done.values()]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_the_dense_twin(monkeypatch, kind):
    model, dense = build(kind)
    asked = prompts(8)
    monkeypatch.setenv("TWELL_PLAN", "dense")
    wanted = greedy(dense, asked)
    assert len(set(map(tuple, wanted))) > 4  # they depend on the prompt
    monkeypatch.setenv("TWELL_PLAN", "row")
    with twell.recorded_paths() as ran:
        assert batched(model, asked) == wanted
    assert {piece.path for piece in ran} == {"row"}
    assert max(piece.tokens for piece in ran) > 8  # several requests, or pieces of prompts, in one call
    assert greedy(model, asked[:2]) == wanted[:2]  # `generate` is as it was


def test_an_automatic_plan(monkeypatch):
    model, dense = build("sparse llama")
    assert batched(model, prompts(8)) == greedy(dense, prompts(8))


def test_requests_end_at_their_stop_tokens(monkeypatch):
    model, dense = build("sparse llama")
    asked = prompts(6)
    stops = [greedy(dense, asked)[0][4], greedy(dense, asked)[3][2]]
    monkeypatch.setenv("TWELL_PLAN", "row")
    found = batched(model, asked, eos_token_id=stops)
    assert found == greedy(dense, asked, eos_token_id=stops)
    assert len({len(tokens) for tokens in found}) > 1


def test_more_requests_than_the_cache_holds(monkeypatch):
    """Requests wait, and prompts come in pieces."""
    monkeypatch.setenv("TWELL_PLAN", "row")
    model, dense = build("accelerated")
    asked = prompts(12)
    limits = {"num_blocks": 3, "max_batch_tokens": 16}
    with twell.recorded_paths() as ran:
        assert batched(model, asked, limits) == greedy(dense, asked)
    assert max(piece.tokens for piece in ran) == 16
