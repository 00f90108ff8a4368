"""Compiles checkpointed models so that their blocks still decide at every training step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from .._errors import reject
from .layers import sparse_mlps


def compile_inside_checkpoints(model: PreTrainedModel, **options: Any) -> None:
    """Compile each checkpointed decoder layer inside its checkpoint.

    Call it after `gradient_checkpointing_enable({"use_reentrant": False})`; options go to `torch.compile`.

    A compiler that meets a checkpoint compiles it whole: blocks inside cannot decide and train dense.
    Compiled inside the checkpoint, a layer keeps its block between its graphs, and an automatic plan decides
    at every step. `torch.compile(model)` may still compile the code around the layers. Layers that run
    without a checkpoint, as in evaluation, stay as they are.
    """
    layers = [
        module
        for module in model.modules()
        if isinstance(module, GradientCheckpointingLayer)
        and module.gradient_checkpointing
        and sparse_mlps(module)
    ]
    if not layers:
        reject("model", "no checkpointed layers with sparse blocks", "gradient_checkpointing_enable() first")
    for layer in layers:
        for mlp in sparse_mlps(layer):
            mlp.eager = True
        layer._gradient_checkpointing_func = _compiled_inside(layer._gradient_checkpointing_func, options)


def _compiled_inside(checkpoint: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def run(function: Callable[..., Any], *arguments: Any) -> Any:
        # transformers hands over the layer's call with its keyword arguments bound.
        call, keywords = (
            (function.func, function.keywords) if isinstance(function, partial) else (function, {})
        )
        return checkpoint(partial(_compiled_call(call.__self__, options), **keywords), *arguments)

    return torch.compiler.disable(run, reason="its layer is compiled inside of it")


def _compiled_call(layer: nn.Module, options: dict[str, Any]) -> Callable[..., Any]:
    """The layer's call, compiled when it is first needed."""
    owner, compiled = layer.__dict__.get("_compiled_inside", (None, None))
    if owner is None or owner() is not layer:  # a deep copy has what the original compiled
        compiled = torch.compile(layer._call_impl, **options)
        layer.__dict__["_compiled_inside"] = weakref.ref(layer), compiled
    return compiled
