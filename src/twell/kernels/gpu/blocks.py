"""The block path: select, list, up, down, on slabs of tokens that share one workspace."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .down import down_blocks
from .lists import list_active
from .operands import Operands, element_bytes
from .select import select_blocks
from .statistics import count_firing, sum_magnitudes
from .target import Target, target_of
from .tiles import BlockTiles, block_tiles
from .up import up_blocks

WORKSPACE_BYTES = 2 << 30
_STATISTICS_BLOCKS, _STATISTICS_NEURONS = 8, 32


@dataclass(frozen=True)
class Workspace:
    """What one slab's kernels hand to each other; see `select` and `lists` for the layouts."""

    values: Tensor  # dtype [B, H, rows]
    hidden: Tensor  # dtype [B * P, rows], P whole chunks of up; `values` itself if not gated
    active: Tensor  # uint8 [B, H]
    lists: Tensor  # int32 [B * H and a chunk more]
    counts: Tensor  # int32 [B]
    work: Tensor  # int32 [B * ceil(H / chunk)]
    counter: Tensor  # int32 [1]

    @staticmethod
    def allocate(operands: Operands, tokens: int, rows: int, chunk: int) -> Workspace:
        blocks, neurons = triton.cdiv(tokens, rows), operands.neurons
        new = operands.x.new_empty
        values = new(blocks, neurons, rows)
        gated = operands.up is not None
        return Workspace(
            values=values,
            hidden=new(blocks * triton.cdiv(neurons, chunk) * chunk, rows) if gated else values,
            active=new(blocks, neurons, dtype=torch.uint8),
            # The Hopper kernels read a whole chunk ahead without asking where a list ends.
            lists=new(blocks * neurons + chunk, dtype=torch.int32),
            counts=new(blocks, dtype=torch.int32),
            work=new(blocks * triton.cdiv(neurons, chunk), dtype=torch.int32),
            counter=new(1, dtype=torch.int32),
        )


@dataclass(frozen=True)
class Recorded:
    """firing int64 [H] and sums float32 [...], both still to be reduced or divided by the caller."""

    firing: Tensor
    sums: list[Tensor]


def run_blocks(operands: Operands, rows: int, record: bool) -> tuple[Tensor, Recorded | None, Tensor, int]:
    """y [M, E]; the statistics if asked for; the last slab's active neurons per block and their maximum.

    rows: tokens per block, 0 for the default.
    """
    target = target_of(operands.x.device)
    tiles = block_tiles(target, operands.x.dtype, operands.tokens, operands.neurons, rows)
    y = operands.x.new_empty(operands.tokens, operands.outputs)
    recorded = None
    if record:
        firing = torch.zeros(operands.neurons, dtype=torch.int64, device=y.device)
        recorded = Recorded(firing, [])
    slab = _slab_tokens(operands, tiles.rows)
    chunk = up_chunk(operands, target, tiles)
    workspace = Workspace.allocate(operands, min(slab, operands.tokens), tiles.rows, chunk)
    for start in range(0, operands.tokens, slab):
        part = slice(start, min(start + slab, operands.tokens))
        _run_slab(operands, operands.x[part], y[part], workspace, target, tiles, recorded)
    return y, recorded, workspace.counts, workspace.counts.numel() * operands.neurons


def _slab_tokens(operands: Operands, rows: int) -> int:
    """Equal slabs, in whole blocks, whose values fit the workspace."""
    buffers = 1 if operands.up is None else 2
    limit = WORKSPACE_BYTES // (buffers * operands.neurons * element_bytes(operands.x.dtype)) // rows
    blocks = triton.cdiv(operands.tokens, rows)
    slabs = triton.cdiv(blocks, max(limit, 1))
    return triton.cdiv(blocks, slabs) * rows


def uses_hopper(operands: Operands, target: Target, tiles: BlockTiles) -> bool:
    """Whether the Hopper variants run: 16-bit types, whole steps of depth, and enough work for the ring."""
    return (
        target.hopper
        and element_bytes(operands.x.dtype) == 2
        and operands.features % 64 == 0
        and tiles.rows in (64, 128)
        and tiles.select_neurons == 256
    )


def up_chunk(operands: Operands, target: Target, tiles: BlockTiles) -> int:
    return 256 if uses_hopper(operands, target, tiles) else tiles.up_chunk


