"""transformers' continuous batching on a GPU, launched operation by operation and as CUDA graphs."""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

import twell
from twell.generation import accelerate_
from twell.hf import SparseLlamaConfig, SparseLlamaForCausalLM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def build(kind, dtype):
    """(a model, its dense twin)"""
    torch.manual_seed(1)
    if kind == "ours":
        model = SparseLlamaForCausalLM(SparseLlamaConfig(**SIZES)).to("cuda", dtype).eval()
        return model, copy.deepcopy(model)
    dense = LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="relu")).to("cuda", dtype).eval()
    model = copy.deepcopy(dense)
    twell.sparsify_(model)
    return accelerate_(model), dense


def prompts(count):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 200, (count,), generator=generator).tolist()
    return [torch.randint(3, 512, (length,), generator=generator).tolist() for length in lengths]


def batched(model, asked, *, graphs, new=24):
    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)
    limits = {"num_blocks": 64, "max_batch_tokens": 512, "use_cuda_graph": graphs}
    model.set_attn_implementation("sdpa")
    if hasattr(ContinuousBatchingConfig, "auto_switch_to_flash"):
        limits["auto_switch_to_flash"] = False  # it has no float32
    small = ContinuousBatchingConfig(**limits)
    done = model.generate_batch(asked, generation_config=config, continuous_batching_config=small)
    assert [request.error for request in done.values()] == [None] * len(asked)
    return [request.generated_tokens for request in done.values()]


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("kind", ["ours", "accelerated"])
def test_greedy_tokens_are_those_of_the_dense_twin(monkeypatch, kind, graphs):
    model, dense = build(kind, torch.float32)
    asked = prompts(16)
    monkeypatch.setenv("TWELL_PLAN", "dense")
    wanted = batched(dense, asked, graphs=False)
    assert len(set(map(tuple, wanted))) > 8
    monkeypatch.setenv("TWELL_PLAN", "block")
    with twell.recorded_paths() as ran:
        assert batched(model, asked, graphs=graphs) == wanted
    assert "dense" not in {piece.path for piece in ran}
    assert ran


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_16_bits_and_an_automatic_plan(graphs):
    model, _ = build("ours", torch.bfloat16)
    found = batched(model, prompts(24), graphs=graphs, new=40)
    assert {len(tokens) for tokens in found} == {40}
    ids = torch.tensor([prompts(1)[0]], device="cuda")
    model.generate(ids, do_sample=False, max_new_tokens=40)  # in captured steps, after the batch
    assert any(step.is_captured for step in model._twell_steps.values())
