"""Tiny models in folders, and what transformers generates with them."""

from __future__ import annotations

from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from twell import hf

WORDS = 97
NEW_TOKENS = 12
POSITIONS = 128
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.2,  # large, so that greedy tokens do not hang on roundings
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SHARES = {"1": [0.5, 0.5], "64": [1.0, 1.0]}


def build(name: str):
    torch.manual_seed(0)
    llama = hf.SparseLlamaForCausalLM, hf.SparseLlamaConfig
    qwen2 = hf.SparseQwen2ForCausalLM, hf.SparseQwen2Config
    stock = LlamaForCausalLM, LlamaConfig
    (model, config), fields = {
        "llama": (llama, {"sparsity_layer_sizes": [96, 64], "mlp_bias": True, "twell_sparsity": SHARES}),
        "plain": (llama, {"sparsity_gated_mlp": False, "sparsity_activation": "fatrelu(0.1)"}),
        "qwen2": (qwen2, {"tie_word_embeddings": True}),
        "relu": (stock, {"hidden_act": "relu"}),
        "silu": (stock, {"hidden_act": "silu"}),
    }[name]
    return model(config(**SIZES | fields)).eval()


def save_all(root: Path) -> None:
    for name in ("llama", "plain", "qwen2", "relu", "silu"):
        model = build(name)
        for bias in (value for key, value in model.named_parameters() if "mlp" in key and "bias" in key):
            torch.nn.init.normal_(bias, std=0.2)  # they begin as zeros
        model.save_pretrained(root / name)
        tokenizer().save_pretrained(root / name)


def tokenizer() -> PreTrainedTokenizerFast:
    """One word per token: "w5 w6" is [5, 6]."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def prompts(count: int) -> list[list[int]]:
    """Of 1 to 40 tokens."""
    draw = Random(0)
    return [draw.choices(range(1, WORDS), k=draw.randint(1, 40)) for _ in range(count)]


def greedy(folder: Path, asked: list[list[int]]) -> list[list[int]]:
    """What transformers generates."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    with torch.no_grad():
        found = [model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in asked]
    assert len({tuple(tokens) for tokens in found}) > len(asked) // 2  # they depend on the prompt
    return found
