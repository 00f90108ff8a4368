"""The gradient of x: two gathered products in one sum, as in the down projection."""

from __future__ import annotations

import triton
import triton.language as tl

from ..jit import add_product, rounded, zero_sum


@triton.jit(do_not_specialize=["M"])
def input_gradient(
    pool_desc,
    select,
    up,
    lists,
    spans,
    counts,
    grad_x,
    rest,
    M,
    D,
    rows,
    LATER: tl.constexpr,
    HAS_REST: tl.constexpr,
    CROWDED_ONLY: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """grad_x [M, D] = plane 1 of the pool times select [H, D], and with PLANES 2 plane 2 times up [H, D].

    One tile [ROWS, WIDTH] per program. LATER: add to what earlier rounds have left, if there is anything.
    HAS_REST: what a sum loses to rounding waits in rest [M, D] while rounds are to come.
    CROWDED_ONLY: for blocks that take several rounds, again what another kernel did without a rest.
    pool_desc: blocks [DEPTH, ROWS] of [3 * rows, ROWS].
    """
    DTYPE: tl.constexpr = grad_x.dtype.element_ty
    tiles = tl.cdiv(D, WIDTH)
    block = tl.program_id(0) // tiles
    column = (tl.program_id(0) % tiles) * WIDTH + tl.arange(0, WIDTH)
    offset = tl.load(spans + block * 3)
    entries = tl.load(spans + block * 3 + 1)
    start = tl.load(spans + block * 3 + 2)
    entry = tl.arange(0, DEPTH)
    row = block * ROWS + tl.arange(0, ROWS)
    cell = grad_x + row.to(tl.int64)[:, None] * D + column[None, :]
    inside = (row < M)[:, None] & (column < D)[None, :]
    unfinished = entries < tl.load(counts + block)
    wanted_here = entries >= LATER
    if CROWDED_ONLY:
        wanted_here = unfinished
    if wanted_here:
        acc = zero_sum(ROWS, WIDTH, DTYPE)
        for plane in tl.static_range(PLANES):
            source = select if plane == 0 else up
            for k in range(0, entries, DEPTH):
                listed = k + entry < entries
                neuron = tl.load(lists + offset + k + entry, mask=listed, other=0)
                wanted = listed[:, None] & (column < D)[None, :]
                w = tl.load(source + (neuron * D)[:, None] + column[None, :], mask=wanted, other=0.0)
                value = pool_desc.load([(1 + plane) * rows + start + k, 0])
                acc = add_product(acc, value.T, w, PRECISION)
        if LATER:
            acc += tl.load(cell, mask=inside, other=0.0).to(tl.float32)
        if HAS_REST:
            rest_cell = rest + row.to(tl.int64)[:, None] * D + column[None, :]
            if LATER:
                acc += tl.load(rest_cell, mask=inside, other=0.0).to(tl.float32)
            if unfinished:
                kept = rounded(acc, DTYPE)
                lost = tl.where(tl.abs(kept) < float("inf"), acc - kept, 0.0)  # an Inf or NaN is kept whole
                tl.store(rest_cell, lost.to(DTYPE), mask=inside)
        tl.store(cell, acc.to(DTYPE), mask=inside)
