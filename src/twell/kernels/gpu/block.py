"""The block path: select, list, up, down, on slabs of tokens that share one workspace."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .block_launches import BlockLaunches
from .launch import Tokens, launch
from .operands import STEADY, Operands, element_bytes
from .sizes import DEFAULT_ROWS, cdiv, list_sizes
from .tape import Tapes, recorded, replay
from .triton.statistics import count_firing, sum_magnitudes
from .workspace import Piece

WORKSPACE_BYTES = 2 << 30
_LARGEST_CHUNK = 256  # hidden rows come in whole chunks of up
_BLOCKS, _NEURONS = 8, 32  # that one program gathers statistics of


@dataclass(frozen=True)
class BlockRun:
    """The results of a call: y [M, E], the statistics if asked for, and which neurons were active.

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

    def l1(self, tokens: int) -> Tensor:
        return (self.sums.sum() / tokens).float()


def run_blocks(
    operands: Operands, rows: int, record: bool, keep: bool = False, tapes: Tapes | None = None
) -> BlockRun:
    """rows: tokens per block, 0 for the default; keep: lists and counts of all slabs, for a backward pass;
    tapes: launches of earlier calls of this layer, for later ones."""
    x, y = operands.x, operands.x.new_empty(operands.tokens, operands.outputs)
    rows = rows or DEFAULT_ROWS
    slab = _slab_tokens(operands, rows)
    launches = BlockLaunches(operands, min(slab, operands.tokens), rows)
    lists = counts = None
    if keep:
        lists, counts = (
            x.new_empty(size, dtype=torch.int32)
            for size in list_sizes(operands.tokens, operands.neurons, rows)
        )
    statistics = None
    if record:
        statistics = empty_statistics(operands.neurons, tokens_sums(operands, rows), x.device)
    outputs = y, lists, counts, *((statistics.firing, statistics.sums) if record else ())
    tensors = (*operands.weights, launches.workspace.buffer, x, *outputs)
    kind = blocks_kind(operands, rows, record, keep)
    if not replay(tapes, kind, tensors, x.device, tokens_to_play(operands, rows)):
        with recorded(tapes, kind, tensors, STEADY, (launches.workspace.bytes,)):
            _launch(launches, slab, y, lists, counts, statistics)
    return BlockRun(y, statistics, lists, counts if keep else launches.workspace.counts)


def blocks_kind(operands: Operands, rows: int, record: bool, keep: bool) -> tuple:
    """The kind of a tape: one for all numbers of tokens with as many blocks, as long as there is one slab."""
    rows = rows or DEFAULT_ROWS
    tokens = tokens_to_play(operands, rows)
    count = operands.tokens if tokens is None else (cdiv(tokens, rows),)
    return "blocks", operands.kind, count, rows, record, keep


def tokens_to_play(operands: Operands, rows: int) -> int | None:
    """The number of tokens to play a tape with; None for several slabs, which have their own numbers."""
    return operands.tokens if _slab_tokens(operands, rows or DEFAULT_ROWS) >= operands.tokens else None


def _launch(
    launches: BlockLaunches,
    slab: int,
    y: Tensor,
    lists: Tensor | None,
    counts: Tensor | None,
    statistics: Statistics | None,
) -> None:
    operands, rows = launches.operands, launches.tiles.rows
    sums = (
        None
        if statistics is None
        else iter(statistics.sums.split(_programs(operands, min(slab, operands.tokens), rows)))
    )
    for start in range(0, operands.tokens, slab):
        part = operands.x[start : start + slab]
        if lists is not None:
            block = start // rows
            launches.list_into(lists[block * operands.neurons :], counts[block:])
        launches.select(part)
        launches.list(part.shape[0])
        if statistics is not None:
            _count_firing(launches, part.shape[0], statistics.firing)
        launches.up(part)
        if statistics is not None:
            _sum_magnitudes(launches, part.shape[0], next(sums))
        launches.down(y[start : start + slab])


def _slab_tokens(operands: Operands, rows: int) -> int:
    """Equal slabs, in whole blocks, whose values and hidden rows fit the workspace."""
    values = operands.neurons
    hidden = 0 if operands.up is None else cdiv(operands.neurons, _LARGEST_CHUNK) * _LARGEST_CHUNK
    limit = WORKSPACE_BYTES // ((values + hidden) * element_bytes(operands.x.dtype)) // rows
    blocks = cdiv(operands.tokens, rows)
    slabs = cdiv(blocks, max(limit, 1))
    per_slab = cdiv(blocks, slabs)
    if slabs > 1:  # their counts start at multiples of 16 bytes, as the kernels were compiled for
        per_slab = cdiv(per_slab, 4) * 4
    return per_slab * rows


def empty_statistics(neurons: int, sums: int, device: torch.device) -> Statistics:
    """sums: how many; see `tokens_sums`."""
    return Statistics(
        torch.zeros(neurons, dtype=torch.int64, device=device),
        torch.zeros(sums, dtype=torch.float64, device=device),
    )


def tokens_sums(operands: Operands, rows: int) -> int:
    """How many sums of magnitudes a call leaves."""
    slab = _slab_tokens(operands, rows)
    return cdiv(operands.tokens, slab) * _programs(operands, min(slab, operands.tokens), rows)


def _grid(neurons: int, blocks: int) -> tuple[int, int]:
    return cdiv(neurons, _NEURONS), cdiv(blocks, _BLOCKS)


def _programs(operands: Operands, tokens: int, rows: int) -> int:
    """Programs that gather the statistics of one slab, rounded up to what is aligned."""
    across, along = _grid(operands.neurons, cdiv(tokens, rows))
    return cdiv(across * along, 2) * 2


def _count_firing(launches: BlockLaunches, tokens: int, firing: Tensor) -> None:
    workspace = launches.workspace
    neurons = launches.operands.neurons
    arguments = workspace.values, workspace.active, firing, Tokens(tokens), neurons, _BLOCKS
    constants = {"NEURONS": _NEURONS, "ROWS": launches.tiles.rows}
    grid = _grid(neurons, launches.blocks(tokens))
    launch(launches.kind, count_firing, grid, arguments, constants)


def _sum_magnitudes(launches: BlockLaunches, tokens: int, sums: Tensor) -> None:
    workspace = launches.workspace
    arguments = (
        workspace.hidden,
        workspace.active,
        workspace.counts,
        sums,
        Tokens(tokens),
        launches.operands.neurons,
        launches.chunks * launches.chunk,
        _BLOCKS,
    )
    constants = {"PACKED": launches.gated, "NEURONS": _NEURONS, "ROWS": launches.tiles.rows}
    grid = _grid(launches.operands.neurons, launches.blocks(tokens))
    launch(launches.kind, sum_magnitudes, grid, arguments, constants)
