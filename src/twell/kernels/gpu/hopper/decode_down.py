"""The down projection for few tokens on compute capability 9.0, in Gluon; see `launch_decode`.

Rows of active neurons go from memory into the registers of tensor-core operands, warps take different tiles
of neurons and add up at the end. Nothing gathered passes through shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .common import sum_over_warps


@gluon.constexpr_function
def _bits(start, stop, axis, rank):
    """Bases of a linear layout: start, 2 * start, ... below stop, along one axis."""
    bases = []
    while start < stop:
        bases.append([start if i == axis else 0 for i in range(rank)])
        start *= 2
    return bases


@gluon.constexpr_function
def weights_layout(warps, tiles, width):
    """[warps, tiles, 8, width] as an operand of `mma_v2`: a lane holds all 8 slots of every fourth tile.

    Of the columns a lane loads width / 8 neighbours; the operand wants every eighth. Permuting columns
    makes one of the other, and moves nothing between lanes.
    """
    registers = _bits(1, width // 8, 3, 4) + _bits(1, 8, 2, 4) + _bits(4, tiles, 1, 4)
    lanes = _bits(1, 4, 1, 4) + _bits(width // 8, width, 3, 4)
    return gl.DistributedLinearLayout(registers, lanes, _bits(1, warps, 0, 4), [], [warps, tiles, 8, width])


@gluon.constexpr_function
def hidden_layout(warps, rows, tiles):
    """[warps, rows, tiles, 8] as the other operand has it."""
    registers = _bits(1, 8, 3, 4) + _bits(8, rows, 1, 4) + _bits(4, tiles, 2, 4)
    lanes = _bits(1, 4, 2, 4) + _bits(1, 8, 1, 4)
    return gl.DistributedLinearLayout(registers, lanes, _bits(1, warps, 0, 4), [], [warps, rows, tiles, 8])


@gluon.jit(do_not_specialize=["M"])
def decode_down_hopper(
    w,
    bias,
    values,
    neurons,
    counts,
    y,
    M,
    E,
    tiles,
    HAS_BIAS: gl.constexpr,
    ROWS: gl.constexpr,
    PART: gl.constexpr,
    WIDTH: gl.constexpr,
    TILES: gl.constexpr,
):
    """y [M, E] from groups of slots and w [H, E] (neuron-major).

    Grid: slices of WIDTH outputs, parts of PART tokens. Each warp takes TILES tiles at a time.
    """
    gdc_launch_dependents()
    DTYPE: gl.constexpr = y.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    SIDE: gl.constexpr = WARPS * TILES
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    WEIGHTS: gl.constexpr = weights_layout(WARPS, TILES, WIDTH)
    HIDDEN: gl.constexpr = hidden_layout(WARPS, PART, TILES)
    SLOTS: gl.constexpr = gl.SliceLayout(3, WEIGHTS)
    ONE: gl.constexpr = gl.SliceLayout(2, SLOTS)
    FLAT: gl.constexpr = gl.BlockedLayout([SIDE // 32], [32], [WARPS], [0])  # in every warp
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, WEIGHTS))))
    column = gl.program_id(0) * WIDTH + column[None, None, None, :]
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, ONE))[:, None]
    side = gl.arange(0, TILES, gl.SliceLayout(0, ONE))[None, :]
    slot = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, SLOTS)))[None, None, :]
    H_SIDE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, HIDDEN))
    h_warp = gl.arange(0, WARPS, gl.SliceLayout(1, H_SIDE))[:, None]
    h_side = gl.arange(0, TILES, gl.SliceLayout(0, H_SIDE))[None, :]
    h_token = gl.arange(0, PART, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, HIDDEN))))
    h_token = gl.program_id(1) * PART + h_token[None, :, None, None]
    h_slot = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, HIDDEN))))
    h_slot = h_slot[None, None, None, :]
    acc = gl.zeros([WARPS, PART, WIDTH], gl.float32, MMA)
    gdc_wait()
    for first in range(0, tiles, SIDE):
        flat = first + gl.arange(0, SIDE, FLAT)
        most = gl.max(gl.load(counts + flat, mask=flat < tiles, other=0), 0)
        tile = first + warp * TILES + side
        count = gl.load(counts + tile, mask=tile < tiles, other=0)
        h_tile = first + h_warp * TILES + h_side
        h_count = gl.load(counts + h_tile, mask=h_tile < tiles, other=0)[:, None, :, None]
        h_tile = h_tile[:, None, :, None]
        # Neurons are looked up one group ahead; of the first group before it is known how many there are.
        where = neurons + tile[:, :, None] * 8 + slot
        coming = gl.load(where, mask=(tile < tiles)[:, :, None] & (slot < 8), other=0)
        for group in range(0, gl.maximum((most + 7) // 8, 1)):
            neuron = coming
            where += tiles * 8
            coming = gl.load(where, mask=(count > group * 8 + 8)[:, :, None] & (slot < 8), other=0)
            listed = group * 8 + slot < count[:, :, None]
            cell = values + ((group * tiles + h_tile) * ROWS + h_token) * 8 + h_slot
            hidden = gl.load(cell, mask=(h_count > group * 8) & (h_token < M) & (h_slot < 8), other=0.0)
            hidden = gl.where(group * 8 + h_slot < h_count, hidden, 0.0).to(DTYPE)
            wanted = listed[:, :, :, None] & (column < E)
            rows = gl.load(w + (neuron * E)[:, :, :, None] + column, mask=wanted, other=0.0)
            rows = gl.permute(gl.reshape(rows, [WARPS, TILES * 8, 8, WIDTH // 8]), [0, 1, 3, 2])
            acc = mma_v2(
                gl.convert_layout(
                    gl.reshape(hidden, [WARPS, PART, TILES * 8]), gl.DotOperandLayout(0, MMA, 8)
                ),
                gl.convert_layout(
                    gl.reshape(rows, [WARPS, TILES * 8, WIDTH]), gl.DotOperandLayout(1, MMA, 8)
                ),
                acc,
            )
    total = sum_over_warps(acc)
    total = gl.reshape(gl.permute(gl.reshape(total, [PART, WIDTH // 8, 8]), [0, 2, 1]), [PART, WIDTH])
    OUT: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [WARPS, 1], [1, 0])
    total = gl.convert_layout(total, OUT)
    token = gl.program_id(1) * PART + gl.arange(0, PART, gl.SliceLayout(1, OUT))
    out = gl.program_id(0) * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, OUT))
    if HAS_BIAS:
        total += gl.load(bias + out, mask=out < E, other=0.0).to(gl.float32)[None, :]
    inside = (token < M)[:, None] & (out < E)[None, :]
    gl.store(y + (token * E)[:, None] + out[None, :], total.to(DTYPE), mask=inside)
