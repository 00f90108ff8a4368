"""The sparse blocks of a transformers model: put in, found, laid out, and compiled around."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from .._errors import reject
from ..nn import SparseMLP
from ..sparsify.blocks import lay_out, named_blocks
from ..sparsify.twin import BlockTwin
from .config import SparsityConfig

# The penalty's gradient flows through recomputed activations: reentrant checkpoints would lose it.
CHECKPOINTS = {"use_reentrant": False}


def sparse_mlps(model: nn.Module) -> list[SparseMLP]:
    """Every block of a model that runs on our kernels, first layer first."""
    return [block for _name, block in named_blocks(model)]


def set_neuron_major(model: nn.Module, neuron_major: bool) -> None:
    """Set the layout of the weights of every sparse block, also of those that `twell.sparsify_` found.

    True (the default) stores them neuron by neuron, which sparse execution reads fastest; False stores them
    contiguously as stock, which FSDP2 needs.
    """
    for mlp in sparse_mlps(model):
        mlp.neuron_major = neuron_major
        restore_layout(mlp)


def restore_layout(mlp: SparseMLP) -> None:
    """Give the weights the layout that the block wants; loading may have replaced it."""
    if isinstance(mlp, BlockTwin):
        lay_out(mlp)
        return
    weight = getattr(mlp.down_proj, "weight", None)
    if type(mlp.down_proj) is not nn.Linear or type(weight) is not nn.Parameter:
        return  # quantised, wrapped or sharded: not ours to lay out
    # Through .data: optimisers and tied modules keep the same Parameter.
    if not mlp.neuron_major:
        weight.data = weight.data.contiguous()
    elif not weight.mT.is_contiguous():
        weight.data = weight.data.mT.contiguous().mT


def install_sparse_mlps(layers: nn.ModuleList, config: SparsityConfig) -> None:
    """Replace the stock block of every decoder layer by a `SparseMLP`, before weights are drawn."""
    for layer, neurons in zip(layers, config.neurons_per_layer(), strict=True):
        layer.mlp = _sparse_twin(layer.mlp, neurons, config)


def _sparse_twin(stock: nn.Module, neurons: int, config: SparsityConfig) -> SparseMLP:
    down = stock.down_proj
    same_shape = config.sparsity_gated_mlp and neurons == down.in_features
    mlp = SparseMLP(
        down.out_features,
        neurons,
        gated=config.sparsity_gated_mlp,
        activation=config.sparsity_activation,
        bias=down.bias is not None,
        neuron_major=False,  # laid out after the weights are drawn, so that they equal the stock class's
        device="meta" if same_shape else down.weight.device,
        dtype=down.weight.dtype,
    )
    if same_shape:
        mlp.gate_proj, mlp.up_proj, mlp.down_proj = stock.gate_proj, stock.up_proj, down
    return mlp


def enable_checkpoints(model: PreTrainedModel) -> None:
    """Have each decoder layer computed again in the backward."""
    # transformers 5.23 renamed it, and warns about the old name.
    new_name = getattr(model, "activation_checkpointing_enable", None)
    (new_name or model.gradient_checkpointing_enable)(CHECKPOINTS)


def compile_inside_checkpoints(model: PreTrainedModel, **options: Any) -> None:
    """Compile each checkpointed decoder layer inside its checkpoint.

    Call it after `activation_checkpointing_enable({"use_reentrant": False})`, which transformers before 5.23
    calls `gradient_checkpointing_enable`; options go to `torch.compile`.

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
        reject(
            "model",
            "no checkpointed layers with sparse blocks",
            "gradient_checkpointing_enable() first, called activation_checkpointing_enable() since "
            "transformers 5.23",
        )
    for layer in layers:
        for mlp in sparse_mlps(layer):
            mlp.eager = True
        checkpoint = layer._gradient_checkpointing_func
        checkpoint = getattr(checkpoint, "_twell_checkpoint", checkpoint)  # called again, with other options
        layer._gradient_checkpointing_func = _compiled_inside(checkpoint, options)
        layer.__dict__.pop("_compiled_inside", None)


def _compiled_inside(checkpoint: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def run(function: Callable[..., Any], *arguments: Any) -> Any:
        layer, call, keywords = _checkpointed(function)
        return checkpoint(partial(_compiled_call(layer, call, options), **keywords), *arguments)

    outside = torch.compiler.disable(run, reason="its layer is compiled inside of it")
    outside._twell_checkpoint = checkpoint
    return outside


def _checkpointed(function: Callable[..., Any]) -> tuple[nn.Module, Callable[..., Any], dict[str, Any]]:
    """The layer behind what transformers hands to a checkpoint, its call, and keyword arguments.

    Up to 5.22 that is the layer's call, hooks included; later its own forward, with the layer as the first
    argument, and hooks run around the checkpoint.
    """
    given, bound, keywords = function, (), {}
    if isinstance(function, partial):
        given, bound, keywords = function.func, function.args, function.keywords
    if isinstance(given, MethodType):
        return given.__self__, given.__self__._call_impl, keywords
    layer = bound[0]
    return layer, MethodType(given, layer), keywords


def _compiled_call(layer: nn.Module, call: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """The layer's call, compiled when it is first needed."""
    owner, compiled = layer.__dict__.get("_compiled_inside", (None, None))
    if owner is None or owner() is not layer:  # a deep copy has what the original compiled
        compiled = torch.compile(call, **options)
        layer.__dict__["_compiled_inside"] = weakref.ref(layer), compiled
    return compiled
