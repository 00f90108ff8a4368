"""Llama and Qwen2 language models with sparse feed-forward blocks, on transformers' own classes.

model = SparseLlamaForCausalLM.from_pretrained(path)     ours, and the released SparseLM checkpoints
model = relufy("path/of/a/dense/model", l1_coeff=2e-5)   a SiLU model, to be trained sparse
model = to_stock(model)                                  back to transformers' class

Importing this package registers the models with transformers' Auto classes.
"""

from __future__ import annotations

import importlib.util

from .._errors import missing_extra

if importlib.util.find_spec("transformers") is None:
    raise missing_extra("twell.hf needs transformers", "hf")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .config import SparseLlamaConfig, SparseQwen2Config
from .convert import relufy, to_stock
from .families import FAMILIES
from .layers import compile_inside_checkpoints, set_neuron_major, sparse_mlps
from .models import (
    SparseCausalLMOutput,
    SparseLlamaForCausalLM,
    SparseLlamaModel,
    SparseQwen2ForCausalLM,
    SparseQwen2Model,
)
from .spellings import convert_state_dict

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

for _family in FAMILIES.values():
    _config = _family.sparse_config
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _family.backbone, exist_ok=True)
    AutoModelForCausalLM.register(_config, _family.sparse_class, exist_ok=True)
