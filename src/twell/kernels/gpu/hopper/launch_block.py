"""Launches the block path's kernels for compute capability 9.0."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ..launch import Source, Tiled, Tokens, launch
from ..sizes import cdiv
from .products import PRODUCTS_DEPTH, PRODUCTS_STAGES, up_blocks_hopper
from .select import SELECT_DEPTH, SELECT_STAGES, SELECT_TILE, select_blocks_hopper
from .sums import SUMS_DEPTH, SUMS_STAGES, SUMS_WIDTH, gathered_sums_hopper

if TYPE_CHECKING:
    from ..block_launches import BlockLaunches

_ELEMENT = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@lru_cache(maxsize=256)
def layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], _ELEMENT[dtype])


def tiled(source: Source, block: list[int], by_tokens: bool = False) -> Tiled:
    return Tiled(source, block, layout(*block, source.dtype), by_tokens)


def launch_select(launches: BlockLaunches, x: Tensor) -> None:
    operands, tiles = launches.operands, launches.tiles
    tokens = 2 * tiles.rows
    neurons = SELECT_TILE // tokens
    work = cdiv(x.shape[0], tokens) * cdiv(operands.neurons, neurons)
    arguments = launches.select_arguments(
        tiled(x, [tokens, SELECT_DEPTH], by_tokens=True), tiled(operands.select, [neurons, SELECT_DEPTH])
    )
    constants = {
        "ROWS": tiles.rows,
        "HAS_BIAS": operands.select_bias is not None,
        "PLAIN": operands.plain,
        "SQUARE": operands.square,
        "STAGES": SELECT_STAGES,
    }
    grid = (min(launches.gpu.processors, work),)
    launch(launches.kind, select_blocks_hopper, grid, arguments, constants, num_warps=4)


def launch_up(launches: BlockLaunches, x: Tensor) -> None:
    operands = launches.operands
    arguments = launches.up_arguments(tiled(x, [launches.tiles.rows, PRODUCTS_DEPTH], by_tokens=True))
    constants = {
        "HAS_BIAS": operands.up_bias is not None,
        "CLAMP_UP": operands.clamp_up,
        "CHUNK": launches.chunk,
        "W_LAYOUT": layout(launches.chunk, PRODUCTS_DEPTH, x.dtype),
        "STAGES": PRODUCTS_STAGES,
    }
    grid = (min(launches.gpu.processors, launches.blocks(x.shape[0]) * launches.chunks),)
    launch(launches.kind, up_blocks_hopper, grid, arguments, constants, num_warps=4)


def launch_down(launches: BlockLaunches, y: Tensor) -> None:
    operands, workspace, tiles = launches.operands, launches.workspace, launches.tiles
    blocks = launches.blocks(y.shape[0])
    hidden = workspace.hidden
    lines = hidden if launches.gated else hidden.viewed(blocks * operands.neurons, tiles.rows)
    arguments = (
        tiled(lines, [SUMS_DEPTH, tiles.rows]),
        hidden,
        tiled(y, [tiles.rows // 2, SUMS_WIDTH], by_tokens=True),
        y,
        operands.down,
        operands.down,
        operands.pointer(operands.down_bias),
        workspace.lists,
        workspace.counts,
        blocks,
        Tokens(y.shape[0]),
        operands.neurons,
        operands.outputs,
        launches.chunks * launches.chunk,
        0,
    )
    constants = {
        "PLANES": 1,
        "SPANS": 0,
        "PACKED": launches.gated,
        "HAS_BIAS": operands.down_bias is not None,
        "LATER": 0,
        "W_LAYOUT": layout(SUMS_DEPTH, SUMS_WIDTH, y.dtype),
        "STAGES": SUMS_STAGES,
    }
    grid = (min(launches.gpu.processors, blocks * cdiv(operands.outputs, SUMS_WIDTH)),)
    launch(launches.kind, gathered_sums_hopper, grid, arguments, constants, num_warps=4)
