"""Element by element on the active set: hidden activations and the gradients that flow through them.

In place in the pool of `products.py`:

    pool [3, rows, R]    plane 0: hidden, 1: gradients of pre-activations, 2: gradients of up values

and, for whoever looks for a neuron of a block, `places` int32 [B, H]: row * 256 + tokens with a value that
is not 0; 0 if there are none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..jit import activate, rounded


@triton.jit(do_not_specialize=["M"])
def combine(
    pool,
    places,
    grad_l1,
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
    CHUNK: tl.constexpr,
    ENTRIES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Persistent; rows past the end of a list and tokens past M become zeros."""
    DTYPE: tl.constexpr = pool.dtype.element_ty
    PARTS: tl.constexpr = CHUNK // ENTRIES
    token = tl.arange(0, ROWS)
    pull = 0.0
    if HAS_L1:
        pull = tl.load(grad_l1).to(tl.float32) / M
    for unit in range(tl.program_id(0), tl.load(counter) * PARTS, tl.num_programs(0)):
        item = unit // PARTS
        entry = (unit % PARTS) * ENTRIES + tl.arange(0, ENTRIES)
        block = tl.load(work + item * 3)
        listed = entry < tl.load(work + item * 3 + 2)
        neuron = tl.load(lists + tl.load(work + item * 3 + 1) + entry, mask=listed, other=0)
        row = item * CHUNK + entry
        cell = pool + (row.to(tl.int64) * ROWS)[:, None] + token[None, :]
        plane = tl.cast(rows, tl.int64) * ROWS
        known = listed[:, None] & (block * ROWS + token < M)[None, :]
        pre = tl.load(cell).to(tl.float32)
        grad = tl.load(cell + plane).to(tl.float32)
        active = known & ~(pre <= threshold)
        activated = rounded(activate(pre, threshold, SQUARE), DTYPE)
        if GATED:
            up = tl.load(cell + 2 * plane).to(tl.float32)
            hidden = rounded(activated * up, DTYPE)
        else:
            up = 1.0
            hidden = activated
        if HAS_L1:
            sign = tl.where(hidden > 0.0, pull, tl.where(hidden < 0.0, -pull, 0.0))
            grad = rounded(grad + sign, DTYPE)
        hidden = tl.where(active, hidden, 0.0)
        grad_pre = grad
        if GATED:
            grad_pre = rounded(grad * up, DTYPE)
        if SQUARE:
            grad_pre = rounded(grad_pre * (2.0 * pre), DTYPE)
        grad_pre = tl.where(active, grad_pre, 0.0)
        tl.store(cell, hidden.to(DTYPE))
        tl.store(cell + plane, grad_pre.to(DTYPE))
        live = (hidden != 0.0) | (grad_pre != 0.0)
        if GATED:
            grad_up = tl.where(active, rounded(grad * activated, DTYPE), 0.0)
            tl.store(cell + 2 * plane, grad_up.to(DTYPE))
            live |= grad_up != 0.0
        tokens = tl.sum(live.to(tl.int32), 1)
        tl.store(places + block * H + neuron, row * 256 + tokens, mask=listed & (tokens > 0))


@triton.jit
def list_rare(
    pool,
    places,
    before,
    offsets,
    tokens,
    values,
    lists,
    work,
    counter,
    H,
    rows,
    capacity,
    GATED: tl.constexpr,
    CHUNK: tl.constexpr,
    ENTRIES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Of rare neurons, the tokens that are not 0 and their three values, neuron by neuron; persistent.

    tokens int32 [capacity]; values [3, capacity]: the planes of the pool; where a neuron starts: `offsets`,
    -1 for the others.
    """
    PARTS: tl.constexpr = CHUNK // ENTRIES
    token = tl.arange(0, ROWS)
    for unit in range(tl.program_id(0), tl.load(counter) * PARTS, tl.num_programs(0)):
        item = unit // PARTS
        entry = (unit % PARTS) * ENTRIES + tl.arange(0, ENTRIES)
        block = tl.load(work + item * 3)
        listed = entry < tl.load(work + item * 3 + 2)
        neuron = tl.load(lists + tl.load(work + item * 3 + 1) + entry, mask=listed, other=0)
        offset = tl.load(offsets + neuron, mask=listed, other=-1)
        place = block * H + neuron
        filled = tl.load(places + place, mask=listed, other=0) > 0
        wanted = (filled & (offset >= 0))[:, None] & (token < ROWS)[None, :]
        cell = pool + ((item * CHUNK + entry).to(tl.int64) * ROWS)[:, None] + token[None, :]
        plane = tl.cast(rows, tl.int64) * ROWS
        hidden = tl.load(cell, mask=wanted, other=0.0)
        grad_pre = tl.load(cell + plane, mask=wanted, other=0.0)
        live = (hidden != 0.0) | (grad_pre != 0.0)
        if GATED:
            grad_up = tl.load(cell + 2 * plane, mask=wanted, other=0.0)
            live |= grad_up != 0.0
        rank = tl.cumsum(live.to(tl.int32), 1) - 1
        start = offset + tl.load(before + place, mask=listed, other=0)
        target = start[:, None] + rank
        tl.store(tokens + target, block * ROWS + token[None, :] + tl.zeros_like(rank), mask=live)
        tl.store(values + target, hidden, mask=live)
        tl.store(values + capacity + target, grad_pre, mask=live)
        if GATED:
            tl.store(values + 2 * capacity + target, grad_up, mask=live)
