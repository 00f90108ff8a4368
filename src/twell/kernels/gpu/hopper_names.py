"""Gluon's asynchronous copies under one name: triton 3.7 renamed them."""

from __future__ import annotations

from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

_renamed = hasattr(tma, "async_load")
tma_load = tma.async_load if _renamed else tma.async_copy_global_to_shared
tma_store = tma.async_store if _renamed else tma.async_copy_shared_to_global
copy_rows = async_copy.async_load if _renamed else async_copy.async_copy_global_to_shared
