"""Measures the memory of a call: its peak, and what autograd keeps for the backward pass."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .environment import checked_device


def peak_bytes(fn: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Peak of tensor memory on `device` during `fn()`, above what was allocated before.

    CPU: counts what the calling thread takes from PyTorch's allocator, also inside custom ops, but not the
    scratch memory of BLAS libraries. Freeing a tensor from before the call does not lower the count.
    CUDA: the caching allocator's count, in blocks of 512 bytes. Resets PyTorch's peak statistics and
    synchronises.
    """
    where = checked_device(device)
    gc.collect()
    return _peak_cuda(fn, where) if where.type == "cuda" else _peak_cpu(fn)


def _peak_cuda(fn: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    fn()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_cpu(fn: Callable[[], object]) -> int:
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    with _stderr_silenced():
        profiler.start()
    try:
        fn()
    finally:
        with _stderr_silenced():
            profiler.stop()
    events = [
        event
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU
    ]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


@contextmanager
def _stderr_silenced() -> Iterator[None]:
    """Silence native code: the profiler reports each start and stop on standard error."""
    saved = os.dup(2)
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)
    os.close(sink)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


class _Saved:
    """A tensor that autograd saved; lives as long as the graph node that saved it.

    Detached: an output with its own node would keep that node alive for ever.
    """

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


def saved_bytes(fn: Callable[[], object], *, exclude: Iterable[Tensor] = ()) -> int:
    """Bytes that the autograd graph of `fn()`'s result keeps for the backward pass.

    Each storage counts once and whole, however many tensors view it. Storages of the tensors in `exclude`
    (weights, inputs) do not count. Tensors that a custom `Function` stores on its context without
    `save_for_backward` are not counted.
    """
    excluded = {key for tensor in exclude for key, _ in _storages(tensor)}
    saved: list[weakref.ref[_Saved]] = []

    def pack(tensor: Tensor) -> _Saved:
        holder = _Saved(tensor)
        saved.append(weakref.ref(holder))
        return holder

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        result = fn()
    gc.collect()
    kept: dict[tuple[torch.device, int], int] = {}
    for reference in saved:
        holder = reference()
        if holder is not None:
            kept.update(_storages(holder.tensor))
    del result  # the graph had to live until here
    return sum(size for key, size in kept.items() if key not in excluded)


def _storages(tensor: Tensor) -> list[tuple[tuple[torch.device, int], int]]:
    """(identity, bytes) of each storage behind `tensor`; a sparse tensor has several."""
    storages = [part.untyped_storage() for part in _parts(tensor)]
    return [((storage.device, storage.data_ptr()), storage.nbytes()) for storage in storages]


def _parts(tensor: Tensor) -> list[Tensor]:
    """The strided tensors that `tensor` consists of."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]
