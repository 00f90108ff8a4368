"""The row path: pack row TwELL words, then up and down token by token, on slabs that share one buffer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...._errors import reject
from ....formats.row import MAX_COLUMNS
from ..device import Gpu, gpu_of
from ..operands import Operands
from ..sizes import cdiv, power_of_two
from .apply import apply_rows
from .pack import pack_rows

WORDS_BYTES = 512 << 20
COMPRESSIONS = (2, 4, 8)
_WIDEST = 8192  # outputs that one program keeps in registers


@dataclass(frozen=True, kw_only=True)
class RowTiles:
    """tile: neurons per tile of the format. pack_*: the matmul tile's tokens, the depth of one step, warps,
    stages and the form of the kernel; apply_*: neurons taken together, features and outputs of one step,
    warps."""

    tile: int = 256
    pack_tokens: int = 128
    pack_depth: int = 64
    pack_warps: int = 8
    pack_stages: int = 4
    pack_hopper: bool = True
    apply_group: int = 4
    apply_depth: int = 1024
    apply_width: int = 2048
    apply_warps: int = 4


def row_tiles(gpu: Gpu, features: int, outputs: int) -> RowTiles:
    """Tiles whose registers and shared memory fit the device: no kernel spills on 8.0, 9.0 or 10.0.

    H200, D 2048, H 5632, 65,536 tokens, nnz 24, milliseconds of up and down: groups of 4 with 4 warps 2.33,
    8 with 4 2.79, 2 with 4 2.50, 4 with 2 2.47, 2 with 2 2.30, 1 with 1 2.51 (at nnz 64: 5.6, 6.2, 6.3, 5.8,
    5.6, 6.2).
    """
    if gpu.capability == (0, 0):  # the interpreter: small, so that small tests cross tile borders
        return RowTiles(tile=64, pack_tokens=32, pack_depth=16, apply_depth=32, apply_width=64)
    width = power_of_two(outputs)
    if width > _WIDEST:
        width = _WIDEST // 2
    warps = 4 if width <= 2048 else 8
    tiles = RowTiles(
        # 8 features for each thread: up and down rows then lie alike in registers, and no exchange is needed.
        apply_depth=min(power_of_two(features), 256 * warps),
        apply_width=width,
        apply_warps=warps,
    )
    return tiles if gpu.hopper else replace(tiles, pack_tokens=64, pack_stages=3, pack_hopper=False)


def run_rows(operands: Operands, compression: int = 8) -> Tensor:
    """y [M, E]. compression: 2, 4 or 8; a tile keeps 256 / compression words. Exact at any sparsity.

    Refuses types that are not 16-bit wide and more neurons than a 16-bit index can name.
    """
    _check(operands, compression)
    y = operands.x.new_empty(operands.tokens, operands.outputs)
    if operands.tokens == 0:
        return y
    gpu = gpu_of(operands.x.device)
    tiles = row_tiles(gpu, operands.features, operands.outputs)
    width = _row_words(operands, tiles, compression)
    slab = _slab_tokens(operands.tokens, width, tiles.pack_tokens)
    words = operands.x.new_empty(min(slab, operands.tokens), width, dtype=torch.int32)
    for start in range(0, operands.tokens, slab):
        part = slice(start, min(start + slab, operands.tokens))
        x = operands.x[part]
        _launch_pack(operands, x, words, gpu, tiles, compression)
        _launch_apply(operands, x, words, y[part], tiles, compression)
    return y


def packed_words(operands: Operands, compression: int = 8) -> Tensor:
    """int32 [M, tiles * tile / compression]: the words of all tokens, zeros where a tile has no entry.

    Viewed as uint32 they are the `words` of a `twell.formats.TwELL`, but for two things: entries of a tile
    are in no particular order, and a tile that overflows keeps its true count, which exceeds its capacity.
    """
    _check(operands, compression)
    gpu = gpu_of(operands.x.device)
    tiles = row_tiles(gpu, operands.features, operands.outputs)
    words = operands.x.new_zeros(operands.tokens, _row_words(operands, tiles, compression), dtype=torch.int32)
    if operands.tokens:
        _launch_pack(operands, operands.x, words, gpu, tiles, compression)
    return words


def _check(operands: Operands, compression: int) -> None:
    if operands.x.dtype not in (torch.bfloat16, torch.float16):
        reject("x", f"dtype {operands.x.dtype}", "torch.bfloat16 | torch.float16: a word holds 16-bit values")
    if operands.neurons > MAX_COLUMNS:
        reject("up", f"H = {operands.neurons} neurons", f"at most {MAX_COLUMNS}, the limit of a 16-bit index")
    if compression not in COMPRESSIONS:
        reject("compression", repr(compression), " | ".join(map(str, COMPRESSIONS)))


def _row_words(operands: Operands, tiles: RowTiles, compression: int) -> int:
    return cdiv(operands.neurons, tiles.tile) * (tiles.tile // compression)


def _slab_tokens(tokens: int, row_words: int, step: int) -> int:
    """Equal slabs, in whole matmul tiles, whose words fit the buffer."""
    blocks = cdiv(tokens, step)
    limit = WORDS_BYTES // (4 * row_words) // step
    slabs = cdiv(blocks, max(limit, 1))
    return cdiv(blocks, slabs) * step


def _launch_pack(
    operands: Operands, x: Tensor, words: Tensor, gpu: Gpu, tiles: RowTiles, compression: int
) -> None:
    work = cdiv(x.shape[0], tiles.pack_tokens) * cdiv(operands.neurons, tiles.tile)
    source, weights = x, operands.select
    if tiles.pack_hopper:
        source = TensorDescriptor.from_tensor(source, [tiles.pack_tokens, tiles.pack_depth])
        weights = TensorDescriptor.from_tensor(weights, [tiles.tile, tiles.pack_depth])
    pack_rows[(min(gpu.processors, work),)](
        source,
        weights,
        operands.pointer(operands.select_bias),
        words,
        x.shape[0],
        operands.neurons,
        operands.features,
        operands.threshold,
        HOPPER=tiles.pack_hopper,
        IN_PLACE=gpu.capability != (0, 0),  # the interpreter knows no machine instructions
        HAS_BIAS=operands.select_bias is not None,
        PLAIN=operands.plain,
        SQUARE=operands.square,
        EVEN=operands.neurons % tiles.tile == 0,
        TOKENS=tiles.pack_tokens,
        TILE=tiles.tile,
        WORDS=tiles.tile // compression,
        DEPTH=tiles.pack_depth,
        num_warps=tiles.pack_warps,
        num_stages=tiles.pack_stages,
    )


def _launch_apply(
    operands: Operands, x: Tensor, words: Tensor, y: Tensor, tiles: RowTiles, compression: int
) -> None:
    across = cdiv(operands.neurons, tiles.tile)
    apply_rows[(x.shape[0], cdiv(operands.outputs, tiles.apply_width))](
        x,
        words,
        operands.select,
        operands.pointer(operands.up),
        operands.down,
        operands.pointer(operands.select_bias),
        operands.pointer(operands.up_bias),
        operands.pointer(operands.down_bias),
        y,
        operands.neurons,
        operands.features,
        operands.outputs,
        across,
        operands.threshold,
        HAS_SELECT_BIAS=operands.select_bias is not None,
        HAS_UP_BIAS=operands.up_bias is not None,
        HAS_DOWN_BIAS=operands.down_bias is not None,
        GATED=operands.up is not None,
        SQUARE=operands.square,
        CLAMP_UP=operands.clamp_up,
        TILE=tiles.tile,
        WORDS=tiles.tile // compression,
        TILES=power_of_two(across),
        GROUP=tiles.apply_group,
        DEPTH=tiles.apply_depth,
        WIDTH=tiles.apply_width,
        num_warps=tiles.apply_warps,
    )
