"""Counts how active a block is while text streams through it, in memory that does not grow with the text."""

from __future__ import annotations

import torch
from torch import Tensor

from .schema import Firing, HotNeuron, Nnz, Overflow, OverflowShare, Overlap

UNION_SIZES = (8, 16, 32, 64, 128, 256)
TILE = 256  # neurons of a tile in the paper's inference format
COMPRESSIONS = (2, 4, 8)  # the paper's; each leaves TILE / C - 1 entries
HEAVY_ROW = 128  # non-zeros that a row of the paper's training format holds
_HOTTEST = 16
_CURVE_POINTS = 200


class BlockCounts:
    """What one block with H = `neurons` does on sequences of `length` tokens; all counts stay on `device`."""

    def __init__(self, neurons: int, length: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tokens = 0
        self._neurons = neurons
        self._firing = zeros(neurons)
        self._nnz_histogram = zeros(neurons + 1)
        tile = min(TILE, neurons)
        self._tile_histogram, self._fullest_histogram = zeros(tile + 1), zeros(tile + 1)
        # The rest needs tokens in the order of the text.
        self.sequences = 0
        self._position_sums = zeros(length)
        self._pairs = 0
        self._kept, self._jaccard = zeros(dtype=torch.float64), zeros(dtype=torch.float64)
        self._unions = {size: [zeros(), 0] for size in UNION_SIZES}
        self._unions_apart = {size: [zeros(), 0] for size in UNION_SIZES}

    def add(self, active: Tensor, ordered: bool) -> Tensor:
        """Count bool [B, S, H], B sequences of S tokens; returns int64 [B, S], active neurons per token.

        ordered: False where it is unknown which tokens these are, as in an expert that gets some of them;
                 the shape is then [1, tokens, H].
        """
        flat = active.flatten(0, 1)
        values = flat.float()  # CPUs add these up ten times as fast as bools, and as exactly
        tiles = _tile_counts(values)
        nnz = tiles.sum(-1).view(active.shape[:2])
        self.tokens += flat.shape[0]
        self._firing += values.sum(0).long()
        _count(self._nnz_histogram, nnz)
        _count(self._tile_histogram, tiles)
        _count(self._fullest_histogram, tiles.amax(-1))
        if ordered:
            self.sequences += active.shape[0]
            self._position_sums[: active.shape[1]] += nnz.sum(0)
            self._count_pairs(values.view(active.shape), nnz)
            _add_unions(self._unions, flat)
            self._add_unions_apart(flat)
        return nnz

    def _count_pairs(self, values: Tensor, nnz: Tensor) -> None:
        """Tokens and the ones before them, in the same sequence."""
        if values.shape[1] < 2:
            return
        both = (values[:, 1:] * values[:, :-1]).sum(-1).long()
        now, before = nnz[:, 1:], nnz[:, :-1]
        # Of a token that wakes nothing, nothing is new: it counts as sharing all.
        self._kept += torch.where(now > 0, both / now.clamp(min=1).double(), 1.0).sum()
        either = now + before - both
        self._jaccard += torch.where(either > 0, both / either.clamp(min=1).double(), 1.0).sum()
        self._pairs += both.numel()

    def _add_unions_apart(self, flat: Tensor) -> None:
        """Tokens as far apart as the batch allows, as those of a decode batch are."""
        for size, sums in self._unions_apart.items():
            groups = flat.shape[0] // size
            if groups:
                sums[0] += _union(flat[: groups * size].view(size, groups, -1), 0).count_nonzero()
                sums[1] += groups

    def nnz(self) -> Nnz:
        histogram = self._nnz_histogram.cpu()
        mean = float((histogram * torch.arange(len(histogram))).sum()) / self.tokens
        return Nnz(
            mean=mean,
            share=mean / self._neurons,
            p50=_quantile(histogram, 0.5),
            p99=_quantile(histogram, 0.99),
            max=_quantile(histogram, 1.0),
        )

    def firing(self) -> Firing:
        counts = self._firing.cpu()
        ordered, neurons = counts.sort(descending=True, stable=True)
        ranks = curve_ranks(len(counts))
        return Firing(
            dead=int((counts == 0).sum()),
            rank=[rank + 1 for rank in ranks],
            rate=[int(ordered[rank]) / self.tokens for rank in ranks],
            hottest=[
                HotNeuron(neuron=int(neurons[place]), rate=int(ordered[place]) / self.tokens)
                for place in range(min(_HOTTEST, len(counts)))
                if ordered[place] > 0
            ],
        )

    def by_position(self, starts: list[int]) -> list[float] | None:
        """Mean active neurons of tokens between these positions, the last up to the sequence's end."""
        if not self.sequences:
            return None
        sums = self._position_sums.cpu()
        ends = [*starts[1:], len(sums)]
        return [
            int(sums[start:end].sum()) / (self.sequences * (end - start))
            for start, end in zip(starts, ends, strict=True)
        ]

    def overlap(self) -> Overlap | None:
        if not self._pairs:
            return None
        rates = self._firing.cpu().double() / self.tokens
        total = float(rates.sum())
        return Overlap(
            kept=float(self._kept) / self._pairs,
            kept_by_chance=float(rates.square().sum()) / total if total else 0.0,
            jaccard=float(self._jaccard) / self._pairs,
        )

    def unions(self) -> list[float | None]:
        return [_mean(*sums) for sums in self._unions.values()]

    def unions_apart(self) -> list[float | None]:
        return [_mean(*sums) for sums in self._unions_apart.values()]

    def overflow(self) -> Overflow:
        tiles, rows, nnz = (
            histogram.cpu()
            for histogram in (self._tile_histogram, self._fullest_histogram, self._nnz_histogram)
        )

        def share_above(histogram: Tensor, capacity: int) -> float:
            return int(histogram[capacity + 1 :].sum()) / max(int(histogram.sum()), 1)

        shares = []
        for compression in COMPRESSIONS:
            capacity = TILE // compression - 1
            shares.append(
                OverflowShare(
                    compression=compression,
                    capacity=capacity,
                    tiles=share_above(tiles, capacity),
                    rows=share_above(rows, capacity),
                )
            )
        return Overflow(
            tile=TILE,
            fullest_tile=_quantile(tiles, 1.0),
            by_compression=shares,
            heavy_row=HEAVY_ROW,
            heavy_rows=share_above(nnz, HEAVY_ROW),
        )


def curve_ranks(neurons: int) -> list[int]:
    """Ranks from 0, about evenly spaced on a logarithmic scale, first and last included."""
    steps = torch.logspace(0, torch.log10(torch.tensor(float(neurons))).item(), _CURVE_POINTS)
    return sorted({min(max(round(float(step)), 1), neurons) - 1 for step in steps} | {0, neurons - 1})


def position_starts(length: int) -> list[int]:
    """Where ranges of positions begin: single ones up to 16, then each a fifth longer than the last."""
    starts = list(range(min(length, 16)))
    while starts and starts[-1] < length:
        starts.append(max(starts[-1] + 1, int(starts[-1] * 1.2)))
    return [start for start in starts if start < length]


def _count(histogram: Tensor, values: Tensor) -> None:
    """Without asking the device how large values are, as bincount does."""
    values = values.flatten()
    histogram.scatter_add_(0, values, torch.ones_like(values))


def _add_unions(unions: dict[int, list], flat: Tensor) -> None:
    """Consecutive tokens, across the ends of sequences, as the kernels cut a batch into blocks."""
    union, width = flat, 1
    for size, sums in unions.items():
        groups = union.shape[0] * width // size
        if not groups:
            return
        union = _union(union[: groups * size // width].view(groups, size // width, -1), 1)
        width = size
        sums[0] += union.count_nonzero()
        sums[1] += groups


def _union(active: Tensor, dim: int) -> Tensor:
    """`any`, which takes a CPU ten times as long."""
    return active.view(torch.uint8).amax(dim).view(torch.bool)


def _tile_counts(values: Tensor) -> Tensor:
    """int64 [M, tiles]: active neurons in each tile; the last one may be narrower."""
    whole = values.shape[1] // TILE * TILE
    parts = [values[:, :whole].unflatten(1, (-1, TILE)).sum(-1)] if whole else []
    if whole < values.shape[1]:
        parts.append(values[:, whole:].sum(-1, keepdim=True))
    return torch.cat(parts, 1).long()


def _mean(total: Tensor, count: int) -> float | None:
    return int(total) / count if count else None


def _quantile(histogram: Tensor, q: float) -> int:
    """The smallest value that at least a share q of all lies at or below."""
    reached = histogram.cumsum(0) >= q * histogram.sum()
    return int(reached.int().argmax())
