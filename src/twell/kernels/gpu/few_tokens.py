"""Launches the few-token kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .few import few_down, few_select_up
from .launch import Tokens, kind_number, launch
from .numbers import cdiv, power_of_two
from .operands import STEADY, Operands, element_bytes
from .sizes import bucket
from .tape import Tapes, recorded, replay
from .target import Target, target_of
from .workspace import Piece, buffer_sizes, carve


@dataclass(frozen=True, kw_only=True)
class FewTiles:
    """rows: tokens per block; neurons, depth, warps, stages of `few_select_up`; width (outputs per program),
    side (tiles taken side by side), warps and stages of `few_down`."""

    rows: int
    neurons: int
    depth: int
    warps: int
    stages: int
    width: int
    side: int
    down_warps: int
    down_stages: int


@lru_cache(maxsize=1024)
def few_tiles(target: Target, dtype: torch.dtype, tokens: int, neurons: int, features: int) -> FewTiles:
    """Tried on an H200, which has its own kernels now; microseconds of both kernels in a CUDA graph, bf16,
    D 2048, H 5632, nnz 24, weights cold (dense about 32):

    1 token     8 neurons x 2048, 4 warps 13.0; 8 x 1024 14.2; 16 x 1024 17
    8 tokens    32 x 256, 4 stages 21.4; 32 x 128, 6 stages 22; 16 x 512 25
    64 tokens   64 x 128 28; 32 x 128 45
    """
    wide = element_bytes(dtype) > 2
    if target.capability == (0, 0):
        rows = 1 if tokens == 1 else 16
        return FewTiles(
            rows=rows, neurons=16, depth=16, warps=4, stages=1, width=16, side=4, down_warps=4, down_stages=1
        )
    if tokens == 1:
        depth = min(2048, power_of_two(features)) // (2 if wide else 1)
        side = min(1024, power_of_two(cdiv(neurons, 8)))
        return FewTiles(
            rows=1,
            neurons=8,
            depth=depth,
            warps=4,
            stages=1,
            width=32,
            side=side,
            down_warps=8,
            down_stages=2,
        )
    rows = min(64, max(16, power_of_two(tokens)))
    tile = 64 if rows == 64 else 32
    depth, stages = (128, 4) if rows == 64 else (256, 4)
    if wide:
        depth, stages = 32, 2
    side = min(128 if rows == 64 else 256, power_of_two(cdiv(neurons, tile)))
    return FewTiles(
        rows=rows,
        neurons=tile,
        depth=depth,
        warps=4,
        stages=stages,
        width=32,
        side=max(side, 16),
        down_warps=4,
        down_stages=2 if wide else 5,
    )


@dataclass(frozen=True)
class FewRun:
    """y [M, E]; counts: active neurons per tile, until the next call; slots: their sum if all were active."""

    y: Tensor
    counts: Piece
    slots: int


def run_few(operands: Operands, tapes: Tapes | None = None) -> FewRun:
    """The block in two launches. tapes: of earlier calls of this layer, for those that come."""
    target = target_of(operands.x.device)
    if target.hopper and element_bytes(operands.x.dtype) == 2:
        from .hopper_few import run_few_hopper  # imported here: other devices need no Gluon

        return run_few_hopper(operands, tapes)
    tiles = few_tiles(target, operands.x.dtype, operands.tokens, operands.neurons, operands.features)
    blocks = cdiv(operands.tokens, tiles.rows)
    count = cdiv(operands.neurons, tiles.neurons)
    slots = blocks * count * tiles.neurons
    parts = (
        ((slots, tiles.rows), operands.x.dtype),
        ((slots,), torch.int32),
        ((blocks * count,), torch.int32),
    )
    buffer, (values, neurons, counts) = carve(operands.x.device, parts)
    y = operands.x.new_empty(operands.tokens, operands.outputs)
    tensors = (*operands.weights, buffer, operands.x, y)
    kind = few_kind(operands)
    if not replay(tapes, kind, tensors, operands.x.device, operands.tokens):
        with recorded(tapes, kind, tensors, STEADY, buffer_sizes(parts)):
            _launch(operands, tiles, (values, neurons, counts), y)
    return FewRun(y, counts, blocks * operands.neurons)


def few_kind(operands: Operands) -> tuple:
    """Of a tape."""
    return "few", operands.kind, bucket(operands.tokens)


def _launch(operands: Operands, tiles: FewTiles, packed: tuple[Piece, Piece, Piece], y: Tensor) -> None:
    """packed: values, neurons and counts; see `few`."""
    blocks = cdiv(operands.tokens, tiles.rows)
    count = cdiv(operands.neurons, tiles.neurons)
    # The second kernel's launch overlaps the first.
    chained = target_of(operands.x.device).capability >= (9, 0)
    compiled = kind_number((operands.kind, tiles))
    arguments = (
        operands.x,
        operands.select,
        operands.pointer(operands.up),
        operands.pointer(operands.select_bias),
        operands.pointer(operands.up_bias),
        *packed,
        Tokens(operands.tokens),
        operands.neurons,
        operands.features,
        operands.threshold,
    )
    constants = {
        "HAS_SELECT_BIAS": operands.select_bias is not None,
        "HAS_UP_BIAS": operands.up_bias is not None,
        "GATED": operands.up is not None,
        "SQUARE": operands.square,
        "NEURONS": tiles.neurons,
        "ROWS": tiles.rows,
        "DEPTH": tiles.depth,
        "PRECISION": operands.precision,
        "CHAINED": chained,
    }
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    launch(compiled, few_select_up, (count, blocks), arguments, constants, **options)
    arguments = (
        operands.down,
        operands.pointer(operands.down_bias),
        *packed,
        y,
        Tokens(operands.tokens),
        operands.outputs,
        count,
    )
    constants = {
        "HAS_BIAS": operands.down_bias is not None,
        "NEURONS": tiles.neurons,
        "TILES": tiles.side,
        "ROWS": tiles.rows,
        "WIDTH": tiles.width,
        "PRECISION": operands.precision,
        "CHAINED": chained,
    }
    options = {"num_warps": tiles.down_warps, "num_stages": tiles.down_stages}
    if chained:
        options["launch_pdl"] = True
    grid = (cdiv(operands.outputs, tiles.width), blocks)
    launch(compiled, few_down, grid, arguments, constants, **options)
