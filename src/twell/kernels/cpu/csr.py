"""The row path's two primitives on a CSR pattern: sampled dot products and weighted row sums."""

from __future__ import annotations

import warnings
from functools import cached_property

import torch
from torch import Tensor

_WORD = torch.int64.itemsize  # mask bytes looked at in one comparison

# An embedding bag adds rows one after the other, so long sums are cut into pieces. Worst fp32 error over
# stock's, D 128 to 1024, 4,096 tokens, frequent neurons: 1,024 rows 3.5, 512 2.2, 256 1.7, 128 1.1, and no
# slower. 64 keeps single rows of random blocks within three times stock's error; 128 erred 1.2 to 2 times as
# much.
PIECE_ROWS = 64


class RowPattern:
    """Positions of the active entries of one mask [m, H], row-major (CSR).

    flat:     int64 [nnz]    positions in the flattened mask, ascending
    columns:  int64 [nnz]    their neurons
    offsets:  int64 [m + 1]  where each row starts
    """

    def __init__(self, flat: Tensor, shape: torch.Size) -> None:
        rows, neurons = shape
        row = flat // max(neurons, 1)
        self.shape = shape
        self.flat = flat
        self.columns = flat - row * neurons
        self.offsets = torch.searchsorted(row, torch.arange(rows + 1, device="cpu"))

    @classmethod
    def of(cls, active: Tensor, count: int) -> RowPattern:
        """From a contiguous boolean mask [m, H] with `count` True entries."""
        flat_mask = active.view(-1)
        # With few True bytes, finding the non-empty 8-byte words first is faster: 256 x 4096 at 1%, with the
        # comparison that makes the mask, 0.53 ms against 1.4 for plain nonzero.
        if flat_mask.numel() % _WORD == 0 and count * 2 * _WORD < flat_mask.numel():
            word = flat_mask.view(torch.int64).nonzero().squeeze(1)
            inside = flat_mask.view(-1, _WORD).index_select(0, word).nonzero()
            flat = word.index_select(0, inside[:, 0]) * _WORD + inside[:, 1]
        else:
            flat = flat_mask.nonzero().squeeze(1)
        return cls(flat, active.shape)

    def firing(self) -> Tensor:
        """int64 [H]: active entries per neuron."""
        return torch.bincount(self.columns, minlength=self.shape[1])

    @cached_property
    def union(self) -> Tensor:
        """int64 [K]: the neurons that any row activates, ascending."""
        return self.firing().nonzero().squeeze(1)

    @cached_property
    def union_columns(self) -> Tensor:
        """int64 [nnz]: `columns` re-numbered as positions in `union`."""
        position = torch.empty(self.shape[1], dtype=torch.int64, device="cpu")
        position[self.union] = torch.arange(self.union.numel(), device="cpu")
        return position.index_select(0, self.columns)


def sampled_dot(x: Tensor, weight: Tensor, pattern: RowPattern, columns: Tensor) -> Tensor:
    """[nnz]: dot(x[row], weight[column]) for every entry of the pattern; x [m, D], weight [K, D]."""
    samples = torch.sparse_csr_tensor(
        pattern.offsets,
        columns,
        torch.zeros(columns.numel(), dtype=x.dtype, device="cpu"),
        size=(x.shape[0], weight.shape[0]),
        check_invariants=False,
        device="cpu",
    )
    return torch.sparse.sampled_addmm(samples, x, weight.mT, beta=0.0).values()


class RowSums:
    """Weighted sums of rows over one pattern, in pieces of at most `PIECE_ROWS` rows.

    offsets: int64 [m + 1], where each row of the pattern starts.
    """

    def __init__(self, offsets: Tensor) -> None:
        pieces = (offsets.diff() + (PIECE_ROWS - 1)).floor_divide_(PIECE_ROWS)
        self._starts, self._groups = offsets, None
        if bool((pieces > 1).any()):
            ends = pieces.cumsum(0)
            row = torch.repeat_interleave(pieces)
            piece = torch.arange(row.numel(), device="cpu")
            inside = piece - (ends - pieces).index_select(0, row)
            starts = offsets.index_select(0, row) + inside * PIECE_ROWS
            self._starts = torch.cat((starts, offsets[-1:]))
            self._groups = torch.nn.functional.pad(ends, (1, 0))

    def of(self, rows: Tensor, columns: Tensor, scale: Tensor) -> Tensor:
        """[m, D]: per row of the pattern, the sum of scale[entry] * rows[columns[entry]].

        rows [K, D]; columns int64 [nnz]; scale [nnz].
        """
        parts = _bags(rows, scale, columns, self._starts)
        if self._groups is None:
            return parts
        return _bags(parts, None, torch.arange(parts.shape[0], device="cpu"), self._groups)


def _bags(rows: Tensor, scale: Tensor | None, columns: Tensor, offsets: Tensor) -> Tensor:
    bags = torch.embedding_bag(
        rows, columns, offsets, mode=0, per_sample_weights=scale, include_last_offset=True
    )
    return bags[0]


def _try_sampled_dot() -> bool:
    """Whether this torch build has the sampled product; swallows its one-time "CSR is beta" warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = torch.ones(1, 1, dtype=torch.float32, device="cpu")
        try:
            csr = torch.sparse_csr_tensor([0, 1], [0], one[0] * 0, size=(1, 1), device="cpu")
            return torch.sparse.sampled_addmm(csr, one, one, beta=0.0).values().item() == 1.0
        except RuntimeError:
            return False


# Tried at import: the first call might come under a fake-tensor mode, a trace or a transform.
SAMPLED_DOT_AVAILABLE = _try_sampled_dot()
