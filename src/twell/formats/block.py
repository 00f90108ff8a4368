"""Block TwELL, our format: blocks of consecutive tokens share one list of active neurons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from .._errors import require_matrix, require_positive_int
from .base import PackedMatrix, canonical_zeros


@dataclass(frozen=True, repr=False, eq=False)
class BlockTwELL(PackedMatrix):
    """Block TwELL: per block of `rows` tokens, the union of active neurons and their values.

    A neuron is kept for a block if any of the block's tokens activates it. Its entry, a *slot*, is the
    neuron's index plus a vector of `rows` values (0 where a token does not activate it):

        block b = tokens b*rows .. (b+1)*rows - 1        (the last block is padded with zero tokens)

        starts[b] --+            counts[b] slots
                    v     +---------------------------------+
        neurons     ...   |   7 |  19 | 204 | ...           |   ascending within the block
        values      ...   |  v0 |  v0 |  v0 | ...           |   values[slot] = [v0 v1 ... v(rows-1)]
                          |  v1 |  v1 |  v1 |               |
                          |  .. |  .. |  .. |               |

    The slots of a block are contiguous, so the up and down projections of a block are dense matrix
    products over gathered weight rows. `starts` and `counts` are both stored: blocks may lie tightly
    (as `pack` writes them) or at a fixed stride (as a kernel that claims slots writes them).

    starts:   int64 [B]        first slot of each block
    counts:   int32 [B]        active neurons of each block
    neurons:  int32 [S]        neuron index per slot, no limit on H
    values:   dtype [S, rows]  values per slot, one per token of the block
    """

    starts: Tensor
    counts: Tensor
    neurons: Tensor
    values: Tensor
    shape: tuple[int, int]
    rows: int

    @classmethod
    def pack(cls, dense: Tensor, rows: int = 128) -> Self:
        """Pack a floating-point matrix [M, H]. Synchronises with the device (slots are dynamic)."""
        require_matrix("dense", dense)
        dense = dense.detach()
        require_positive_int("rows", rows)
        tokens, columns = dense.shape
        blocks = -(-tokens // rows)
        padded = torch.nn.functional.pad(dense, (0, 0, 0, blocks * rows - tokens))
        tiled = canonical_zeros(padded).reshape(blocks, rows, columns)
        active = (tiled != 0).any(dim=1)
        counts = active.sum(dim=1, dtype=torch.int32)
        block, neuron = active.nonzero(as_tuple=True)
        return cls(
            starts=counts.cumsum(0) - counts,
            counts=counts,
            neurons=neuron.to(torch.int32),
            values=tiled[block, :, neuron],
            shape=(tokens, columns),
            rows=rows,
        )

    @property
    def blocks(self) -> int:
        return self.counts.numel()

    def slots(self) -> tuple[Tensor, Tensor]:
        """int64 [used], int64 [used]: the slots in use and the block each belongs to."""
        block = torch.repeat_interleave(self.counts)
        first = (self.counts.cumsum(0) - self.counts)[block]
        within = torch.arange(block.numel(), device=self.device) - first
        return self.starts[block] + within, block

    def unpack(self) -> Tensor:
        """dtype [M, H]. Synchronises with the device."""
        tokens, columns = self.shape
        dense = torch.zeros(self.blocks, self.rows, columns, dtype=self.dtype, device=self.device)
        slot, block = self.slots()
        dense[block, :, self.neurons[slot]] = self.values[slot]
        return dense.view(self.blocks * self.rows, columns)[:tokens].contiguous()

    def nnz(self) -> int:
        """Non-zero values. Synchronises with the device."""
        slot, _ = self.slots()
        return int((self.values[slot] != 0).sum())

    def mean_union(self) -> float:
        """Active neurons per block, averaged over blocks. Synchronises with the device."""
        return float(self.counts.sum()) / max(self.blocks, 1)

    def __repr__(self) -> str:
        details = [f"rows={self.rows}", f"blocks={self.blocks}"]
        if self.device.type != "meta":
            details.append(f"union/block={self.mean_union():.1f}")
        return self._describe(*details)
