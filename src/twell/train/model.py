"""The model of a run: new, or from a checkpoint whose settings must agree."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from .. import hf
from .._errors import reject
from ..hf.families import FAMILIES
from ..plan import Plan
from .checkpoints import MODEL, find_model
from .config import ARCHITECTURES, ModelConfig, RunConfig
from .data.tokenizer import load_tokenizer

_STORED = {  # our name -> transformers'
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "positions": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
    "rms_norm_eps": "rms_norm_eps",
    "initializer_range": "initializer_range",
}
_ACCEPTED = "a causal language model that transformers can read"
_OPTIMISER_SHARDS = "ACCELERATE_USE_FSDP"


def build_model(config: ModelConfig, *, vocab_size: int, eos_token_id: int, l1: float, eager: bool = False):
    """The model, on the CPU in float32. Draws new weights from torch's global generator.

    vocab_size:  size of the tokenizer; a checkpoint may have a larger one.
    l1:          L1 weight to note in the model's config.
    eager:       whether blocks stay out of compiled graphs.
    """
    if config.init_from is None:
        model = AutoModelForCausalLM.from_config(_config(config, vocab_size, eos_token_id, l1))
    else:
        model = _from_checkpoint(config, vocab_size, l1)
    layers = hf.sparse_mlps(model)
    for mlp in layers:
        mlp.plan = None if config.plan is None else Plan.parse(config.plan)
        mlp.eager = eager
    if layers and os.environ.get(_OPTIMISER_SHARDS, "").lower() in ("1", "true"):
        hf.set_neuron_major(model, False)  # FSDP shards contiguous parameters only
    return model.float()


def _config(config: ModelConfig, vocab_size: int, eos_token_id: int, l1: float):
    shared = {theirs: getattr(config, ours) for ours, theirs in _STORED.items()} | {
        "vocab_size": -(-vocab_size // 64) * 64,  # whole tiles in the last product
        "num_key_value_heads": config.kv_heads or config.heads,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "use_cache": True,
    }
    family = FAMILIES[config.architecture]
    if config.dense:
        return family.stock_config(**shared, hidden_act=config.activation)
    return family.sparse_config(
        **shared, sparsity_l1_coeff=l1, sparsity_gated_mlp=config.gated, sparsity_activation=config.activation
    )


def with_checkpoint(config: RunConfig) -> RunConfig:
    """`config` with the architecture and sizes of its checkpoint, and its tokenizer unless another is named.

    A setting that contradicts the checkpoint is refused here, before any text is read.
    """
    given = config.model.init_from
    path = find_model(given, "model.init_from")
    if path != given and Path(path).name != MODEL:
        reject("model.init_from", repr(given), f"a finished run, or one of its checkpoints, such as {path}")
    stored, default = _stored_config(path), ModelConfig()
    found = {"architecture": _architecture(config.model, stored, path)}
    for name, theirs in _STORED.items():
        value = found[name] = getattr(stored, theirs, getattr(default, name))
        asked = getattr(config.model, name)
        if asked not in (value, getattr(default, name)):
            reject(f"model.{name}", asked, f"{value}, as {path} has it")
    _check_blocks(config.model, stored, path)
    data = config.data
    if data.sequence_length > found["positions"]:
        accepted = f"at most the {found['positions']} positions of the checkpoint"
        reject("data.sequence_length", data.sequence_length, accepted)
    if data.prepared is None:
        if data.tokenizer == "train":
            data = dataclasses.replace(data, tokenizer=path)
        _check_vocabulary(len(load_tokenizer(data.tokenizer)), stored, path)
    return dataclasses.replace(
        config, data=data, model=dataclasses.replace(config.model, init_from=path, **found)
    )


def _stored_config(path: str) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(path)
    except (ValueError, KeyError) as error:  # transformers does not know this kind of model
        why = str(error).strip().splitlines() or [type(error).__name__]
        return reject("model.init_from", f"{path!r}, which cannot be read ({why[0]})", _ACCEPTED)


def _architecture(config: ModelConfig, stored: PreTrainedConfig, path: str) -> str:
    """The checkpoint's architecture; another family keeps its stock class, and the setting says nothing."""
    kind = stored.model_type.removesuffix("_sparse_relu")
    if kind not in ARCHITECTURES:
        return config.architecture
    if config.architecture not in (kind, ModelConfig().architecture):
        reject("model.architecture", repr(config.architecture), f"{kind!r}, as {path} has it")
    return kind


def _check_blocks(config: ModelConfig, stored: PreTrainedConfig, path: str) -> None:
    """Refuse an activation or gate that the checkpoint does not have."""
    if config.dense:
        if stored.hidden_act != config.activation:
            reject("model.activation", repr(config.activation), f"{stored.hidden_act!r}, as {path} has it")
    elif not hasattr(stored, "sparsity_activation"):  # a dense model, whose activation will be swapped
        if not config.gated and stored.model_type in ARCHITECTURES:
            reject("model.gated", False, f"true, as {path} has it")
    else:
        if stored.sparsity_activation != config.activation:
            accepted = f"{stored.sparsity_activation!r}, as {path} has it"
            reject("model.activation", repr(config.activation), accepted)
        if stored.sparsity_gated_mlp != config.gated:
            reject("model.gated", config.gated, f"{stored.sparsity_gated_mlp}, as {path} has it")


def _check_vocabulary(size: int, stored: PreTrainedConfig, path: str) -> None:
    if stored.vocab_size < size:
        accepted = f"at most {stored.vocab_size}, the vocabulary of {path}"
        reject("data.tokenizer", f"a vocabulary of {size}", accepted)


def _from_checkpoint(config: ModelConfig, vocab_size: int, l1: float) -> PreTrainedModel:
    path = find_model(config.init_from, "model.init_from")
    stored = AutoConfig.from_pretrained(path)
    _check_vocabulary(vocab_size, stored, path)
    _check_blocks(config, stored, path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    if config.dense:
        return model
    if not hasattr(stored, "sparsity_activation"):
        return hf.relufy(model, activation=config.activation, l1_coeff=l1)
    model.config.sparsity_l1_coeff = l1
    return model
