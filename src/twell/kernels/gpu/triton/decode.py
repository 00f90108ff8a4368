"""The block for few tokens (decode): two launches, bound by reading the selector's weights once.

    decode_select_up    per tile of neurons: the selector, then up for those neurons that a token activates,
                     packed at the front of the tile's own slots
    decode_down         per slice of the output: slot 0 of every tile, then slot 1, ... of those that have it

Both take blocks of ROWS tokens along the second grid axis. Only active rows of up and down are read.
Tile-local slots need no list over all neurons, so no third launch, no atomics, no order to lose.

    counts [B, tiles] int32                  active neurons of each tile
    neurons [B, tiles * NEURONS] int32       which, in ascending order
    values [B, tiles * NEURONS, ROWS]        their hidden activations
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .common import activate, add_product, factor_of, rounded, zero_sum


# One compiled kernel for any number of tokens: a CUDA graph capture must not meet a new one.
@triton.jit(do_not_specialize=["M"])
def decode_select_up(
    x,
    select,
    up,
    select_bias,
    up_bias,
    values,
    neurons,
    counts,
    M,
    H,
    D,
    threshold,
    HAS_SELECT_BIAS: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    SQUARE: tl.constexpr,
    CLAMP_UP: tl.constexpr,
    NEURONS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    CHAINED: tl.constexpr,
):
    DTYPE: tl.constexpr = values.dtype.element_ty
    if CHAINED:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    block = tl.program_id(1)
    neuron = tile * NEURONS + tl.arange(0, NEURONS)
    row = tl.arange(0, ROWS)
    token = block * ROWS + row
    real = neuron < H
    pre = _product(x, select, neuron, token, real, M, D, NEURONS, ROWS, DEPTH)
    if HAS_SELECT_BIAS:
        pre += tl.load(select_bias + neuron, mask=real, other=0.0).to(tl.float32)[:, None]
    value = rounded(activate(rounded(pre, DTYPE), threshold, SQUARE), DTYPE)
    value = tl.where((token < M)[None, :], value, 0.0)
    live = (tl.max((value != 0.0).to(tl.int32), 1) > 0) & real
    # Over a column: Triton 3.6 cannot sum a vector that comes from tensor memory (Blackwell).
    count = tl.sum(live[:, None].to(tl.int32))
    tl.store(counts + block * tl.num_programs(0) + tile, count)
    if count > 0:
        if GATED:
            factor = _product(x, up, neuron, token, live, M, D, NEURONS, ROWS, DEPTH)
            if HAS_UP_BIAS:
                factor += tl.load(up_bias + neuron, mask=live, other=0.0).to(tl.float32)[:, None]
            # A token that does not activate the neuron keeps its exact 0, whatever its up value is.
            value = tl.where(value == 0.0, 0.0, value * factor_of(rounded(factor, DTYPE), CLAMP_UP))
        slot = (block * tl.num_programs(0) + tile) * NEURONS + tl.cumsum(live.to(tl.int32), 0) - 1
        tl.store(neurons + slot, neuron, mask=live)
        cell = values + (slot.to(tl.int64) * ROWS)[:, None] + row[None, :]
        tl.store(cell, value.to(DTYPE), mask=live[:, None])


@triton.jit
def _product(
    x,
    w,
    neuron,
    token,
    wanted,
    M,
    D,
    NEURONS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """float32 [NEURONS, ROWS] = w[neuron] x[token]^T; weight rows that are not wanted are not read.

    One token: weights go from memory to registers and are multiplied there. More: tensor cores.
    """
    depth = tl.arange(0, DEPTH)
    weight = w + (neuron * D)[:, None]
    acc = zero_sum(NEURONS, ROWS, w.dtype.element_ty)
    for k in range(0, D, DEPTH):
        column = k + depth
        rows = tl.load(weight + column[None, :], mask=wanted[:, None] & (column < D)[None, :], other=0.0)
        if ROWS == 1:
            one = tl.load(x + tl.min(token, 0) * D + column, mask=column < D, other=0.0)
            acc += tl.sum(rows.to(tl.float32) * one.to(tl.float32)[None, :], 1)[:, None]
        else:
            inside = (token < M)[None, :] & (column < D)[:, None]
            columns = tl.load(x + (token * D)[None, :] + column[:, None], mask=inside, other=0.0)
            acc = add_product(acc, rows, columns)
    return acc.to(tl.float32)


# One compiled kernel for any number of tokens: a CUDA graph capture must not meet a new one.
@triton.jit(do_not_specialize=["M"])
def decode_down(
    w,
    bias,
    values,
    neurons,
    counts,
    y,
    M,
    D,
    tiles,
    HAS_BIAS: tl.constexpr,
    NEURONS: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """y [M, D] from packed tiles and w [H, D] (neuron-major); TILES tiles are taken side by side."""
    DTYPE: tl.constexpr = y.dtype.element_ty
    block = tl.program_id(1)
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    row = tl.arange(0, ROWS)
    acc = zero_sum(ROWS, WIDTH, DTYPE)
    if CHAINED:
        gdc_wait()
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        count = tl.load(counts + block * tiles + tile, mask=tile < tiles, other=0)
        base = (block * tiles + tile) * NEURONS
        for slot in range(0, tl.max(count, 0)):
            used = slot < count
            neuron = tl.load(neurons + base + slot, mask=used, other=0)
            inside = used[:, None] & (column < D)[None, :]
            rows = tl.load(w + (neuron * D)[:, None] + column[None, :], mask=inside, other=0.0)
            cell = values + (base + slot).to(tl.int64) * ROWS
            if ROWS == 1:
                hidden = tl.load(cell, mask=used, other=0.0).to(tl.float32)
                acc += tl.sum(hidden[:, None] * rows.to(tl.float32), 0)[None, :]
            else:
                hidden = tl.load(cell[None, :] + row[:, None], mask=used[None, :], other=0.0)
                acc = add_product(acc, hidden, rows)
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    token = block * ROWS + row
    out = y + token.to(tl.int64)[:, None] * D + column[None, :]
    tl.store(out, acc.to(DTYPE), mask=(token < M)[:, None] & (column < D)[None, :])
