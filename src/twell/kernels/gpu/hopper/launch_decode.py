"""The block for few tokens (decode) on compute capability 9.0: two launches, as in `triton/decode`.

    decode_select_up_hopper    the selector and up, tile by tile of 64 neurons
    decode_down_hopper         the down projection, slice by slice of the output

Gathered rows never pass through shared memory: copies that are masked off cost as much there as copies that
are not, and most are. The slots of a tile come in groups of 8, the depth that one lane of a tensor-core
operand reads at once:

    counts  int32 [tiles]                   active neurons of each tile
    neurons int32 [8, tiles, 8]             which, in ascending order: group, tile, slot
    values  dtype [8, tiles, ROWS, 8]       their hidden activations; past a tile's count, anything
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from torch import Tensor

from ..decode import down_arguments, select_constants
from ..device import Gpu, gpu_of
from ..launch import Tokens, kind_number, launch, weights_are_steady
from ..operands import Operands
from ..sizes import cdiv, power_of_two
from ..workspace import Piece
from .decode_down import decode_down_hopper
from .decode_select import decode_select_up_hopper
from .launch_block import tiled

_TILE = 64
_WARPS, _DOWN_WARPS = 4, 8
_DEPTH = 128  # few large steps: every stage costs 50 ns of setting up its barriers
_STAGE_BYTES = _TILE * _DEPTH * 2
_MOST_STAGES, _FEWEST_STAGES = 6, 3


@dataclass(frozen=True)
class HopperDecodeTiles:
    """rows: tokens, rounded up; x_tiles, gathered, stages, resident of the first kernel; of the second: part
    and width (tokens and outputs per program), side (tiles that a warp takes at a time)."""

    rows: int
    x_tiles: int
    gathered: int
    stages: int
    resident: bool
    part: int
    width: int
    side: int
    neurons: ClassVar[int] = _TILE


@lru_cache(maxsize=1024)
def hopper_decode_tiles(gpu: Gpu, tokens: int, features: int, outputs: int) -> HopperDecodeTiles:
    """H200, bf16, D 2048, H 5632, nnz 24, weights cold, CUDA graph, microseconds of both kernels (cuBLAS'
    selector alone: 8.4):

    1, 8 tokens    depth 128, 6 stages 13.1, 13.3; 7 stages 13.4, 13.4; depth 64, 12 stages 13.7, 14.1
    32 tokens      gathering 16 17.6, gathering 8 19.1
    64 tokens      23.9, with parts of 16 tokens 26.2 (x does not fit; x from L2 24.5)

    Where x does not fit, D 4096 and H 11008: with 32 tokens of nnz 55 and 220, up read whole 65.5 and 71.8,
    gathering 8 55.4 and 72.3, gathering 16 57.1 and 67.2; with 64 tokens up read whole 81.0 and 99.0,
    gathering 8 83.3 and 100.1.
    """
    rows = max(16, power_of_two(tokens))
    gathered = 8 if rows == 16 else 16
    steps = cdiv(features, _DEPTH)
    steps = cdiv(steps * _DEPTH // 64, _WARPS) * _WARPS * 64 // _DEPTH  # equal shares of 64 for every warp
    left = gpu.shared_memory - rows * steps * _DEPTH * 2 - 4 * _WARPS * rows * gathered - 1024
    stages = min(_MOST_STAGES, left // _STAGE_BYTES)
    resident = stages >= _FEWEST_STAGES
    if not resident:
        gathered = 16 if rows == 32 else 0
        left = gpu.shared_memory - 4 * _WARPS * rows * gathered - 1024
        steps = stages = min(_MOST_STAGES, left // (_STAGE_BYTES + rows * _DEPTH * 2))
    # One program of the down projection for each processor, as far as that goes.
    if rows == 16:
        fitting = [width for width in (16, 32) if cdiv(outputs, width) <= gpu.processors]
        width = (*fitting, 64)[0]
        part, side = 16, 8 if width == 64 else 16
    else:
        width = 32
        spare = rows == 32 and 2 * cdiv(outputs, width) <= gpu.processors
        part, side = (16, 16) if spare else (32, 8)
    return HopperDecodeTiles(rows, steps, gathered, stages, resident, part, width, side)


def launch_hopper(
    operands: Operands, tiles: HopperDecodeTiles, packed: tuple[Piece, Piece, Piece], y: Tensor
) -> None:
    """packed: values, neurons and counts."""
    gpu = gpu_of(operands.x.device)
    count = cdiv(operands.neurons, _TILE)
    compiled = kind_number((operands.kind, tiles))
    select = tiled(operands.select, [_TILE, _DEPTH])
    arguments = (
        operands.x,
        tiled(operands.x, [tiles.rows, _DEPTH], by_tokens=True),
        select,
        select if operands.up is None else tiled(operands.up, [_TILE, _DEPTH]),
        operands.pointer(operands.up),
        operands.pointer(operands.select_bias),
        operands.pointer(operands.up_bias),
        *packed,
        Tokens(operands.tokens),
        operands.neurons,
        operands.features,
        operands.threshold,
        int(weights_are_steady()),
    )
    constants = select_constants(operands) | {
        "X_TILES": tiles.x_tiles,
        "GATHERED": tiles.gathered,
        "STAGES": tiles.stages,
        "RESIDENT": tiles.resident,
    }
    grid = (min(gpu.processors, count),)
    # Their launches overlap the kernels before them.
    launch(compiled, decode_select_up_hopper, grid, arguments, constants, num_warps=_WARPS, launch_pdl=True)
    arguments = down_arguments(operands, packed, y, count)
    constants = {
        "HAS_BIAS": operands.down_bias is not None,
        "ROWS": tiles.rows,
        "PART": tiles.part,
        "WIDTH": tiles.width,
        "TILES": tiles.side,
    }
    grid = (cdiv(operands.outputs, tiles.width), cdiv(operands.tokens, tiles.part))
    launch(compiled, decode_down_hopper, grid, arguments, constants, num_warps=_DOWN_WARPS, launch_pdl=True)
