"""Element by element on the active set: hidden activations and the gradients that flow through them."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import activate, factor_of, rounded


@triton.jit(do_not_specialize=["M"])
def combine(
    pool,
    grad_l1,
    before,
    offsets,
    tokens,
    values,
    lists,
    work,
    counter,
    M,
    H,
    rows,
    threshold,
    HAS_L1: tl.constexpr,
    GATED: tl.constexpr,
    SQUARE: tl.constexpr,
    CLAMP_UP: tl.constexpr,
    RARE: tl.constexpr,
    CHUNK: tl.constexpr,
    ENTRIES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """In place in the pool of `products.py`; persistent.

        plane 0: hidden (of frequent neurons only), 1: gradients of pre-activations, 2: gradients of up values

    Rows past the end of a list and tokens past M become zeros in planes 1 and 2. With RARE, the same three
    values of rare neurons also go, neuron by neuron, from where `offsets` says (-1: not rare), to

        tokens int32 [capacity], values [capacity, 4]

    Without, plane 0 is written for all.
    """
    DTYPE: tl.constexpr = pool.dtype.element_ty
    PARTS: tl.constexpr = CHUNK // ENTRIES
    token = tl.arange(0, ROWS)
    plane = tl.cast(rows, tl.int64) * ROWS
    pull = 0.0
    if HAS_L1:
        pull = (tl.load(grad_l1).to(tl.float64) / M).to(tl.float32)  # plain float32 division errs by 2 units
    for unit in range(tl.program_id(0), tl.load(counter) * PARTS, tl.num_programs(0)):
        item = unit // PARTS
        entry = (unit % PARTS) * ENTRIES + tl.arange(0, ENTRIES)
        block = tl.load(work + item * 3)
        listed = entry < tl.load(work + item * 3 + 2)
        neuron = tl.load(lists + tl.load(work + item * 3 + 1) + entry, mask=listed, other=0)
        cell = pool + ((item * CHUNK + entry).to(tl.int64) * ROWS)[:, None] + token[None, :]
        pre = tl.load(cell).to(tl.float32)
        grad = tl.load(cell + plane).to(tl.float32)
        active = listed[:, None] & (block * ROWS + token < M)[None, :] & ~(pre <= threshold)
        hidden = rounded(activate(pre, threshold, SQUARE), DTYPE)
        if GATED:
            activated = hidden
            up = tl.load(cell + 2 * plane).to(tl.float32)
            factor = factor_of(up, CLAMP_UP)
            hidden = rounded(activated * factor, DTYPE)
        if HAS_L1:
            sign = tl.where(hidden > 0.0, pull, tl.where(hidden < 0.0, -pull, 0.0))
            grad += sign  # not rounded: it is often less than half a unit of the sum
        grad_pre = grad
        if GATED:
            grad_pre = rounded(grad * factor, DTYPE)
        if SQUARE:
            grad_pre = grad_pre * (2.0 * pre)
        # Inactive tokens keep exact zeros, whatever their up values and gradients are.
        hidden = tl.where(active, hidden, 0.0).to(DTYPE)
        grad_pre = tl.where(active, grad_pre, 0.0).to(DTYPE)
        tl.store(cell + plane, grad_pre)
        if GATED:
            grad_up = grad * activated
            if CLAMP_UP:
                grad_up = tl.where(up <= 0.0, 0.0, grad_up)
            grad_up = tl.where(active, grad_up, 0.0).to(DTYPE)
            tl.store(cell + 2 * plane, grad_up)
        if RARE:
            offset = tl.load(offsets + neuron, mask=listed, other=-1)
            tl.store(cell, hidden, mask=(listed & (offset < 0))[:, None])
            start = offset + tl.load(before + block * H + neuron, mask=listed, other=0)
            target = start[:, None] + tl.cumsum(active.to(tl.int32), 1) - 1
            kept = active & (offset >= 0)[:, None]
            tl.store(tokens + target, block * ROWS + token[None, :] + tl.zeros_like(target), mask=kept)
            tl.store(values + target * 4, hidden, mask=kept)
            tl.store(values + target * 4 + 1, grad_pre, mask=kept)
            if GATED:
                tl.store(values + target * 4 + 2, grad_up, mask=kept)
        else:
            tl.store(cell, hidden)