def _run_slab(
    operands: Operands,
    x: Tensor,
    y: Tensor,
    workspace: Workspace,
    target: Target,
    tiles: BlockTiles,
    recorded: Recorded | None,
) -> None:
    blocks = triton.cdiv(x.shape[0], tiles.rows)
    hopper = uses_hopper(operands, target, tiles)
    chunk = up_chunk(operands, target, tiles)
    if hopper:  # imported here: other devices need no Gluon
        from .hopper import launch_down, launch_select, launch_up
    else:
        launch_select, launch_up, launch_down = _launch_select, _launch_up, _launch_down
    launch_select(operands, x, workspace, target, tiles)
    list_active[(blocks,)](
        workspace.active,
        workspace.lists,
        workspace.counts,
        workspace.work,
        workspace.counter,
        operands.neurons,
        triton.cdiv(operands.neurons, chunk),
        CHUNK=chunk,
        WIDTH=triton.next_power_of_2(operands.neurons),
        num_warps=8,
    )
    if recorded is not None:
        count_firing[_statistics_grid(operands, blocks)](
            workspace.values,
            workspace.active,
            recorded.firing,
            operands.neurons,
            blocks,
            _STATISTICS_BLOCKS,
            NEURONS=_STATISTICS_NEURONS,
            ROWS=tiles.rows,
        )
    if operands.up is not None:
        launch_up(operands, x, workspace, target, tiles)
    if recorded is not None:
        sums = torch.empty(_statistics_grid(operands, blocks), dtype=torch.float32, device=x.device)
        sum_magnitudes[_statistics_grid(operands, blocks)](
            workspace.hidden,
            workspace.active,
            workspace.counts,
            sums,
            operands.neurons,
            triton.cdiv(operands.neurons, chunk) * chunk,
            blocks,
            _STATISTICS_BLOCKS,
            PACKED=operands.up is not None,
            NEURONS=_STATISTICS_NEURONS,
            ROWS=tiles.rows,
        )
        recorded.sums.append(sums)
    if hopper and not hopper_down_fits(operands, tiles):
        launch_down = _launch_down
    launch_down(operands, y, workspace, target, tiles)


def hopper_down_fits(operands: Operands, tiles: BlockTiles) -> bool:
    return operands.up is not None and operands.outputs % 64 == 0 and tiles.rows == 128


def _launch_down(
    operands: Operands, y: Tensor, workspace: Workspace, target: Target, tiles: BlockTiles
) -> None:
    chunk = up_chunk(operands, target, tiles)
    packed = operands.up is not None
    hidden = workspace.hidden
    step = [tiles.down_depth, tiles.rows]
    blocks = triton.cdiv(y.shape[0], tiles.rows)
    down_blocks[(blocks * triton.cdiv(operands.outputs, tiles.down_width),)](
        operands.down,
        operands.pointer(operands.down_bias),
        hidden,
        TensorDescriptor.from_tensor(hidden, step) if packed else hidden,
        workspace.lists,
        workspace.counts,
        y,
        y.shape[0],
        operands.neurons,
        operands.outputs,
        triton.cdiv(operands.neurons, chunk) * chunk,
        HAS_BIAS=operands.down_bias is not None,
        PACKED=packed,
        WIDTH=tiles.down_width,
        ROWS=tiles.rows,
        DEPTH=tiles.down_depth,
        PRECISION=operands.precision,
        num_warps=tiles.down_warps,
        num_stages=tiles.down_stages,
    )


def _launch_select(
    operands: Operands, x: Tensor, workspace: Workspace, target: Target, tiles: BlockTiles
) -> None:
    work = triton.cdiv(x.shape[0], tiles.rows) * triton.cdiv(operands.neurons, tiles.select_neurons)
    select_blocks[(min(target.processors, work),)](
        TensorDescriptor.from_tensor(x, [tiles.rows, tiles.select_depth]),
        TensorDescriptor.from_tensor(operands.select, [tiles.select_neurons, tiles.select_depth]),
        operands.pointer(operands.select_bias),
        workspace.values,
        workspace.active,
        workspace.counter,
        x.shape[0],
        operands.neurons,
        operands.features,
        operands.threshold,
        HAS_BIAS=operands.select_bias is not None,
        PLAIN=operands.plain,
        SQUARE=operands.square,
        NEURONS=tiles.select_neurons,
        ROWS=tiles.rows,
        DEPTH=tiles.select_depth,
        PRECISION=operands.precision,
        num_warps=tiles.select_warps,
        num_stages=tiles.select_stages,
    )


def _launch_up(
    operands: Operands, x: Tensor, workspace: Workspace, target: Target, tiles: BlockTiles
) -> None:
    most = triton.cdiv(x.shape[0], tiles.rows) * triton.cdiv(operands.neurons, tiles.up_chunk)
    up_blocks[(min(target.processors * tiles.up_programs, most),)](
        TensorDescriptor.from_tensor(x, [tiles.rows, tiles.up_depth]),
        operands.up,
        operands.pointer(operands.up_bias),
        workspace.values,
        workspace.hidden,
        workspace.lists,
        workspace.counts,
        workspace.work,
        workspace.counter,
        operands.neurons,
        operands.features,
        triton.cdiv(operands.neurons, tiles.up_chunk),
        HAS_BIAS=operands.up_bias is not None,
        CHUNK=tiles.up_chunk,
        ROWS=tiles.rows,
        DEPTH=tiles.up_depth,
        PRECISION=operands.precision,
        num_warps=tiles.up_warps,
        num_stages=tiles.up_stages,
    )


def _statistics_grid(operands: Operands, blocks: int) -> tuple[int, int]:
    return triton.cdiv(operands.neurons, _STATISTICS_NEURONS), triton.cdiv(blocks, _STATISTICS_BLOCKS)
