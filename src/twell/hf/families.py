"""The model families with classes of our own: stock and sparse.

A new one needs its classes in `config` and `models`, a row here, its names in `hf/__init__`, and its name in
`ARCHITECTURES` of `train.config`, which imports no transformers.
"""

from __future__ import annotations

from typing import NamedTuple

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from .config import SparseLlamaConfig, SparseQwen2Config
from .models import SparseLlamaForCausalLM, SparseLlamaModel, SparseQwen2ForCausalLM, SparseQwen2Model


class Family(NamedTuple):
    stock_config: type[PreTrainedConfig]
    stock_class: type[PreTrainedModel]
    sparse_config: type[PreTrainedConfig]
    sparse_class: type[PreTrainedModel]
    backbone: type[PreTrainedModel]


FAMILIES = {
    "llama": Family(
        LlamaConfig, LlamaForCausalLM, SparseLlamaConfig, SparseLlamaForCausalLM, SparseLlamaModel
    ),
    "qwen2": Family(
        Qwen2Config, Qwen2ForCausalLM, SparseQwen2Config, SparseQwen2ForCausalLM, SparseQwen2Model
    ),
}
"""By the model type of the stock config."""
