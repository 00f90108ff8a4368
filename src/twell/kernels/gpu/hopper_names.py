"""What Gluon calls differently from one version to the next; triton 3.7 renamed some of it."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

_renamed = hasattr(tma, "async_load")
tma_load = tma.async_load if _renamed else tma.async_copy_global_to_shared
tma_store = tma.async_store if _renamed else tma.async_copy_shared_to_global
copy_rows = async_copy.async_load if _renamed else async_copy.async_copy_global_to_shared
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

_memory = gl.shared_memory_descriptor
reinterpret = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret
