"""Which neurons fire, which are dead, and how dead ones are revived."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from .._errors import reject
from ..nn import SparseMLP
from .distributed import sum_over_all


class FiringTracker:
    """Counts how often each neuron fires between reports, and for how many tokens it has been silent.

    Counts are exact over all processes, for one reduction per optimiser step. Layers lie one after the other
    in flat tensors [N], N the neurons of all layers. Nothing waits for the device until a result is asked
    for.
    """

    def __init__(self, layer_sizes: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.layer_sizes = tuple(layer_sizes)
        neurons = sum(self.layer_sizes)
        # The last entry counts tokens, so that one reduction brings both.
        self._step = torch.zeros(neurons + 1, dtype=torch.int64, device=device)
        self._window = torch.zeros(neurons + 1, dtype=torch.int64, device=device)
        self.silent = torch.zeros(neurons, dtype=torch.int64, device=device)
        self._seen = torch.zeros((), dtype=torch.int64, device=device)  # tokens since the first step

    def add(self, firing: Sequence[Tensor], tokens: int) -> None:
        """Add the counts of one micro-batch on this process: int64 [H] per layer."""
        sizes = tuple(counts.numel() for counts in firing)
        if sizes != self.layer_sizes:
            reject("firing", f"layers of {sizes}", f"layers of {self.layer_sizes}")
        self._step[:-1] += torch.cat([counts.detach() for counts in firing])
        self._step[-1] += tokens

    def finish_step(self) -> None:
        """End an optimiser step, on every process."""
        sum_over_all(self._step)
        fired, tokens = self._step[:-1] > 0, self._step[-1]
        self.silent = torch.where(fired, 0, self.silent + tokens)
        self._seen += tokens
        self._window += self._step
        self._step.zero_()

    def active_per_token(self) -> list[float] | None:
        """Mean active neurons per token of every layer since the last call; None without any token."""
        sums = [part.sum() for part in self._window[:-1].split(self.layer_sizes)]
        totals = torch.stack([*sums, self._window[-1]]).tolist()
        self._window.zero_()
        return [total / totals[-1] for total in totals[:-1]] if totals[-1] else None

    def dead(self, after: int) -> list[Tensor]:
        """bool [H] per layer: neurons that have been silent for at least `after` tokens."""
        return list((self.silent >= after).split(self.layer_sizes))

    def dead_shares(self, after: int | None = None) -> tuple[list[float], int]:
        """The share of neurons per layer that were silent in the last tokens, and the number of these tokens:
        `after`, or fewer early in a run."""
        window = self._seen if after is None else self._seen.clamp(max=after)
        silent = (self.silent >= window) & (window > 0)
        shares = [part.double().mean() for part in silent.split(self.layer_sizes)]
        *shares, tokens = torch.stack([*shares, window.double()]).tolist()
        return shares, int(tokens)

    def revived(self, layer: int, neurons: Tensor) -> None:
        """Restart the count of revived neurons (indices) of a layer."""
        self.silent.split(self.layer_sizes)[layer][neurons] = 0

    def state_dict(self) -> dict[str, Tensor]:
        """Equal on every process, after `finish_step`."""
        return {"silent": self.silent.cpu(), "window": self._window.cpu(), "seen": self._seen.cpu()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if state["silent"].shape != self.silent.shape:
            reject("firing state", f"{state['silent'].numel()} neurons", f"{self.silent.numel()} neurons")
        self.silent.copy_(state["silent"])
        self._window.copy_(state["window"])
        # Checkpoints of earlier versions lack "seen"; the longest silence is the best guess.
        self._seen.copy_(state["seen"] if "seen" in state else state["silent"].max())


@torch.no_grad()
def revive(
    mlp: SparseMLP,
    dead: Tensor,
    *,
    std: float,
    generator: torch.Generator,
    optimizer: torch.optim.Optimizer | None,
) -> Tensor:
    """Draw new selector rows for `dead` neurons and clear their optimiser state; returns their indices [n].

    dead:       bool [H], the same on every process.
    std:        standard deviation of the new rows.
    generator:  on the CPU and in the same state on every process, so that all draw the same rows.
    optimizer:  loses its moments for these rows: state with the shape of the weight.
    """
    neurons = dead.nonzero().flatten()
    if not neurons.numel():
        return neurons
    selector, first, step = mlp.selector_rows()
    weight, rows = selector.weight, first + step * neurons
    if weight.dim() != 2 or weight.shape[1] != mlp.hidden_size or weight.shape[0] < dead.numel():
        accepted = "0 for GPT-2's Conv1D and under FSDP 1; or FSDP 2"
        reject("recipe.revive_every", f"weights of shape {tuple(weight.shape)}", accepted)
    _set_rows(weight, rows, torch.randn(neurons.numel(), weight.shape[1], generator=generator) * std)
    if selector.bias is not None:
        _set_rows(selector.bias, rows, torch.zeros(neurons.numel()))
    if optimizer is not None:
        for parameter in (weight, selector.bias):
            if parameter is not None:
                _clear_state(optimizer, parameter, rows)
    return neurons


def _set_rows(tensor: Tensor, rows: Tensor, values: Tensor) -> None:
    """Set rows [n] of a tensor, as far as this process holds them."""
    local, first = _local_rows(tensor)
    here = (rows >= first) & (rows < first + local.shape[0])
    local[rows[here] - first] = values.to(local)[here.to(local.device)]


def _local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """The part of a tensor that this process holds, and the index of its first row."""
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
