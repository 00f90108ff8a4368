"""Tiny models for the tests of `twell.hf`."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from twell import hf

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # large, so that models differ visibly
}
STOCK = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}
SPARSE = {
    "llama": (hf.SparseLlamaConfig, hf.SparseLlamaForCausalLM),
    "qwen2": (hf.SparseQwen2Config, hf.SparseQwen2ForCausalLM),
}


def sparse_model(family: str = "llama", seed: int = 0, **fields):
    config, model = SPARSE[family]
    torch.manual_seed(seed)
    return model(config(**SIZES | fields)).eval()


def stock_model(family: str = "llama", seed: int = 0, **fields):
    config, model = STOCK[family]
    torch.manual_seed(seed)
    return model(config(**SIZES | {"hidden_act": "relu"} | fields)).eval()


def tokens(rows: int = 2, length: int = 11, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


def is_neuron_major(model) -> bool:
    return all(mlp.down_proj.weight.mT.is_contiguous() for mlp in hf.sparse_mlps(model))


def gradients_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
