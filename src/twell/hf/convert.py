"""Converts dense stock models to sparse ones and back."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.activations import ACT2FN

from .._errors import reject
from .._log import log_once
from ..activations import Activation
from ..sparsify import sparsify_
from ..sparsify.blocks import dropouts_inside
from .config import EXACT_ZEROS
from .families import FAMILIES
from .layers import sparse_mlps
from .recording import record_sparsity_of
from .spellings import HUB_OPTIONS

_SPARSE_CLASS = {family.stock_config: family.sparse_class for family in FAMILIES.values()}
_STOCK_CLASS = {family.sparse_class: family.stock_class for family in FAMILIES.values()}
_OWN_TO_A_CLASS = ("model_type", "architectures", "auto_map", "transformers_version", "hidden_act")
# Options that find a config outside the Hub's own files. A model class takes no code_revision.
_CODE_OPTIONS = ("trust_remote_code", "code_revision", "gguf_file")
_CONFIG_OPTIONS = ("config", "trust_remote_code", "code_revision")
_NOT_IN_STOCK = ("fatrelu", "drelu")  # activations


def relufy(
    model_or_path: PreTrainedModel | str | os.PathLike[str],
    activation: str | Activation | None = None,
    l1_coeff: float = 0.0,
    **kwargs: Any,
) -> PreTrainedModel:
    """Convert a dense causal language model to a sparse one with the same weights.

    Only the activation changes. A model that already has exact zeros keeps its activation and its output; any
    other model changes its output and needs further training.

    A Llama or Qwen2 becomes one of our classes. Any other family stays in its stock class with ReLU in its
    config and its blocks sparsified (`twell.sparsify_`); it records its sparsity and has the L1 term in its
    loss as ours do. Saved, it is a stock checkpoint.

    model_or_path:  a stock model (its weights are copied, it stays as it is), or a path or Hub name; kwargs
                    then go to `from_pretrained`, for the config too.
    activation:     "relu", "relu2", "fatrelu(THRESHOLD)", "drelu" or a `twell.Activation`; fatrelu and drelu
                    for Llama and Qwen2 only. None keeps ReLU or squared ReLU and replaces everything else by
                    ReLU. Replacing one with exact zeros is logged.
    l1_coeff:       weight of the L1 term of the loss.
    """
    if isinstance(model_or_path, PreTrainedModel):
        if kwargs:
            reject("kwargs", sorted(kwargs), "none with a model, only with a path")
        config = model_or_path.config
    else:
        config = _config_at(model_or_path, kwargs)
    if type(config) not in _SPARSE_CLASS or (
        isinstance(model_or_path, PreTrainedModel) and type(model_or_path) not in _STOCK_CLASS.values()
    ):
        if not isinstance(model_or_path, PreTrainedModel):
            model_or_path = AutoModelForCausalLM.from_pretrained(model_or_path, **kwargs)
        return _relufied_stock(model_or_path, activation, l1_coeff)
    sparse_class = _SPARSE_CLASS[type(config)]
    sparse_config = _converted_config(
        config,
        sparse_class.config_class,
        sparsity_activation=_chosen_activation(config.hidden_act, activation).spec,
        sparsity_l1_coeff=l1_coeff,
    )
    if isinstance(model_or_path, PreTrainedModel):
        return _with_weights_of(model_or_path, sparse_class, sparse_config)
    options = {name: value for name, value in kwargs.items() if name not in _CONFIG_OPTIONS}
    return sparse_class.from_pretrained(model_or_path, config=sparse_config, **options)


def _relufied_stock(
    model: PreTrainedModel, asked: str | Activation | None, l1_coeff: float
) -> PreTrainedModel:
    """A copy of a stock model of any family, with ReLU and sparse blocks."""
    kind = type(model).__name__
    if sparse_mlps(model):
        reject("model_or_path", f"a {kind} with sparse blocks", "a stock model that stays dense")
    if not isinstance(model, GenerationMixin) or not model.can_generate() or model.config.is_encoder_decoder:
        reject("model_or_path", f"a {kind}", "a causal language model")
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    fields = [name for name, value in vars(text).items() if "act" in name and _is_activation(value)]
    if not fields:
        reject(
            "model_or_path", f"a {kind}, whose config names no activation", "one with `hidden_act` or alike"
        )
    chosen = {_chosen_activation(getattr(text, name), asked) for name in fields}
    if len(chosen) > 1:
        reject("activation", asked, f"one of relu and relu2: {kind} has several ({', '.join(fields)})")
    (activation,) = chosen
    if activation.name in _NOT_IN_STOCK:
        accepted = f"relu or relu2: the stock class {kind} has no {activation.name}"
        reject("activation", activation.spec, accepted)
    for name in fields:
        if EXACT_ZEROS.get(getattr(text, name)) != activation.name:
            setattr(text, name, activation.name)
    converted = _with_weights_of(model, type(model), config)
    report = sparsify_(converted)
    if not report.blocks:
        reasons = sorted({str(skipped) for skipped in report.skipped}) or ["it has no feed-forward block"]
        reject(
            "model_or_path", f"a {kind} ({'; '.join(reasons)})", "a model whose blocks sparsify_ recognises"
        )
    dropouts = dropouts_inside(converted)
    if dropouts:
        name, value = dropouts[0]
        log_once(
            f"relufy: {kind} has dropouts inside its blocks ({name} = {value:g}), which train dense and "
            "without the L1 term while those are on; set them to 0 in the model or in its config"
        )
    record_sparsity_of(converted, l1_coeff)
    return converted


def _is_activation(value: object) -> bool:
    return isinstance(value, str) and value in ACT2FN


def _config_at(path: str | os.PathLike[str], options: Mapping[str, Any]) -> PreTrainedConfig:
    """The config that `from_pretrained(path, **options)` would find."""
    config = options.get("config")
    if isinstance(config, PreTrainedConfig):
        return config
    where = {name: options[name] for name in (*HUB_OPTIONS, *_CODE_OPTIONS) if name in options}
    return AutoConfig.from_pretrained(path if config is None else config, **where)


def _chosen_activation(stock_name: str, asked: str | Activation | None) -> Activation:
    """The sparse model's activation. stock_name: `hidden_act` of the dense model."""
    own = EXACT_ZEROS.get(stock_name)
    if asked is None:
        return Activation.parse(own or "relu")
    chosen = Activation.parse(asked)
    if own is not None and chosen != Activation.parse(own):
        log_once(
            f"relufy replaces the activation {own!r} by {chosen.spec!r}, as asked: the output changes "
            "until it is trained further; activation=None keeps its own"
        )
    return chosen


