"""The kernels' memory: what they hand to each other in a call, cut from one allocation, and a counter."""

from __future__ import annotations

import math
import threading
from functools import lru_cache

import torch
from torch import Tensor

from .sizes import cdiv

_ALIGNMENT = 256
_MOST_KEPT = 8  # by one thread
KEPT_BYTES = 64 << 20  # smaller workspaces stay; larger ones go back to the allocator, for others to use

Part = tuple[tuple[int, ...], torch.dtype]  # shape, dtype


class Piece:
    """A contiguous part of a workspace: what a kernel has to know of a tensor. Making tensors of all parts
    would take the host longer than launching the kernels."""

    __slots__ = ("_address", "_buffer", "_offset", "dtype", "shape")

    def __init__(
        self, buffer: Tensor, address: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        """address: where the buffer begins; offset: bytes from there."""
        self._buffer, self._address, self._offset = buffer, address + offset, offset
        self.shape, self.dtype = shape, dtype

    def data_ptr(self) -> int:
        return self._address

    def stride(self) -> tuple[int, ...]:
        return _strides(self.shape)

    def viewed(self, *shape: int) -> Piece:
        start = self._address - self._offset
        return Piece(self._buffer, start, self._offset, shape, self.dtype)

    def row(self, number: int) -> Piece:
        """One row of the first dimension."""
        shape = self.shape[1:]
        offset = self._offset + number * math.prod(shape) * self.dtype.itemsize
        return Piece(self._buffer, self._address - self._offset, offset, shape, self.dtype)

    def tensor(self) -> Tensor:
        end = self._offset + math.prod(self.shape) * self.dtype.itemsize
        return self._buffer[self._offset : end].view(self.dtype).view(self.shape)


def carve(device: torch.device, parts: tuple[Part, ...], cleared: bool = False) -> tuple[Tensor, list[Piece]]:
    """A workspace, and its parts; cleared: of zeros."""
    size, offsets = _places(parts)
    make = torch.zeros if cleared else torch.empty
    buffer = make(size, dtype=torch.uint8, device=device)
    address = buffer.data_ptr()
    pieces = [Piece(buffer, address, offset, *part) for offset, part in zip(offsets, parts, strict=True)]
    return buffer, pieces


def zeros(device: torch.device, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)


def buffer_sizes(*workspaces: tuple[Part, ...]) -> tuple[int, ...]:
    """Bytes of workspaces with these parts."""
    return tuple(_places(parts)[0] for parts in workspaces)


class _Kept(threading.local):
    """By device and stream. Calls of two threads on one stream may interleave, so threads have their own."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[int | None, int], tuple[int, Tensor]] = {}  # bytes, buffer


_kept = _Kept()


def kept_workspace(device: torch.device, index: int | None, stream: int, size: int) -> Tensor:
    """`size` bytes or more, for launches on `stream`, the current one of `device` number `index`.

    Only for eager calls that repeat others: whoever captures, or gathers allocations for a graph, must find
    all of them in its own pool, and launches in full.
    """
    kept = _kept.buffers
    found = kept.get((index, stream))
    if found is not None and found[0] >= size:
        return found[1]
    with torch.inference_mode(False):
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
    if size <= KEPT_BYTES:
        if len(kept) >= _MOST_KEPT:
            kept.clear()
        kept[index, stream] = size, buffer
    return buffer


@lru_cache(maxsize=1024)
def _places(parts: tuple[Part, ...]) -> tuple[int, list[int]]:
    """Bytes in all, and where every part begins."""
    offsets, end = [], 0
    for shape, dtype in parts:
        offsets.append(end)
        end += cdiv(math.prod(shape) * dtype.itemsize, _ALIGNMENT) * _ALIGNMENT
    return max(end, _ALIGNMENT), offsets


@lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))


_counters: dict[torch.device, Tensor] = {}


def overflow_counter(device: torch.device) -> Tensor:
    """int32 [4]: the first counts backward passes that found more active neurons than their pool holds. It
    lasts as long as the process."""
    counter = _counters.get(device)
    if counter is None:
        counter = _outside_of_pools(device)
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            _counters[device] = counter  # a captured one would start again with every replay
    return counter


def _outside_of_pools(device: torch.device) -> Tensor:
    """Zeros, allocated on a new stream: the current one may allocate in a graph's pool, which goes with the
    graph."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(4, dtype=torch.int32, device=device)
    here, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    with torch.cuda.stream(aside):
        counter = torch.zeros(4, dtype=torch.int32, device=device)
    here.wait_stream(aside)
    return counter


def overflowed_steps() -> int:
    """How many backward passes on GPUs took rounds, because more neurons were active than their workspace
    holds at once (a third of all): exact as ever, and slower. Waits for the devices.
    """
    return sum(int(counter[0]) for counter in _counters.values())
