"""Counts how often neurons fire while a model runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._errors import reject
from ..nn import SparseMLP
from ..sparsify.blocks import named_blocks

Firing = Mapping[str, Tensor] | Sequence[Tensor]


class BlockFiring:
    """What a block did while it was recorded.

    tokens:  those it was called with.
    firing:  int64 [H], for how many of them each neuron was active.
    l1:      float64 [], sum of |hidden| over all of them.
    """

    def __init__(self, block: SparseMLP) -> None:
        device = block.down_proj.weight.device
        self.tokens = 0
        self.firing = torch.zeros(block.intermediate_size, dtype=torch.int64, device=device)
        self.l1 = torch.zeros((), dtype=torch.float64, device=device)
        self._recorded_before: list[bool] = []

    def start(self, block: SparseMLP, inputs: tuple[Any, ...]) -> None:
        """Before a call."""
        self._recorded_before.append(block.record)
        block.record, block.last_stats = True, None

    def finish(self, block: SparseMLP, inputs: tuple[Any, ...], output: Any) -> None:
        """After a call, and after one that failed."""
        stats, block.record = block.last_stats, self._recorded_before.pop()
        if not block.record:
            block.last_stats = None
        if stats is not None:
            tokens = inputs[0].numel() // max(inputs[0].shape[-1], 1)
            self.tokens += tokens
            self.firing += stats.firing.detach()
            self.l1 += stats.l1.detach().double() * tokens


@contextmanager
def recorded_firing(model: nn.Module) -> Iterator[dict[str, BlockFiring]]:
    """What every block does meanwhile, by its name. Nothing waits for the device.

    Calls that a stock forward takes over, because of hooks or other dtypes, are not counted.
    """
    blocks = named_blocks(model)
    recorded = {name: BlockFiring(block) for name, block in blocks}
    hooks = []
    try:
        for name, block in blocks:
            hooks.append(block.register_forward_pre_hook(recorded[name].start))
            # First of all: recorders inside one another end in reverse order.
            hooks.append(block.register_forward_hook(recorded[name].finish, prepend=True, always_call=True))
        yield recorded
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Turn dropout off, then restore the mode of every module."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def firing_on(model: nn.Module, data: Iterable[Mapping[str, Any] | Tensor]) -> dict[str, Tensor]:
    """int64 [H] of every block, on batches that the model is called with."""
    accepted = "an iterable of batches, each a dict for model(**batch) or a tensor for model(batch)"
    if isinstance(data, (Tensor, Mapping, str)) or not isinstance(data, Iterable):
        reject("data", f"a {type(data).__name__}", accepted)
    with torch.no_grad(), eval_mode(model), recorded_firing(model) as recorded:
        for batch in data:
            if isinstance(batch, Mapping):
                model(**batch)
            elif isinstance(batch, Tensor):
                model(batch)
            else:
                reject("data", f"a batch that is a {type(batch).__name__}", accepted)
    return counts_of(recorded, "data")


def counts_of(recorded: Mapping[str, BlockFiring], argument: str) -> dict[str, Tensor]:
    """int64 [H] of every block; ValueError, naming `argument`, if one was never called."""
    for name, block in recorded.items():
        if not block.tokens:
            reject(
                argument,
                f"no token for which block {name!r} ran on our kernels",
                "data that reaches every block; twell.explain(model, batch) shows what runs",
            )
    return {name: block.firing for name, block in recorded.items()}


def checked_firing(firing: Firing, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """`firing` by the names of blocks; sizes: H of each."""
    accepted = f"an int tensor [H] for each of {len(sizes)} blocks, by name or in order"
    if isinstance(firing, Mapping):
        if firing.keys() != sizes.keys():
            odd = sorted(map(str, firing.keys() ^ sizes.keys()))
            state = "missing" if odd[0] in sizes else "unknown"
            reject("firing", f"{state} block {odd[0]!r}", accepted)
        given = {name: firing[name] for name in sizes}
    elif isinstance(firing, Sequence) and not isinstance(firing, str):
        if len(firing) != len(sizes):
            reject("firing", f"{len(firing)} entries", accepted)
        given = dict(zip(sizes, firing, strict=True))
    else:
        reject("firing", f"a {type(firing).__name__}", accepted)
    for name, counts in given.items():
        if not isinstance(counts, Tensor):
            reject("firing", f"a {type(counts).__name__} for block {name!r}", accepted)
        if counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool:
            reject("firing", f"{counts.dtype} for block {name!r}", accepted)
        if counts.shape != (sizes[name],):
            reject("firing", f"shape {tuple(counts.shape)} for block {name!r}", f"({sizes[name]},), its H")
        if bool((counts < 0).any()):
            reject("firing", f"{int(counts.min())} for block {name!r}", "counts >= 0")
    return given
