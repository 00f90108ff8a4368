"""Tells transformers' auto classes about the sparse models."""

from __future__ import annotations

import importlib
from functools import cache


@cache
def register_configs() -> None:
    """`AutoConfig` knows both model types."""
    from transformers.models.auto.configuration_auto import AutoConfig

    from .config import SparseLlamaConfig, SparseQwen2Config

    for config in (SparseLlamaConfig, SparseQwen2Config):
        AutoConfig.register(config.model_type, config, exist_ok=True)


@cache
def register_models() -> None:
    """`AutoModel` and `AutoModelForCausalLM` know both configs.

    Runs when the first config is made, which is before any auto class can ask. To do it while transformers is
    being imported would need the modules that are then half imported.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    register_configs()
    models = importlib.import_module(".models", __package__)
    for backbone, causal_lm in (
        (models.SparseLlamaModel, models.SparseLlamaForCausalLM),
        (models.SparseQwen2Model, models.SparseQwen2ForCausalLM),
    ):
        AutoModel.register(backbone.config_class, backbone, exist_ok=True)
        AutoModelForCausalLM.register(causal_lm.config_class, causal_lm, exist_ok=True)
