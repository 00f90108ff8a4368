"""The three ways to finish a chunk of tokens once its activations are known: row, block and dense.

Each takes x [m, D] and activated [m, H] and returns y [m, D]; `stats` gathers statistics where asked for.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .csr import RowPattern, RowSums, sampled_dot
from .weights import WeightViews


class Stats:
    """Running sums of the recorded statistics."""

    def __init__(self, neurons: int, dtype: torch.dtype) -> None:
        self._dtype = torch.promote_types(dtype, torch.float32)
        self._sums: list[float] = []
        self.firing = torch.zeros(neurons, dtype=torch.int64, device="cpu")

    def add_hidden(self, hidden: Tensor) -> None:
        self._sums.append(hidden.abs().sum(dtype=self._dtype).item())

    def l1(self, tokens: int) -> Tensor:
        """[]: the sum of what was added, per token."""
        try:
            total = math.fsum(self._sums)
        except OverflowError:
            total = math.inf
        return torch.tensor(total / max(tokens, 1), dtype=self._dtype, device="cpu")


def finish_single_row(
    x: Tensor, activated: Tensor, neurons: Tensor, weights: WeightViews, stats: Stats | None
) -> Tensor:
    """The row path for one token: no mask, no pattern, as few operations as possible.

    neurons: int64 [nnz], the active ones.
    At D 1024, H 4096 an operation between two cold matrix products costs about 15 us, a sixth of the whole
    sparse part.
    """
    wide = weights.wide_dtype
    hidden = activated[0].index_select(0, neurons).to(wide)
    if weights.gated:
        up = torch.mv(weights.gather_up(neurons).to(wide), x[0].to(wide))
        hidden *= weights.add_up_bias(up, neurons)
    if stats is not None:
        stats.add_hidden(hidden)
        stats.firing[neurons] += 1
    return weights.finish(weights.single_down(hidden, neurons)).unsqueeze(0)


def finish_row(
    x: Tensor,
    activated: Tensor,
    active: Tensor,
    count: int,
    weights: WeightViews,
    stats: Stats | None,
) -> Tensor:
    pattern = RowPattern.of(active, count)
    hidden = activated.view(-1).index_select(0, pattern.flat).to(weights.wide_dtype)
    if weights.gated:
        up, columns = weights.up_rows(pattern)
        dots = sampled_dot(x.to(weights.wide_dtype), up, pattern, columns)
        hidden *= weights.add_up_bias(dots, pattern.columns)
    down, columns = weights.down_rows(pattern)
    if stats is not None:
        stats.add_hidden(hidden)
        stats.firing += pattern.firing()
    return weights.finish(RowSums(pattern.offsets).of(down, columns, hidden))


def finish_block(
    x: Tensor,
    activated: Tensor,
    active: Tensor,
    block_rows: int,
    weights: WeightViews,
    stats: Stats | None,
) -> Tensor:
    wide = weights.wide_dtype
    outputs = []
    for start in range(0, x.shape[0], block_rows):
        rows = slice(start, start + block_rows)
        union = active[rows].any(dim=0).nonzero().squeeze(1)
        hidden = activated[rows].index_select(1, union).to(wide)
        if weights.gated:
            up = weights.gather_up(union).to(wide)
            hidden *= weights.add_up_bias(x[rows].to(wide) @ up.mT, union)
        outputs.append(weights.finish(hidden @ weights.gather_down(union).to(wide)))
        if stats is not None:
            stats.add_hidden(hidden)
    if stats is not None:
        stats.firing += active.sum(dim=0)
    return torch.cat(outputs)


def finish_dense(x: Tensor, activated: Tensor, weights: WeightViews, stats: Stats | None) -> Tensor:
    if stats is not None:
        stats.firing += activated.bool().sum(dim=0)
    hidden = activated
    if weights.gated:
        hidden = hidden.mul_(weights.project_up(x))
    if stats is not None:
        stats.add_hidden(hidden)
    return weights.project_down(hidden)
