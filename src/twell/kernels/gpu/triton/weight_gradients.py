"""Gradients of the weights, neuron by neuron: frequent ones by matrix products, rare ones token by token.

grad_select, grad_up [H, D], grad_down [H, E]; every row is written once, so none has to be cleared. With ADD
the sums are added to what is there, in float32 or in the dtype of x, and rows without tokens stay untouched.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import add_product, zero_sum


@triton.jit(do_not_specialize=["blocks"])
def frequent_weights(
    x_desc,
    grad_desc,
    pool,
    places,
    frequent,
    how_many,
    grad_select,
    grad_down,
    grad_up,
    blocks,
    H,
    D,
    E,
    rows,
    FIRST: tl.constexpr,
    MATRICES: tl.constexpr,
    NEURONS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
):
    """Persistent; a tile [NEURONS, WIDTH] of one of the planes [FIRST, FIRST + MATRICES) of the pool times
    x or grad_y, over all blocks. Neurons that a block does not have are zero rows.

    Plane 0 (hidden) gives grad_down, 1 grad_select, 2 grad_up; those that are wanted have one dtype.
    """
    token = tl.arange(0, ROWS)
    total = tl.load(how_many)
    across = tl.cdiv(tl.maximum(D, E), WIDTH)
    tiles = tl.cdiv(total, NEURONS)
    for unit in range(tl.program_id(0), MATRICES * tiles * across, tl.num_programs(0)):
        plane = FIRST + unit // (tiles * across)
        first = (unit // across % tiles) * NEURONS
        column = (unit % across) * WIDTH
        entry = first + tl.arange(0, NEURONS)
        neuron = tl.load(frequent + entry, mask=entry < total, other=0)
        base = pool + tl.cast(plane, tl.int64) * rows * ROWS
        acc = zero_sum(NEURONS, WIDTH, pool.dtype.element_ty)
        for block in range(0, blocks):
            place = tl.load(places + block * H + neuron, mask=entry < total, other=0)
            here = (place > 0)[:, None] & (token < ROWS)[None, :]
            cell = base + ((place // 256).to(tl.int64) * ROWS)[:, None] + token[None, :]
            value = tl.load(cell, mask=here, other=0.0)
            if plane == 0:
                side = grad_desc.load([block * ROWS, column])
            else:
                side = x_desc.load([block * ROWS, column])
            acc = add_product(acc, value, side)
        target = grad_down
        width = E
        if plane > 0:
            width = D
            target = grad_select
        if plane == 2:
            target = grad_up
        columns = column + tl.arange(0, WIDTH)
        inside = (entry < total)[:, None] & (columns < width)[None, :]
        cell = target + neuron[:, None] * width + columns[None, :]
        if ADD:
            acc += tl.load(cell, mask=inside, other=0.0).to(tl.float32)
        tl.store(cell, acc.to(target.dtype.element_ty), mask=inside)


@triton.jit
def write_row(cell, total, inside, ADD: tl.constexpr):
    if ADD:
        total += tl.load(cell, mask=inside, other=0.0).to(tl.float32)
    tl.store(cell, total.to(cell.dtype.element_ty), mask=inside)


@triton.jit
def rare_weights(
    x,
    grad,
    tokens,
    values,
    firing,
    offsets,
    bounds,
    grad_select,
    grad_down,
    grad_up,
    D,
    E,
    HAS_SELECT: tl.constexpr,
    HAS_DOWN: tl.constexpr,
    HAS_UP: tl.constexpr,
    WIDTH: tl.constexpr,
    AHEAD: tl.constexpr,
    ADD: tl.constexpr,
):
    """Persistent; per neuron and WIDTH columns, the sum over its tokens, in ascending order of tokens.

    AHEAD: tokens whose rows are asked for before any is used.
    """
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    ahead = tl.arange(0, AHEAD)
    for neuron in range(tl.load(bounds) + tl.program_id(0), tl.load(bounds + 1), tl.num_programs(0)):
        offset = tl.load(offsets + neuron)
        end = offset + tl.load(firing + neuron)
        # Not rare: -1. Nothing to add: no tokens.
        if (offset >= 0) & (end >= offset + ADD):
            sum_select = tl.zeros([WIDTH], tl.float32)
            sum_down = tl.zeros([WIDTH], tl.float32)
            sum_up = tl.zeros([WIDTH], tl.float32)
            coming = tl.load(tokens + offset + ahead, mask=offset + ahead < end, other=0)
            for first in range(offset, end, AHEAD):
                at = first + ahead
                token = coming.to(tl.int64)[:, None]
                coming = tl.load(tokens + at + AHEAD, mask=at + AHEAD < end, other=0)
                if HAS_SELECT or HAS_UP:
                    inside = (at < end)[:, None] & (column < D)[None, :]
                    row = tl.load(x + token * D + column[None, :], mask=inside, other=0.0).to(tl.float32)
                if HAS_DOWN:
                    inside = (at < end)[:, None] & (column < E)[None, :]
                    back = tl.load(grad + token * E + column[None, :], mask=inside, other=0.0).to(tl.float32)
                if HAS_SELECT:
                    value = tl.load(values + at * 4 + 1, mask=at < end, other=0.0).to(tl.float32)
                    sum_select += tl.sum(value[:, None] * row, 0)
                if HAS_UP:
                    value = tl.load(values + at * 4 + 2, mask=at < end, other=0.0).to(tl.float32)
                    sum_up += tl.sum(value[:, None] * row, 0)
                if HAS_DOWN:
                    value = tl.load(values + at * 4, mask=at < end, other=0.0).to(tl.float32)
                    sum_down += tl.sum(value[:, None] * back, 0)
            if HAS_SELECT:
                write_row(grad_select + neuron * D + column, sum_select, column < D, ADD)
            if HAS_DOWN:
                write_row(grad_down + neuron * E + column, sum_down, column < E, ADD)
            if HAS_UP:
                write_row(grad_up + neuron * D + column, sum_up, column < D, ADD)


@triton.jit(do_not_specialize=["blocks"])
def bias_sums(
    pool,
    places,
    bounds,
    target,
    blocks,
    H,
    rows,
    plane,
    NEURONS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """target[n] = the sum of one plane of the pool over all tokens, for the round's neurons."""
    DTYPE: tl.constexpr = pool.dtype.element_ty
    neuron = tl.program_id(0) * NEURONS + tl.arange(0, NEURONS)
    inside = (neuron >= tl.load(bounds)) & (neuron < tl.load(bounds + 1))
    token = tl.arange(0, ROWS)
    base = pool + tl.cast(plane, tl.int64) * rows * ROWS
    total = tl.zeros([NEURONS], tl.float32)
    for block in range(0, blocks):
        place = tl.load(places + block * H + neuron, mask=inside, other=0)
        cell = base + ((place // 256).to(tl.int64) * ROWS)[:, None] + token[None, :]
        value = tl.load(cell, mask=(place > 0)[:, None] & (token < ROWS)[None, :], other=0.0)
        total += tl.sum(value.to(tl.float32), 1)
    tl.store(target + neuron, total.to(DTYPE), mask=inside)
