"""Up and down projections of packed rows: one program per token, over its active neurons only.

The entries of a token lie at the front of its tiles. Entry e of the whole token is found from the running
sums of the tiles' counts, so nothing is compacted in memory and groups of entries are always full.

    up      dot(x, up[n]) of a group of neurons n, in float32, times their gates
    down    the sum of hidden value times down[n] over all groups, in float32, in registers

A tile that holds more than its words can say is computed anew from x and the selector: slow, and exact.
Sums are taken in the order of the words, whatever the schedule.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton.common import activate, factor_of, rounded


@triton.jit
def _entries(words, ends, total, entry, WORDS: tl.constexpr):
    """int32 [GROUP]: the words of the token's entries `entry`; ends: running sums of its tiles' counts."""
    passed = ends[None, :] <= entry[:, None]
    tile = tl.sum(passed.to(tl.int32), 1)
    start = tl.max(tl.where(passed, ends[None, :], 0), 1)
    return tl.load(words + tile * WORDS + 1 + entry - start, mask=entry < total, other=0)


@triton.jit
def _dots(x, w, bias, neuron, wanted, D, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, DEPTH: tl.constexpr):
    """float32 [GROUP]: w[neuron] x (+ bias); weight rows that are not wanted are not read."""
    depth = tl.arange(0, DEPTH)
    row = w + (neuron.to(tl.int64) * D)[:, None]
    acc = tl.zeros([GROUP, DEPTH], tl.float32)
    for k in range(0, D, DEPTH):
        column = k + depth
        weights = tl.load(row + column[None, :], mask=wanted[:, None] & (column < D)[None, :], other=0.0)
        features = tl.load(x + column, mask=column < D, other=0.0)
        acc += weights.to(tl.float32) * features.to(tl.float32)[None, :]
    sums = tl.sum(acc, 1)
    if HAS_BIAS:
        sums += tl.load(bias + neuron, mask=wanted, other=0.0).to(tl.float32)
    return sums


@triton.jit
def _contribution(
    operands,
    neuron,
    value,
    listed,
    column,
    HAS_UP_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    CLAMP_UP: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """float32 [WIDTH]: what a group of active neurons adds to the output; value: their gates, float32."""
    x, up, up_bias, down, D, E = operands
    DTYPE: tl.constexpr = down.dtype.element_ty
    inside = listed[:, None] & (column < E)[None, :]
    # Asked for before the up sums are known, so that both wait for memory together.
    rows = tl.load(down + (neuron.to(tl.int64) * E)[:, None] + column[None, :], mask=inside, other=0.0)
    if GATED:
        factor = _dots(x, up, up_bias, neuron, listed, D, HAS_UP_BIAS, GROUP, DEPTH)
        value = rounded(value * factor_of(rounded(factor, DTYPE), CLAMP_UP), DTYPE)
    hidden = tl.where(listed, value, 0.0)
    return tl.sum(hidden[:, None] * rows.to(tl.float32), 0)


@triton.jit
def apply_rows(
    x,
    words,
    select,
    up,
    down,
    select_bias,
    up_bias,
    down_bias,
    y,
    H,
    D,
    E,
    tiles,
    threshold,
    HAS_SELECT_BIAS: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
    HAS_DOWN_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    SQUARE: tl.constexpr,
    CLAMP_UP: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
    TILES: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """y [M, E] from x [M, D], words [M, tiles * WORDS], select and up [H, D], down [H, E] (neuron-major).

    Grid: tokens, then slices of WIDTH outputs; every slice computes the hidden values anew.
    TILES: a power of two, at least `tiles`. `up` is not read if not GATED.
    """
    DTYPE: tl.constexpr = y.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    x += token * D
    words += token * (tiles * WORDS)
    operands = (x, up, up_bias, down, D, E)
    member = tl.arange(0, GROUP)
    tile = tl.arange(0, TILES)
    count = tl.load(words + tile * WORDS, mask=tile < tiles, other=0)
    overflows = tl.max(count, 0) >= WORDS
    ends = tl.cumsum(tl.where(count < WORDS, count, 0), 0)
    total = tl.max(ends, 0)
    acc = tl.zeros([WIDTH], tl.float32)
    word = _entries(words, ends, total, member, WORDS)
    for first in range(0, total, GROUP):
        following = _entries(words, ends, total, first + GROUP + member, WORDS)
        listed = first + member < total
        neuron = word & 0xFFFF
        gate = (word >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        acc += _contribution(
            operands, neuron, gate, listed, column, HAS_UP_BIAS, GATED, CLAMP_UP, GROUP, DEPTH
        )
        word = following
    if overflows:
        for t in range(0, tiles):
            if tl.load(words + t * WORDS) >= WORDS:
                for first in range(t * TILE, tl.minimum(t * TILE + TILE, H), GROUP):
                    neuron = first + member
                    pre = _dots(x, select, select_bias, neuron, neuron < H, D, HAS_SELECT_BIAS, GROUP, DEPTH)
                    gate = rounded(activate(rounded(pre, DTYPE), threshold, SQUARE), DTYPE)
                    listed = (gate != 0.0) & (neuron < H)
                    acc += _contribution(
                        operands, neuron, gate, listed, column, HAS_UP_BIAS, GATED, CLAMP_UP, GROUP, DEPTH
                    )
    if HAS_DOWN_BIAS:
        acc += tl.load(down_bias + column, mask=column < E, other=0.0).to(tl.float32)
    tl.store(y + token * E + column, acc.to(DTYPE), mask=column < E)
