"""Puts our feed-forward blocks into a transformers model, finds them and lays out their weights."""

from __future__ import annotations

from torch import nn

from ..nn import SparseMLP
from ..sparsify.blocks import named_blocks
from .config import SparsityConfig


def sparse_mlps(model: nn.Module) -> list[SparseMLP]:
    """Every block of a model that runs on our kernels, first layer first."""
    return [block for _name, block in named_blocks(model)]


def set_neuron_major(model: nn.Module, neuron_major: bool) -> None:
    """Set the layout of every `down_proj` weight.

    True (the default of the models) stores it neuron by neuron, which sparse execution reads fastest; False
    stores it contiguously as stock, which FSDP2 needs.
    """
    for mlp in sparse_mlps(model):
        mlp.neuron_major = neuron_major
        restore_layout(mlp)


def restore_layout(mlp: SparseMLP) -> None:
    """Give `down_proj.weight` the layout that the block wants; loading may have replaced it."""
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
