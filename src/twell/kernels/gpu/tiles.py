"""Tile sizes of the portable kernels (block path, backward), measured on an H200, cut to what a GPU holds.

Hopper's own sizes are constants at the top of `hopper/NAME`; decode's are in `decode` and
`hopper/launch_decode`. From here Hopper's launchers take tokens per block, and the backward's chunk, neurons
and entries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from .device import Gpu
from .operands import element_bytes
from .sizes import DEFAULT_ROWS, cdiv


@dataclass(frozen=True, kw_only=True)
class BlockTiles:
    """rows: tokens per block. select_*, up_*, down_*: per kernel, the tile's neurons (down: outputs), the
    depth of one step, warps and pipeline stages; up_programs: persistent programs per processor."""

    rows: int
    select_neurons: int
    select_depth: int
    select_warps: int
    select_stages: int
    up_chunk: int
    up_depth: int
    up_warps: int
    up_stages: int
    up_programs: int
    down_width: int
    down_depth: int
    down_warps: int
    down_stages: int


# H200, bf16, D 2048, H 5632, 65,536 tokens, nnz 24 (milliseconds):
#   select  256 x 128 x 64, 8 warps, 4 stages 1.95; 3 stages 1.97
#   up      128 x 128 x 64, 4 warps, 4 stages, 2 programs per processor 0.58; 8 warps 0.62
#   down    128 x 128 x 64, 4 warps 0.48 (two programs share a processor); 128 x 256, 8 warps 0.63
_LARGE = BlockTiles(
    rows=DEFAULT_ROWS,
    select_neurons=256,  # fewer, where there are few blocks, also keeps the block path off Hopper's kernels
    select_depth=64,
    select_warps=8,
    select_stages=4,
    up_chunk=128,
    up_depth=64,
    up_warps=4,
    up_stages=4,
    up_programs=2,
    down_width=128,
    down_depth=64,
    down_warps=4,
    down_stages=4,
)


@lru_cache(maxsize=1024)
def block_tiles(gpu: Gpu, dtype: torch.dtype, tokens: int, neurons: int, rows: int) -> BlockTiles:
    """Tiles that fit the device and give every processor work."""
    rows = rows or DEFAULT_ROWS
    if gpu.capability == (0, 0):  # the interpreter: small, so that small tests cross tile borders
        small = dict.fromkeys(("select_neurons", "up_chunk", "down_width"), 32)
        depth = dict.fromkeys(("select_depth", "up_depth", "down_depth"), 16)
        return replace(_LARGE, rows=rows, **small, **depth)
    tiles = replace(_LARGE, rows=rows)
    size = element_bytes(dtype)
    if gpu.capability[0] != 9:  # sums and operands share the registers: more warps, smaller tiles
        tiles = replace(tiles, select_neurons=128, up_warps=8, up_programs=1, down_warps=8)
    if size > 2:  # exact float32 products run on the ordinary units: small tiles
        narrow = dict.fromkeys(("select_neurons", "up_chunk", "down_width"), 64)
        depth = dict.fromkeys(("select_depth", "up_depth", "down_depth"), 16)
        warps = dict.fromkeys(("select_warps", "up_warps", "down_warps"), 8)
        tiles = replace(tiles, **narrow, **depth, **warps)
    blocks = cdiv(tokens, rows)
    while tiles.select_neurons > 64 and blocks * cdiv(neurons, tiles.select_neurons) < 2 * gpu.processors:
        half = tiles.select_neurons // 2
        tiles = replace(tiles, select_neurons=half, select_warps=max(4, tiles.select_warps // 2))
    if blocks < 16:
        tiles = replace(tiles, up_chunk=64, down_width=64)

    def stages(wanted: int, width: int, depth: int) -> int:
        """At most `wanted`, at least 2: a stage holds a tile of weights and one of tokens."""
        return max(2, min(wanted, (gpu.shared_memory - 4096) // ((width + rows) * depth * size)))

    return replace(
        tiles,
        select_stages=stages(tiles.select_stages, tiles.select_neurons, tiles.select_depth),
        up_stages=stages(tiles.up_stages, tiles.up_chunk, tiles.up_depth),
        down_stages=stages(tiles.down_stages, tiles.down_width, tiles.down_depth),
    )


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
_LARGE_BACKWARD = BackwardTiles(
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
def backward_tiles(gpu: Gpu, dtype: torch.dtype) -> BackwardTiles:
    if gpu.capability == (0, 0):  # the interpreter: small, so that small tests cross tile borders
        small = dict.fromkeys(("chunk", "width", "neurons", "rare_width"), 32)
        return replace(_LARGE_BACKWARD, entries=16, depth=16, rare_programs=1, **small)
    if element_bytes(dtype) > 2:  # exact float32 products run on the ordinary units: small tiles
        return replace(_LARGE_BACKWARD, chunk=64, depth=16, width=64, neurons=64, stages=2)
    # sm_100: three stages of the gathered products take 288 KB, more than it has (compiled with Triton 3.9).
    if gpu.shared_memory < 200 << 10 or gpu.capability[0] == 10:
        return replace(_LARGE_BACKWARD, stages=2)
    return _LARGE_BACKWARD
