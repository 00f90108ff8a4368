"""The block path: select, list, up, down, on slabs of tokens that share one workspace."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .block_stages import BlockStages
from .numbers import cdiv
from .operands import Operands, element_bytes
from .statistics import count_firing, sum_magnitudes
from .tiles import DEFAULT_ROWS

WORKSPACE_BYTES = 2 << 30
_LARGEST_CHUNK = 256  # hidden rows come in whole chunks of up
_BLOCKS, _NEURONS = 8, 32  # of one program of the statistics


@dataclass(frozen=True)
class Recorded:
    """firing: int64 [H]; sums: float32 tensors whose total is the sum of |hidden| over all tokens."""

    firing: Tensor
    sums: list[Tensor] = field(default_factory=list)


def run_blocks(operands: Operands, rows: int, record: bool) -> tuple[Tensor, Recorded | None, Tensor, int]:
    """y [M, E]; the statistics if asked for; the last slab's active neurons per block and their maximum.

    rows: tokens per block, 0 for the default.
    """
    x, y = operands.x, operands.x.new_empty(operands.tokens, operands.outputs)
    recorded = None
    if record:
        recorded = Recorded(torch.zeros(operands.neurons, dtype=torch.int64, device=x.device))
    slab = _slab_tokens(operands, rows or DEFAULT_ROWS)
    stages = BlockStages(operands, min(slab, operands.tokens), rows)
    for start in range(0, operands.tokens, slab):
        part = x[start : start + slab]
        stages.select(part)
        stages.list(part.shape[0])
        if recorded is not None:
            _count_firing(stages, part.shape[0], recorded)
        stages.up(part)
        if recorded is not None:
            _sum_magnitudes(stages, part.shape[0], recorded)
        stages.down(y[start : start + slab])
    counts = stages.workspace.counts
    return y, recorded, counts, counts.numel() * operands.neurons


def _slab_tokens(operands: Operands, rows: int) -> int:
    """Equal slabs, in whole blocks, whose values and hidden rows fit the workspace."""
    values = operands.neurons
    hidden = 0 if operands.up is None else cdiv(operands.neurons, _LARGEST_CHUNK) * _LARGEST_CHUNK
    limit = WORKSPACE_BYTES // ((values + hidden) * element_bytes(operands.x.dtype)) // rows
    blocks = cdiv(operands.tokens, rows)
    slabs = cdiv(blocks, max(limit, 1))
    return cdiv(blocks, slabs) * rows


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
    sums = torch.empty(_grid(stages, tokens), dtype=torch.float32, device=workspace.hidden.device)
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
