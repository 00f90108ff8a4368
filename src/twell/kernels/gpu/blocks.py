"""The block path: select, list, up, down, on slabs of tokens that share one workspace."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .block_stages import BlockStages
from .numbers import cdiv
from .operands import Operands, element_bytes
from .sizes import DEFAULT_ROWS, list_sizes
from .statistics import count_firing, sum_magnitudes

WORKSPACE_BYTES = 2 << 30
_LARGEST_CHUNK = 256  # hidden rows come in whole chunks of up
_BLOCKS, _NEURONS = 8, 32  # of one program of the statistics


@dataclass(frozen=True)
class BlockRun:
    """What a call leaves: y [M, E], the statistics if asked for, and which neurons were active.

    lists int32 [B * H and a chunk more]: block b's active neurons, ascending, from b * H; counts int32 [B].
    Of the last slab only, unless `keep` was asked for.
    """

    y: Tensor
    recorded: Recorded | None
    lists: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Recorded:
    """firing: int64 [H]; sums: float64 tensors whose total is the sum of |hidden| over all tokens."""

    firing: Tensor
    sums: list[Tensor] = field(default_factory=list)


def run_blocks(operands: Operands, rows: int, record: bool, keep: bool = False) -> BlockRun:
    """rows: tokens per block, 0 for the default; keep: lists and counts of all slabs, for a backward pass."""
    x, y = operands.x, operands.x.new_empty(operands.tokens, operands.outputs)
    recorded = None
    if record:
        recorded = Recorded(torch.zeros(operands.neurons, dtype=torch.int64, device=x.device))
    rows = rows or DEFAULT_ROWS
    slab = _slab_tokens(operands, rows)
    stages = BlockStages(operands, min(slab, operands.tokens), rows)
    lists, counts = stages.workspace.lists, stages.workspace.counts
    if keep and slab < operands.tokens:
        lists, counts = (
            x.new_empty(size, dtype=torch.int32)
            for size in list_sizes(operands.tokens, operands.neurons, rows)
        )
    for start in range(0, operands.tokens, slab):
        part = x[start : start + slab]
        if keep:
            block = start // rows
            stages.list_into(lists[block * operands.neurons :], counts[block:])
        stages.select(part)
        stages.list(part.shape[0])
        if recorded is not None:
            _count_firing(stages, part.shape[0], recorded)
        stages.up(part)
        if recorded is not None:
            _sum_magnitudes(stages, part.shape[0], recorded)
        stages.down(y[start : start + slab])
    return BlockRun(y, recorded, lists, counts)


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


def _grid(stages: BlockStages, tokens: int) -> tuple[int, int]:
    return cdiv(stages.operands.neurons, _NEURONS), cdiv(stages.blocks(tokens), _BLOCKS)


def _count_firing(stages: BlockStages, tokens: int, recorded: Recorded) -> None:
    count_firing[_grid(stages, tokens)](
        stages.workspace.values,
        stages.workspace.active,
        recorded.firing,
        tokens,
        stages.operands.neurons,
        _BLOCKS,
        NEURONS=_NEURONS,
        ROWS=stages.tiles.rows,
    )


def _sum_magnitudes(stages: BlockStages, tokens: int, recorded: Recorded) -> None:
    workspace = stages.workspace
    sums = torch.empty(_grid(stages, tokens), dtype=torch.float64, device=workspace.hidden.device)
    sum_magnitudes[_grid(stages, tokens)](
        workspace.hidden,
        workspace.active,
        workspace.counts,
        sums,
        tokens,
        stages.operands.neurons,
        stages.chunks * stages.chunk,
        _BLOCKS,
        PACKED=stages.gated,
        NEURONS=_NEURONS,
        ROWS=stages.tiles.rows,
    )
    recorded.sums.append(sums)
