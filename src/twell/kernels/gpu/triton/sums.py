"""Sums over gathered weight rows: the down projection of active neurons, and the gradient of x."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import add_product, rounded, zero_sum


# One compiled kernel for any number of tokens: a CUDA graph capture must not meet a new one.
@triton.jit(do_not_specialize=["M"])
def gathered_sums(
    values,
    v_desc,
    out,
    rest,
    weights,
    more_weights,
    bias,
    lists,
    spans,
    counts,
    M,
    H,
    width,
    padded,
    rows,
    PLANES: tl.constexpr,
    SPANS: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LATER: tl.constexpr,
    HAS_REST: tl.constexpr,
    OVERFLOWED_ONLY: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out [M, width]: values times weights [H, width] (neuron-major), and with PLANES 2 a second plane of
    values times more_weights; one tile [ROWS, WIDTH] per program.

    PACKED: values are in list order and come through v_desc, in blocks [DEPTH, ROWS]. Else they lie where the
    selector put them, [B, H, ROWS], and are gathered (non-gated blocks).

    SPANS 0, the down projection: block b's values are rows [b * padded, b * padded + counts[b]), as
    `up_blocks` writes them. SPANS 1, the gradient of x: a block's part of the lists, and its rows in planes 1
    and 2 of the pool, are as `plan_rounds` says (spans).

    LATER: add to what earlier rounds have left, if there is anything. HAS_REST: what a sum loses to rounding
    waits in rest [M, width] while rounds are to come. OVERFLOWED_ONLY: for blocks that take several rounds,
    again what another kernel did without a rest.

    Listed neurons are summed in ascending order, so results do not depend on scheduling.
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    tiles = tl.cdiv(width, WIDTH)
    block = tl.program_id(0) // tiles
    column = (tl.program_id(0) % tiles) * WIDTH + tl.arange(0, WIDTH)
    token = tl.arange(0, ROWS)
    entry = tl.arange(0, DEPTH)
    if SPANS:
        offset = tl.load(spans + block * 3)
        entries = tl.load(spans + block * 3 + 1)
        start = tl.load(spans + block * 3 + 2)
    else:
        offset = block * H
        entries = tl.load(counts + block)
        start = block * padded
    row = block * ROWS + token
    cell = out + row.to(tl.int64)[:, None] * width + column[None, :]
    inside = (row < M)[:, None] & (column < width)[None, :]
    wanted = entries >= LATER
    if HAS_REST:
        unfinished = entries < tl.load(counts + block)
        if OVERFLOWED_ONLY:
            wanted = unfinished
    if wanted:
        acc = zero_sum(ROWS, WIDTH, DTYPE)
        for plane in tl.static_range(PLANES):
            source = weights if plane == 0 else more_weights
            for k in range(0, entries, DEPTH):
                listed = k + entry < entries
                neuron = tl.load(lists + offset + k + entry, mask=listed, other=0)
                if PACKED:
                    value = v_desc.load([(SPANS + plane) * rows + start + k, 0])
                else:
                    place = block.to(tl.int64) * H * ROWS + (neuron * ROWS)[:, None] + token[None, :]
                    value = tl.load(values + place, mask=listed[:, None], other=0.0)
                there = listed[:, None] & (column < width)[None, :]
                w = tl.load(source + (neuron * width)[:, None] + column[None, :], mask=there, other=0.0)
                acc = add_product(acc, value.T, w)
        if HAS_BIAS:
            acc += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
        if LATER:
            acc += tl.load(cell, mask=inside, other=0.0).to(tl.float32)
        if HAS_REST:
            rest_cell = rest + row.to(tl.int64)[:, None] * width + column[None, :]
            if LATER:
                acc += tl.load(rest_cell, mask=inside, other=0.0).to(tl.float32)
            if unfinished:
                kept = rounded(acc, DTYPE)
                lost = tl.where(tl.abs(kept) < float("inf"), acc - kept, 0.0)  # an Inf or NaN is kept whole
                tl.store(rest_cell, lost.to(DTYPE), mask=inside)
        tl.store(cell, acc.to(DTYPE), mask=inside)
