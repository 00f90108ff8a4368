"""Row TwELL, the paper's inference format: each (token, tile) packs its non-zeros into 32-bit words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn, Self

import torch
from torch import Tensor

from .._errors import reject, require_choice, require_matrix, require_positive_int
from .base import PackedMatrix

MAX_COLUMNS = 65_535  # a word holds a 16-bit neuron index


@dataclass(frozen=True, repr=False, eq=False)
class TwELL(PackedMatrix):
    """Row TwELL, the paper's inference format.

    The H columns are cut into tiles of `tile` neurons. Each (row, tile) owns tile/compression words of 32
    bits, 32 of them with tile 256 and compression 8:

        row m   | tile 0: 32 words | tile 1: 32 words | ... | tile ceil(H/256)-1: 32 words |
                       |
                       +--> word 0    word 1            word 2            ...   word 31
                            count     [value|index]     [value|index]           unused if count < 31
                                       31..16 15..0
                                       bf16   neuron, global within the row

    `pack` writes entries in ascending order; readers may not rely on it. A tile with more than
    tile/compression - 1 non-zeros overflows: the excess goes to a side store sorted by row, and word 0
    counts only what the tile itself holds, so a reader of the words never runs out of its tile.

    words:          uint32 [M, ceil(H/tile) * tile/compression]
    spill_rows:     int32 [S]     token of each spilled entry
    spill_indices:  int32 [S]     its neuron
    spill_values:   bfloat16 [S]  its value
    """

    words: Tensor
    spill_rows: Tensor
    spill_indices: Tensor
    spill_values: Tensor
    shape: tuple[int, int]
    tile: int
    compression: int

    @classmethod
    def pack(cls, dense: Tensor, tile: int = 256, compression: int = 8, *, overflow: str = "error") -> Self:
        """Pack a bfloat16 matrix [M, H], H <= 65,535.

        overflow: "error" raises when a tile holds more than tile/compression - 1 non-zeros, "spill"
        keeps the excess in the side store. Synchronises with the device (the spill size is dynamic).
        """
        require_matrix("dense", dense)
        dense = dense.detach()
        if dense.dtype != torch.bfloat16:
            reject("dense", f"dtype {dense.dtype}", "torch.bfloat16, the dtype of TwELL words")
        require_choice("overflow", overflow, ("error", "spill"))
        _check_tile(tile, compression)
        rows, columns = dense.shape
        if columns > MAX_COLUMNS:
            reject(
                "dense",
                f"H = {columns} columns",
                f"at most {MAX_COLUMNS}, the limit of row TwELL's 16-bit index (BlockTwELL has none)",
            )
        tiles = -(-columns // tile)
        words_per_tile = tile // compression
        padded = torch.nn.functional.pad(dense, (0, tiles * tile - columns)).contiguous()
        active = padded.view(rows, tiles, tile) != 0
        slot = active.cumsum(-1, dtype=torch.int32)  # 1-based within the tile
        counts = active.sum(-1, dtype=torch.int32)

        fits = active & (slot < words_per_tile)
        words = torch.zeros(rows, tiles, words_per_tile, dtype=torch.int32, device=dense.device)
        words[..., 0] = counts.clamp(max=words_per_tile - 1)
        m, t, column = fits.nonzero(as_tuple=True)
        neuron = t * tile + column
        bits = dense[m, neuron].view(torch.int16).to(torch.int32)
        words[m, t, slot[m, t, column]] = (bits << 16) | neuron.to(torch.int32)

        m, t, column = (active & ~fits).nonzero(as_tuple=True)
        if m.numel() and overflow == "error":
            _reject_overflow(counts, words_per_tile - 1)
        neuron = t * tile + column
        return cls(
            words=words.view(rows, tiles * words_per_tile).view(torch.uint32),
            spill_rows=m.to(torch.int32),
            spill_indices=neuron.to(torch.int32),
            spill_values=dense[m, neuron],
            shape=(rows, columns),
            tile=tile,
            compression=compression,
        )

    @property
    def words_per_tile(self) -> int:
        return self.tile // self.compression

    @property
    def tiles(self) -> int:
        return -(-self.shape[1] // self.tile)

    @property
    def capacity(self) -> int:
        """Non-zeros that one tile holds before it spills."""
        return self.words_per_tile - 1

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    def _with_dtype(self, dtype: torch.dtype) -> Self:
        reject("dtype", dtype, "torch.bfloat16, the only value dtype of a TwELL word")

    def _tiled_words(self) -> Tensor:
        return self.words.view(torch.int32).view(self.shape[0], self.tiles, self.words_per_tile)

    def counts(self) -> Tensor:
        """int32 [M, tiles]: entries in the words of each tile, without spilled ones."""
        return self._tiled_words()[..., 0]

    def unpack(self) -> Tensor:
        """bfloat16 [M, H]. Synchronises with the device."""
        rows, columns = self.shape
        dense = torch.zeros(rows, columns, dtype=self.dtype, device=self.device)
        entries = self._tiled_words()[..., 1:]
        slot = torch.arange(self.capacity, device=self.device)
        m, t, s = (slot < self.counts().unsqueeze(-1)).nonzero(as_tuple=True)
        word = entries[m, t, s]
        dense[m, word & 0xFFFF] = (word >> 16).to(torch.int16).view(torch.bfloat16)
        dense[self.spill_rows, self.spill_indices] = self.spill_values
        return dense

    def nnz(self) -> int:
        return int(self.counts().sum()) + self.spill_rows.numel()

    def __repr__(self) -> str:
        spilled = self.spill_rows.numel()
        return self._describe(f"tile={self.tile}", f"compression={self.compression}", f"spilled={spilled}")


def _check_tile(tile: int, compression: int) -> None:
    require_positive_int("tile", tile)
    require_positive_int("compression", compression)
    if tile % compression or tile // compression < 2:
        reject(
            "compression",
            f"{compression} with tile {tile}",
            "a divisor of tile that leaves at least 2 words (a count and one entry) per tile",
        )


def _reject_overflow(counts: Tensor, capacity: int) -> NoReturn:
    over = int((counts > capacity).sum())
    row, tile = divmod(int(counts.argmax()), counts.shape[1])
    reject(
        "dense",
        f"{over} overflowing tiles (row {row}, tile {tile} has {int(counts.max())} non-zeros)",
        f'at most {capacity} non-zeros per tile, a smaller compression, or overflow="spill"',
    )
