"""Llama and Qwen2 language models with sparse feed-forward blocks, on transformers' own classes.

model = SparseLlamaForCausalLM.from_pretrained(path)     ours, and the released SparseLM checkpoints
model = relufy("path/of/a/dense/model", l1_coeff=2e-5)   a SiLU model, to be trained sparse
model = to_stock(model)                                  back to transformers' class

Names are imported when first used, so that registering the configs does not load the models.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from .._extras import missing_extra

if importlib.util.find_spec("transformers") is None:
    raise missing_extra("twell.hf needs transformers", "hf")

if TYPE_CHECKING:
    from .checkpoints import convert_state_dict
    from .compilation import compile_inside_checkpoints
    from .config import SparseLlamaConfig, SparseQwen2Config
    from .convert import relufy, to_stock
    from .layers import set_neuron_major, sparse_mlps
    from .models import (
        SparseLlamaForCausalLM,
        SparseLlamaModel,
        SparseQwen2ForCausalLM,
        SparseQwen2Model,
    )
    from .outputs import SparseCausalLMOutput

_HOME = {
    "SparseLlamaConfig": "config",
    "SparseQwen2Config": "config",
    "SparseLlamaModel": "models",
    "SparseLlamaForCausalLM": "models",
    "SparseQwen2Model": "models",
    "SparseQwen2ForCausalLM": "models",
    "SparseCausalLMOutput": "outputs",
    "compile_inside_checkpoints": "compilation",
    "convert_state_dict": "checkpoints",
    "relufy": "convert",
    "set_neuron_major": "layers",
    "sparse_mlps": "layers",
    "to_stock": "convert",
}

__all__ = [
    "SparseCausalLMOutput",
    "SparseLlamaConfig",
    "SparseLlamaForCausalLM",
    "SparseLlamaModel",
    "SparseQwen2Config",
    "SparseQwen2ForCausalLM",
    "SparseQwen2Model",
    "compile_inside_checkpoints",
    "convert_state_dict",
    "relufy",
    "set_neuron_major",
    "sparse_mlps",
    "to_stock",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