def to_stock(model: PreTrainedModel) -> PreTrainedModel:
    """Convert a sparse model to transformers' own class, with copied weights and the same output.

    Stock classes support gated blocks of one size with ReLU or squared ReLU; other models raise ValueError.
    """
    if type(model) not in _STOCK_CLASS:
        reject("model", f"a {type(model).__name__}", _names(_STOCK_CLASS))
    config = model.config
    sizes = sorted(set(config.neurons_per_layer()))
    activation = Activation.parse(config.sparsity_activation)
    if not config.sparsity_gated_mlp:
        reject("model", "non-gated blocks", "gated blocks; stock classes have no others")
    if len(sizes) > 1:
        reject("model", f"layers of {sizes} neurons", "one size: stock classes have one intermediate_size")
    if activation.name in _NOT_IN_STOCK:
        accepted = f"'relu' | 'relu2': stock classes have no {activation.name}"
        reject("model", f"activation {activation.spec}", accepted)
    stock_class = _STOCK_CLASS[type(model)]
    stock_config = _converted_config(
        config, stock_class.config_class, hidden_act=config.hidden_act, intermediate_size=sizes[0]
    )
    return _with_weights_of(model, stock_class, stock_config)


def _converted_config(
    config: PreTrainedConfig, target: type[PreTrainedConfig], **changes: Any
) -> PreTrainedConfig:
    fields = config.to_dict()
    for field in [*_OWN_TO_A_CLASS, *(field for field in fields if field.startswith("sparsity_"))]:
        fields.pop(field, None)
    return target(**(fields | changes))


def _with_weights_of(
    model: PreTrainedModel, target: type[PreTrainedModel], config: PreTrainedConfig
) -> PreTrainedModel:
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    converted = target.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=model.dtype,
        attn_implementation=model.config._attn_implementation,
    )
    converted.name_or_path = converted.config.name_or_path = model.config.name_or_path
    converted.generation_config = model.generation_config.__class__.from_dict(
        model.generation_config.to_dict()
    )
    return converted.to(model.device).train(model.training)


def _names(classes: Any) -> str:
    return " | ".join(cls.__name__ for cls in classes)
