"""The block path: select, list, up, down, on slabs of tokens that share one workspace."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .block_stages import BlockStages
from .launch import launch
from .numbers import cdiv
from .operands import Operands, element_bytes
from .sizes import DEFAULT_ROWS, list_sizes
from .statistics import count_firing, sum_magnitudes
from .tape import Tapes, recorded, replay
from .workspace import Piece

WORKSPACE_BYTES = 2 << 30
_LARGEST_CHUNK = 256  # hidden rows come in whole chunks of up
_BLOCKS, _NEURONS = 8, 32  # of one program of the statistics


@dataclass(frozen=True)
class BlockRun:
    """What a call leaves: y [M, E], the statistics if asked for, and which neurons were active.

    lists int32 [B * H and a chunk more]: block b's active neurons, ascending, from b * H; counts int32 [B].
    Unless `keep` was asked for there are no lists, and counts of the last slab only, in the workspace.
    """

    y: Tensor
    statistics: Statistics | None
    lists: Tensor | None
    counts: Tensor | Piece


@dataclass(frozen=True)
class Statistics:
    """firing: int64 [H]; sums: float64 numbers whose total is the sum of |hidden| over all tokens."""

    firing: Tensor
    sums: Tensor


def run_blocks(
    operands: Operands, rows: int, record: bool, keep: bool = False, tapes: Tapes | None = None
) -> BlockRun:
    """rows: tokens per block, 0 for the default; keep: lists and counts of all slabs, for a backward pass;
    tapes: of earlier calls of this layer, for those that come."""
    x, y = operands.x, operands.x.new_empty(operands.tokens, operands.outputs)
    rows = rows or DEFAULT_ROWS
    slab = _slab_tokens(operands, rows)
    stages = BlockStages(operands, min(slab, operands.tokens), rows)
    lists = counts = None
    if keep:
        lists, counts = (
            x.new_empty(size, dtype=torch.int32)
            for size in list_sizes(operands.tokens, operands.neurons, rows)
        )
    statistics = _empty_statistics(stages, slab) if record else None
    outputs = y, lists, counts, *((statistics.firing, statistics.sums) if record else ())
    tensors = (*operands.weights, stages.workspace.buffer, x, *outputs)
    kind = blocks_kind(operands, rows, record, keep)
    if not replay(tapes, kind, tensors, x.device):
        with recorded(tapes, kind, tensors, STEADY, (stages.workspace.bytes,)):
            _launch(stages, slab, y, lists, counts, statistics)
    return BlockRun(y, statistics, lists, counts if keep else stages.workspace.counts)


def blocks_kind(operands: Operands, rows: int, record: bool, keep: bool) -> tuple:
    """Of a tape."""
    return "blocks", operands.kind, operands.tokens, rows or DEFAULT_ROWS, record, keep


STEADY = 7  # weights, and a workspace that is kept


def _launch(
    stages: BlockStages,
    slab: int,
    y: Tensor,
    lists: Tensor | None,
    counts: Tensor | None,
    statistics: Statistics | None,
) -> None:
    operands, rows = stages.operands, stages.tiles.rows
    sums = None if statistics is None else iter(statistics.sums.split(_programs(stages, slab)))
    for start in range(0, operands.tokens, slab):
        part = operands.x[start : start + slab]
        if lists is not None:
            block = start // rows
            stages.list_into(lists[block * operands.neurons :], counts[block:])
        stages.select(part)
        stages.list(part.shape[0])
        if statistics is not None:
            _count_firing(stages, part.shape[0], statistics.firing)
        stages.up(part)
        if statistics is not None:
            _sum_magnitudes(stages, part.shape[0], next(sums))
        stages.down(y[start : start + slab])


def _slab_tokens(operands: Operands, rows: int) -> int:
    """Equal slabs, in whole blocks, whose values and hidden rows fit the workspace."""
    values = operands.neurons
    hidden = 0 if operands.up is None else cdiv(operands.neurons, _LARGEST_CHUNK) * _LARGEST_CHUNK
    limit = WORKSPACE_BYTES // ((values + hidden) * element_bytes(operands.x.dtype)) // rows
    blocks = cdiv(operands.tokens, rows)
    slabs = cdiv(blocks, max(limit, 1))
    per_slab = cdiv(blocks, slabs)
    if (
        slabs > 1
    ):  # the counts of every slab start at a multiple of 16 bytes, as the kernels were compiled for
        per_slab = cdiv(per_slab, 4) * 4
    return per_slab * rows


def _empty_statistics(stages: BlockStages, slab: int) -> Statistics:
    operands = stages.operands
    device = operands.x.device
    slabs = cdiv(operands.tokens, slab)
    return Statistics(
        torch.zeros(operands.neurons, dtype=torch.int64, device=device),
        torch.zeros(slabs * _programs(stages, slab), dtype=torch.float64, device=device),
    )


def _grid(stages: BlockStages, tokens: int) -> tuple[int, int]:
    return cdiv(stages.operands.neurons, _NEURONS), cdiv(stages.blocks(tokens), _BLOCKS)


def _programs(stages: BlockStages, slab: int) -> int:
    """Of the statistics of one slab, rounded up to what is aligned."""
    across, along = _grid(stages, min(slab, stages.operands.tokens))
    return cdiv(across * along, 2) * 2


def _count_firing(stages: BlockStages, tokens: int, firing: Tensor) -> None:
    workspace = stages.workspace
    arguments = workspace.values, workspace.active, firing, tokens, stages.operands.neurons, _BLOCKS
    constants = {"NEURONS": _NEURONS, "ROWS": stages.tiles.rows}
    launch(stages.kind, count_firing, _grid(stages, tokens), arguments, constants)


def _sum_magnitudes(stages: BlockStages, tokens: int, sums: Tensor) -> None:
    workspace = stages.workspace
    arguments = (
        workspace.hidden,
        workspace.active,
        workspace.counts,
        sums,
        tokens,
        stages.operands.neurons,
        stages.chunks * stages.chunk,
        _BLOCKS,
    )
    constants = {"PACKED": stages.gated, "NEURONS": _NEURONS, "ROWS": stages.tiles.rows}
    launch(stages.kind, sum_magnitudes, _grid(stages, tokens), arguments, constants)
