"""Tiny models to generate with, and what transformers' own loop makes of them."""

from __future__ import annotations

import torch
import transformers
from transformers import LlamaConfig, OPTConfig, Qwen2Config

import twell
from twell.generation import accelerate_, generate
from twell.hf import SparseLlamaConfig, SparseLlamaForCausalLM, SparseQwen2Config, SparseQwen2ForCausalLM

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 300,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def build(kind):
    torch.manual_seed(3)
    if kind == "sparse llama":
        return SparseLlamaForCausalLM(SparseLlamaConfig(**SIZES)).eval()
    if kind == "sparse qwen2":
        return SparseQwen2ForCausalLM(SparseQwen2Config(**SIZES)).eval()
    if kind == "opt":
        sizes = {"vocab_size": 97, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2}
        more = {"num_attention_heads": 4, "word_embed_proj_dim": 32, "max_position_embeddings": 300}
        model = transformers.OPTForCausalLM(OPTConfig(**sizes, **more, eos_token_id=2, pad_token_id=0)).eval()
        twell.sparsify_(model)
        return accelerate_(model)
    config = {"llama": LlamaConfig, "qwen2": Qwen2Config}[kind](**SIZES)
    return accelerate_(transformers.AutoModelForCausalLM.from_config(config).eval())


class Turned(transformers.LlamaForCausalLM):
    """A model of one's own, with other logits."""

    def forward(self, *given, **named):
        output = super().forward(*given, **named)
        output.logits = -output.logits
        return output


KINDS = ["sparse llama", "sparse qwen2", "llama", "qwen2", "opt"]


def stock_generate(monkeypatch, model, *given, **options):
    with monkeypatch.context() as patched:
        patched.setattr(generate, "DEVICES", ())
        return model.generate(*given, **options)


def prompt(batch, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (batch, length), generator=generator)
