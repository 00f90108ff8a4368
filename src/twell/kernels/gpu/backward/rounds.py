"""Which neurons of which blocks the pool holds next: decided on the device, for any sparsity."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["blocks"])
def plan_round(
    lists,
    counts,
    spans,
    work,
    counter,
    bounds,
    blocks,
    H,
    turn,
    chunks_per_round,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One program per block: the part of its list that this round takes, one work item per CHUNK of it.

    The pool holds blocks * chunks_per_round chunks. If all lists together fit, round 0 takes everything and
    the others nothing; else round r takes the neurons [r, r + 1) * chunks_per_round * CHUNK, which always
    fit. Item i owns rows [i, i + 1) * CHUNK of the pool; the order of blocks is that of arrival, which no
    result depends on.

        spans int32 [B, 3]      offset in `lists`, entries, first row of the pool
        work int32 [items, 3]   block, offset in `lists`, entries
        bounds int32 [2]        first neuron of the round, and the first after it
    """
    block = tl.program_id(0)
    one_of = tl.arange(0, BLOCKS)
    listed = tl.load(counts + one_of, mask=one_of < blocks, other=0)
    fits = tl.sum(tl.cdiv(listed, CHUNK), 0) <= blocks * chunks_per_round
    low = turn * chunks_per_round * CHUNK
    high = tl.minimum(low + chunks_per_round * CHUNK, H)
    if fits:
        low = 0
        high = tl.where(turn == 0, H, 0)
    entry = tl.arange(0, WIDTH)
    inside = entry < tl.load(counts + block)
    neuron = tl.load(lists + block * H + entry, mask=inside, other=H)
    first = tl.sum((neuron < low).to(tl.int32), 0)
    entries = tl.maximum(tl.sum((neuron < high).to(tl.int32), 0) - first, 0)
    chunks = tl.cdiv(entries, CHUNK)
    start = tl.atomic_add(counter, chunks)
    tl.store(spans + block * 3, block * H + first)
    tl.store(spans + block * 3 + 1, entries)
    tl.store(spans + block * 3 + 2, start * CHUNK)
    tl.store(bounds, tl.minimum(low, H))
    tl.store(bounds + 1, high)
    for chunk in range(0, chunks):
        item = work + (start + chunk) * 3
        tl.store(item, block)
        tl.store(item + 1, block * H + first + chunk * CHUNK)
        tl.store(item + 2, tl.minimum(entries - chunk * CHUNK, CHUNK))
