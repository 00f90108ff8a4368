"""The block for few tokens (decode), in two launches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .device import Gpu, gpu_of
from .launch import Tokens, kind_number, launch
from .operands import STEADY, Operands, element_bytes
from .sizes import bucket, cdiv, power_of_two
from .tape import Tapes, recorded, replay
from .triton.decode import decode_down, decode_select_up
from .workspace import Piece, buffer_sizes, carve


@dataclass(frozen=True, kw_only=True)
class DecodeTiles:
    """rows: tokens per block; neurons, depth, warps, stages of `decode_select_up`; width (outputs per
    program), side (tiles taken side by side), warps and stages of `decode_down`."""

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
def decode_tiles(gpu: Gpu, dtype: torch.dtype, tokens: int, neurons: int, features: int) -> DecodeTiles:
    """Tried on an H200, which has its own kernels now; microseconds of both kernels in a CUDA graph, bf16,
    D 2048, H 5632, nnz 24, weights cold (dense about 32):

    1 token     8 neurons x 2048, 4 warps 13.0; 8 x 1024 14.2; 16 x 1024 17
    8 tokens    32 x 256, 4 stages 21.4; 32 x 128, 6 stages 22; 16 x 512 25
    64 tokens   64 x 128 28; 32 x 128 45
    """
    wide = element_bytes(dtype) > 2
    if gpu.capability == (0, 0):
        rows = 1 if tokens == 1 else 16
        return DecodeTiles(
            rows=rows, neurons=16, depth=16, warps=4, stages=1, width=16, side=4, down_warps=4, down_stages=1
        )
    if tokens == 1:
        depth = min(2048, power_of_two(features)) // (2 if wide else 1)
        side = min(1024, power_of_two(cdiv(neurons, 8)))
        return DecodeTiles(
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
    return DecodeTiles(
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
class DecodeRun:
    """y [M, E]; counts: active neurons per tile, until the next call; slots: their sum if all were active."""

    y: Tensor
    counts: Piece
    slots: int


def run_decode(operands: Operands, tapes: Tapes | None = None) -> DecodeRun:
    """The block in two launches. tapes: launches of earlier calls of this layer, for later ones."""
    gpu = gpu_of(operands.x.device)
    if gpu.hopper and element_bytes(operands.x.dtype) == 2:
        from .hopper.launch_decode import hopper_decode_tiles, launch_hopper  # other devices need no Gluon

        tiles = hopper_decode_tiles(gpu, operands.tokens, operands.features, operands.outputs)
        launch_both = launch_hopper
    else:
        tiles = decode_tiles(gpu, operands.x.dtype, operands.tokens, operands.neurons, operands.features)
        launch_both = _launch
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
    kind = decode_kind(operands)
    if not replay(tapes, kind, tensors, operands.x.device, operands.tokens):
        with recorded(tapes, kind, tensors, STEADY, buffer_sizes(parts)):
            launch_both(operands, tiles, (values, neurons, counts), y)
    return DecodeRun(y, counts, blocks * operands.neurons)


def decode_kind(operands: Operands) -> tuple:
    """The kind of a decode's tape."""
    return "decode", operands.kind, bucket(operands.tokens)


def _launch(operands: Operands, tiles: DecodeTiles, packed: tuple[Piece, Piece, Piece], y: Tensor) -> None:
    """packed: values, neurons and counts; see `triton.decode`."""
    blocks = cdiv(operands.tokens, tiles.rows)
    count = cdiv(operands.neurons, tiles.neurons)
    # The second kernel's launch overlaps the first.
    chained = gpu_of(operands.x.device).capability >= (9, 0)
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
    constants = select_constants(operands) | {
        "NEURONS": tiles.neurons,
        "ROWS": tiles.rows,
        "DEPTH": tiles.depth,
        "CHAINED": chained,
    }
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    launch(compiled, decode_select_up, (count, blocks), arguments, constants, **options)
    arguments = down_arguments(operands, packed, y, count)
    constants = {
        "HAS_BIAS": operands.down_bias is not None,
        "NEURONS": tiles.neurons,
        "TILES": tiles.side,
        "ROWS": tiles.rows,
        "WIDTH": tiles.width,
        "CHAINED": chained,
    }
    options = {"num_warps": tiles.down_warps, "num_stages": tiles.down_stages}
    if chained:
        options["launch_pdl"] = True
    grid = (cdiv(operands.outputs, tiles.width), blocks)
    launch(compiled, decode_down, grid, arguments, constants, **options)


def select_constants(operands: Operands) -> dict[str, bool]:
    return {
        "HAS_SELECT_BIAS": operands.select_bias is not None,
        "HAS_UP_BIAS": operands.up_bias is not None,
        "GATED": operands.up is not None,
        "SQUARE": operands.square,
        "CLAMP_UP": operands.clamp_up,
    }


def down_arguments(operands: Operands, packed: tuple[Piece, Piece, Piece], y: Tensor, tiles: int) -> tuple:
    """tiles: of neurons."""
    return (
        operands.down,
        operands.pointer(operands.down_bias),
        *packed,
        y,
        Tokens(operands.tokens),
        operands.outputs,
        tiles,
    )
