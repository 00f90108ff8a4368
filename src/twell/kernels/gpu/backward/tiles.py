"""Tile sizes of the backward kernels, portable ones; see `stages.py` for what they are sizes of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ..operands import element_bytes
from ..target import Target


@dataclass(frozen=True, kw_only=True)
class BackwardTiles:
    """chunk: listed neurons of a work item; entries: of one program that goes element by element.
    depth: features (or, for grad_x, neurons) of one step of a product; width: columns of grad_x, and of the
    weight gradients of frequent neurons, in tiles of `neurons`. Of rare ones: columns (rare_width), tokens
    whose rows are asked for at once (ahead), warps, programs per processor."""

    chunk: int
    entries: int
    depth: int
    width: int
    neurons: int
    rare_width: int
    rare_warps: int
    rare_programs: int
    ahead: int
    warps: int
    stages: int


# H200, bf16, D 2048, H 5632, 16,384 tokens, nnz 24, CUDA graph (milliseconds):
#   combine (Gluon)   8 entries 0.054, 16 0.063, 32 spill
#   rare_weights      512 columns, 4 at once, 2 warps, 32 programs 0.136; 16 programs 0.144; 8 at once 0.176;
#                     1024 columns, 4 warps, 32 programs 0.139, 16 programs 0.149, 2 at once 0.164
# The portable products (0.52), grad_x (0.28) and frequent weights (0.56) have these tiles from the forward's.
_LARGE = BackwardTiles(
    chunk=128,
    entries=8,
    depth=64,
    width=128,
    neurons=128,
    rare_width=512,
    rare_warps=2,
    rare_programs=32,
    ahead=4,
    warps=8,
    stages=3,
)


@lru_cache(maxsize=64)
def backward_tiles(target: Target, dtype: torch.dtype) -> BackwardTiles:
    if target.capability == (0, 0):  # the interpreter: small, so that small tests cross tile borders
        small = dict.fromkeys(("chunk", "width", "neurons", "rare_width"), 32)
        return replace(_LARGE, entries=16, depth=16, rare_programs=1, **small)
    if element_bytes(dtype) > 2:  # exact float32 products run on the ordinary units: small tiles
        return replace(_LARGE, chunk=64, depth=16, width=64, neurons=64, stages=2)
    if target.shared_memory < 200 << 10:
        return replace(_LARGE, stages=2)
    return _LARGE
