"""Hybrid, the paper's training format: compact ELL rows for light tokens, a dense backup for heavy ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from .._errors import reject, require_choice, require_int, require_matrix
from .base import PackedMatrix, canonical_zeros


@dataclass(frozen=True, repr=False, eq=False)
class Hybrid(PackedMatrix):
    """The paper's training format: what its forward saves for its backward. Our training does not use it.

    A row with at most `cap` non-zeros is *light* and lives in the ELL part; a heavier one is *heavy*
    and lives, dense, in the backup. `route` says which:

        route[m] = -1                     route[m] = b >= 0
          ELL row m                         backup row b
        indices  | 4 | 17 | 90 | . | . |  | 0.1  0  0  2.0  ... |   backup[b] = the whole row
        values   | a |  b |  c | 0 | 0 |
        counts[m] = 3    <- cap wide ->     backup_rows[b] = m   (-1 for an unused backup row)

    indices:      int32 [M, min(cap, H)]  neurons of a light row, ascending, 0 beyond counts[m]
    values:       dtype [M, min(cap, H)]  their values, 0 beyond counts[m]
    counts:       int32 [M]               entries of a light row, 0 for a heavy one
    route:        int32 [M]               -1 if light, else the row of the backup that holds it
    backup:       dtype [B, H]            heavy rows, dense
    backup_rows:  int32 [B]               the token each backup row holds, -1 if unused
    """

    indices: Tensor
    values: Tensor
    counts: Tensor
    route: Tensor
    backup: Tensor
    backup_rows: Tensor
    shape: tuple[int, int]
    cap: int

    @classmethod
    def pack(
        cls, dense: Tensor, cap: int = 128, backup: float | int = 1 / 8, *, overflow: str = "grow"
    ) -> Self:
        """Pack a floating-point matrix [M, H]. Synchronises with the device.

        cap:       most non-zeros of a light row (an int >= 0).
        backup:    rows planned for the backup: a float in [0, 1] is a share of M (rounded up), an int a
                   number of rows.
        overflow:  when more rows are heavy than planned, "grow" enlarges the backup, "error" raises;
                   nothing is ever dropped.
        """
        require_matrix("dense", dense)
        dense = dense.detach()
        require_choice("overflow", overflow, ("grow", "error"))
        require_int("cap", cap, 0)
        tokens, columns = dense.shape
        planned = _planned_rows(backup, tokens)

        active = dense != 0
        row_nnz = active.sum(dim=1, dtype=torch.int32)
        heavy = row_nnz > cap
        heavy_rows = heavy.nonzero().squeeze(1)
        if heavy_rows.numel() > planned and overflow == "error":
            reject(
                "dense",
                f"{heavy_rows.numel()} rows with more than cap = {cap} non-zeros",
                f'at most {planned} such rows (backup={backup}), or overflow="grow"',
            )
        backup_size = max(planned, heavy_rows.numel())

        width = min(cap, columns)
        light = active & ~heavy.unsqueeze(1)
        m, neuron = light.nonzero(as_tuple=True)
        slot = light.cumsum(1, dtype=torch.int32)[m, neuron] - 1
        indices = torch.zeros(tokens, width, dtype=torch.int32, device=dense.device)
        values = torch.zeros(tokens, width, dtype=dense.dtype, device=dense.device)
        indices[m, slot] = neuron.to(torch.int32)
        values[m, slot] = dense[m, neuron]

        filled = heavy_rows.numel()
        route = torch.full((tokens,), -1, dtype=torch.int32, device=dense.device)
        route[heavy_rows] = torch.arange(filled, dtype=torch.int32, device=dense.device)
        backup_rows = torch.full((backup_size,), -1, dtype=torch.int32, device=dense.device)
        backup_rows[:filled] = heavy_rows.to(torch.int32)
        backup_values = torch.zeros(backup_size, columns, dtype=dense.dtype, device=dense.device)
        backup_values[:filled] = canonical_zeros(dense[heavy_rows])
        return cls(
            indices=indices,
            values=values,
            counts=row_nnz.masked_fill(heavy, 0),
            route=route,
            backup=backup_values,
            backup_rows=backup_rows,
            shape=(tokens, columns),
            cap=cap,
        )

    def heavy_rows(self) -> int:
        """Rows held by the backup. Synchronises with the device."""
        return int((self.backup_rows >= 0).sum())

    def _light_entries(self) -> tuple[Tensor, Tensor]:
        """(row, slot) of every entry of the ELL part, row-major."""
        slot = torch.arange(self.indices.shape[1], device=self.device)
        return (slot < self.counts.unsqueeze(1)).nonzero(as_tuple=True)

    def unpack(self) -> Tensor:
        """dtype [M, H]. Synchronises with the device."""
        dense = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        m, slot = self._light_entries()
        dense[m, self.indices[m, slot]] = self.values[m, slot]
        used = self.backup_rows >= 0
        dense[self.backup_rows[used]] = self.backup[used]
        return dense

    def nnz(self) -> int:
        return int(self.counts.sum()) + int((self.backup != 0).sum())

    def transpose(self) -> HybridTransposed:
        """The neuron-major form. Synchronises with the device."""
        m, slot = self._light_entries()
        neuron = self.indices[m, slot]
        order = neuron.argsort(stable=True)  # stable keeps tokens ascending within a neuron
        per_neuron = torch.bincount(neuron, minlength=self.shape[1])
        offsets = torch.zeros(self.shape[1] + 1, dtype=torch.int64, device=self.device)
        offsets[1:] = per_neuron.cumsum(0)
        return HybridTransposed(
            offsets=offsets,
            tokens=m[order].to(torch.int32),
            values=self.values[m, slot][order],
            backup=self.backup,
            backup_rows=self.backup_rows,
            shape=(self.shape[1], self.shape[0]),
        )

    def __repr__(self) -> str:
        details = [f"cap={self.cap}", f"backup={self.backup.shape[0]}"]
        if self.device.type != "meta":
            details.append(f"heavy={self.heavy_rows()}")
        return self._describe(*details)


@dataclass(frozen=True, repr=False, eq=False)
class HybridTransposed(PackedMatrix):
    """The neuron-major form of `Hybrid`, which the paper's weight gradients read.

        neuron n   tokens[offsets[n] : offsets[n+1]]   the light tokens that activate n, ascending
                   values[offsets[n] : offsets[n+1]]   their values
        heavy tokens stay in the dense backup, shared with the row-major form.

    offsets:      int64 [H + 1]
    tokens:       int32 [light nnz]
    values:       dtype [light nnz]
    backup:       dtype [B, H]   still one heavy token per row
    backup_rows:  int32 [B]
    shape:        (H, M)
    """

    offsets: Tensor
    tokens: Tensor
    values: Tensor
    backup: Tensor
    backup_rows: Tensor
    shape: tuple[int, int]
    _axes: ClassVar[tuple[str, str]] = ("H", "M")

    def unpack(self) -> Tensor:
        """dtype [H, M]. Synchronises with the device."""
        dense = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        neuron = torch.repeat_interleave(self.offsets.diff())
        dense[neuron, self.tokens] = self.values
        used = self.backup_rows >= 0
        dense[:, self.backup_rows[used]] = self.backup[used].mT
        return dense

    def nnz(self) -> int:
        return self.tokens.numel() + int((self.backup != 0).sum())

    def __repr__(self) -> str:
        return self._describe(f"backup={self.backup.shape[0]}")


def _planned_rows(backup: float | int, tokens: int) -> int:
    accepted = "a float in [0, 1] (a share of the rows) or an integer >= 0 (a number of rows)"
    if isinstance(backup, bool) or not isinstance(backup, int | float):
        reject("backup", repr(backup), accepted)
    if isinstance(backup, int):
        if backup < 0:
            reject("backup", backup, accepted)
        return min(backup, tokens)
    if not 0 <= backup <= 1:
        reject("backup", backup, accepted)
    return math.ceil(backup * tokens)
