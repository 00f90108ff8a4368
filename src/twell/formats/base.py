"""What the packed formats share: a frozen bundle of tensors that knows its size and moves between devices."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import ClassVar, Self

import torch
from torch import Tensor

from .._errors import FLOAT_DTYPES, reject


class PackedMatrix(ABC):
    """Base of the formats; subclasses are frozen dataclasses whose tensors are fields.

    `shape` is the shape of the dense matrix; `values` has the dtype, unless a format says otherwise.
    """

    shape: tuple[int, int]
    _axes: ClassVar[tuple[str, str]] = ("M", "H")

    @abstractmethod
    def unpack(self) -> Tensor:
        """The dense matrix, equal to what was packed to the bit (-0.0 becomes 0)."""

    @abstractmethod
    def nnz(self) -> int:
        """Number of active entries. Synchronises with the device."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored values and of `unpack()`."""
        return self.values.dtype

    def _with_dtype(self, dtype: torch.dtype) -> Self:
        """The same pattern with values cast to `dtype`."""
        values = {name: t.to(dtype) for name, t in self.tensors().items() if t.is_floating_point()}
        return dataclasses.replace(self, **values)

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by field name."""
        fields = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {name: value for name, value in fields if isinstance(value, Tensor)}

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors().values())).device

    def memory_bytes(self) -> int:
        """Bytes of all stored tensors, padding and unused slots included."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def dense_bytes(self) -> int:
        """Bytes of the dense matrix in the same dtype, for comparison."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Move to `device` and/or cast the values to `dtype`; index tensors keep their dtype.

        A value that the new dtype rounds to zero stays stored, as an explicit zero.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        if device is not None and not isinstance(device, torch.device | str | int):
            reject("device", f"a {type(device).__name__}", "a torch.device, its name, or None")
        moved = self
        if device is not None:
            changes = {name: tensor.to(device) for name, tensor in self.tensors().items()}
            moved = dataclasses.replace(self, **changes)
        if dtype is not None and dtype != self.dtype:
            if dtype not in FLOAT_DTYPES:
                reject("dtype", dtype, ", ".join(map(str, FLOAT_DTYPES)))
            moved = moved._with_dtype(dtype)
        return moved

    def cpu(self) -> Self:
        return self.to("cpu")

    def cuda(self) -> Self:
        return self.to("cuda")

    def _describe(self, *details: str) -> str:
        """Shared `repr`: dense shape, layout details, fill and size against dense."""
        rows, columns = self.shape
        row_axis, column_axis = self._axes
        parts = [f"{row_axis}={rows}", f"{column_axis}={columns}", *details]
        if self.device.type != "meta":
            parts.append(f"nnz/row={self.nnz() / max(rows, 1):.1f}")
        size, dense = self.memory_bytes(), self.dense_bytes()
        share = f" ({size / dense:.1%} of dense)" if dense else ""
        parts.append(f"{format_bytes(size)}{share}")
        parts += [str(self.dtype).removeprefix("torch."), str(self.device)]
        return f"{type(self).__name__}({', '.join(parts)})"


def canonical_zeros(dense: Tensor) -> Tensor:
    """`dense` with -0.0 replaced by 0, everything else (NaN payloads included) untouched."""
    return torch.where(dense == 0, torch.zeros((), dtype=dense.dtype, device=dense.device), dense)


def format_bytes(count: int) -> str:
    """1536 -> '1.5 KiB'."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
