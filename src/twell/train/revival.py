"""Dead neurons start anew: their selector rows are drawn again, their optimiser state is cleared."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from .._checks import reject
from ..nn import SparseMLP


@torch.no_grad()
def revive(
    mlp: SparseMLP,
    dead: Tensor,
    *,
    std: float,
    generator: torch.Generator,
    optimizer: torch.optim.Optimizer | None,
) -> Tensor:
    """Draw the selector rows of `dead` neurons again; returns their indices [n].

    dead:       bool [H], the same on every process.
    std:        of the normal distribution that rows come from.
    generator:  on the CPU and in the same state on every process, so that all draw the same.
    optimizer:  whose state of those rows is cleared; only moments with the shape of the weight.
    """
    selector = mlp.gate_proj if mlp.gated else mlp.up_proj
    neurons = dead.nonzero().flatten()
    if not neurons.numel():
        return neurons
    weight = selector.weight
    if weight.dim() != 2 or weight.shape[0] != dead.numel():
        reject("recipe.revive_every", f"weights of shape {tuple(weight.shape)}", "0 under FSDP 1; or FSDP 2")
    rows = torch.randn(neurons.numel(), weight.shape[1], generator=generator) * std
    _set_rows(weight, neurons, rows)
    if selector.bias is not None:
        _set_rows(selector.bias, neurons, torch.zeros(neurons.numel()))
    if optimizer is not None:
        for parameter in (weight, selector.bias):
            if parameter is not None:
                _clear_state(optimizer, parameter, neurons)
    return neurons


def _set_rows(tensor: Tensor, rows: Tensor, values: Tensor) -> None:
    """Rows [n] of a tensor, or those of them that this process holds."""
    local, first = _local_rows(tensor)
    here = (rows >= first) & (rows < first + local.shape[0])
    local[rows[here] - first] = values.to(local)[here.to(local.device)]


def _local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """What this process holds of a tensor, and the number of its first row."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    mesh = tensor.device_mesh
    sharded = [d for d, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if len(sharded) > 1 or any(tensor.placements[d] != Shard(0) for d in sharded):
        reject("weight", f"a DTensor with {tensor.placements}", "rows sharded over one mesh dimension")
    first = 0
    for dimension in sharded:
        rows_each = -(-tensor.shape[0] // mesh.size(dimension))  # as torch.chunk splits
        first = min(rows_each * mesh.get_local_rank(dimension), tensor.shape[0])
    return tensor.to_local(), first


def _clear_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, rows: Tensor) -> None:
    state = getattr(optimizer, "optimizer", optimizer).state.get(parameter, {})  # behind accelerate's wrapper
    for value in state.values():
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            _set_rows(value, rows, torch.zeros(rows.numel(), *parameter.shape[1:]))
