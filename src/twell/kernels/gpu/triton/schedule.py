"""What the backward does when, decided on the device for any sparsity: which neurons of which blocks the pool
holds in which round, and which neurons are frequent.

Frequent neurons go together through dense products over all tokens; rare ones go token by token.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["blocks"])
def plan_rounds(
    lists,
    counts,
    spans,
    work,
    counters,
    bounds,
    frequent,
    overflow,
    blocks,
    H,
    chunks_per_round,
    span_stride,
    work_stride,
    frequent_stride,
    ROUNDS: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One program per block: the part of its list that each round takes, one work item per CHUNK of it.

    The pool holds blocks * chunks_per_round chunks. If all lists together fit, round 0 takes everything and
    the others nothing; else round r takes the neurons [r, r + 1) * chunks_per_round * CHUNK, which always
    fit. Item i owns rows [i, i + 1) * CHUNK of the pool; the order of blocks is that of arrival, which no
    result depends on. For each round:

        spans int32 [B, 3]      offset in `lists`, entries, first row of the pool
        work int32 [items, 3]   block, offset in `lists`, entries
        counters int32 [8]      0: items; 4: how many neurons `frequent` holds
        bounds int32 [4]        first neuron of the round, and the first after it
        frequent int32 [H]      all neurons of the round, but for round 0, where `order_neurons` decides

    overflow int32 [1]: one more if the lists did not fit.
    """
    block = tl.program_id(0)
    one_of = tl.arange(0, BLOCKS)
    listed = tl.load(counts + one_of, mask=one_of < blocks, other=0)
    fits = tl.sum(tl.cdiv(listed, CHUNK), 0) <= blocks * chunks_per_round
    if (block == 0) & (not fits):
        tl.atomic_add(overflow, 1)
    entry = tl.arange(0, WIDTH)
    inside = entry < tl.load(counts + block)
    neuron = tl.load(lists + block * H + entry, mask=inside, other=H)
    for turn in tl.static_range(ROUNDS):
        low = tl.minimum(turn * chunks_per_round * CHUNK, H)
        high = tl.minimum(low + chunks_per_round * CHUNK, H)
        if fits:
            low = 0
            high = H if turn == 0 else 0
        first = tl.sum((neuron < low).to(tl.int32), 0)
        entries = tl.sum((neuron < high).to(tl.int32), 0) - first
        chunks = tl.cdiv(entries, CHUNK)
        start = tl.atomic_add(counters + 8 * turn, chunks)
        span = spans + turn * span_stride + block * 3
        tl.store(span, block * H + first)
        tl.store(span + 1, entries)
        tl.store(span + 2, start * CHUNK)
        for chunk in range(0, chunks):
            item = work + turn * work_stride + (start + chunk) * 3
            tl.store(item, block)
            tl.store(item + 1, block * H + first + chunk * CHUNK)
            tl.store(item + 2, tl.minimum(entries - chunk * CHUNK, CHUNK))
        if block == 0:
            tl.store(bounds + 4 * turn, low)
            tl.store(bounds + 4 * turn + 1, high)
            if turn > 0:
                tl.store(counters + 8 * turn + 4, high - low)
                tl.store(frequent + turn * frequent_stride + entry, low + entry, mask=entry < high - low)


@triton.jit(do_not_specialize=["blocks"])
def count_tokens(places, before, firing, blocks, H, NEURONS: tl.constexpr, GROUP: tl.constexpr):
    """before int32 [B, H]: tokens of earlier blocks that fire a neuron; firing int32 [H]: of all blocks."""
    neuron = tl.program_id(0) * NEURONS + tl.arange(0, NEURONS)
    carry = tl.zeros([NEURONS], tl.int32)
    for first in range(0, blocks, GROUP):
        block = first + tl.arange(0, GROUP)
        inside = (block < blocks)[:, None] & (neuron < H)[None, :]
        cell = block[:, None] * H + neuron[None, :]
        count = tl.load(places + cell, mask=inside, other=0) & 255
        upto = tl.cumsum(count, 0)
        tl.store(before + cell, carry[None, :] + upto - count, mask=inside)
        carry += tl.sum(count, 0)
    tl.store(firing + neuron, carry, mask=neuron < H)


@triton.jit(do_not_specialize=["limit", "tokens"])
def order_neurons(
    firing,
    bounds,
    frequent,
    how_many,
    offsets,
    H,
    tokens,
    limit,
    processors,
    units,
    NEURONS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program. Of the round's neurons: the frequent ones, ascending, and where the tokens of each other
    one start; -1 for frequent ones.

        frequent int32 [H]; how_many int32 [1]; offsets int32 [H]

    Frequent is what fires for more than 1, 2, ... or CANDIDATES times `limit` tokens, whichever costs least.
    Dense products run in waves of `processors` units, `units` for every NEURONS frequent neurons; a wave
    takes about as long as six rare activations for every token (H200).
    """
    neuron = tl.arange(0, WIDTH)
    inside = (neuron >= tl.load(bounds)) & (neuron < tl.load(bounds + 1))
    count = tl.load(firing + neuron, mask=inside & (neuron < H), other=0)
    best = limit
    least = 0.0
    for times in tl.static_range(1, CANDIDATES + 1):
        dense = count > times * limit
        waves = tl.cdiv(tl.cdiv(tl.sum(dense.to(tl.int32), 0), NEURONS) * units, processors)
        cost = 6.0 * waves * tokens + tl.sum(tl.where(dense, 0, count), 0)
        if times == 1:
            least = cost
        else:
            best = tl.where(cost < least, times * limit, best)
            least = tl.minimum(cost, least)
    many = (count > best).to(tl.int32)
    position = tl.cumsum(many, 0) - many
    tl.store(frequent + position, neuron, mask=many > 0)
    tl.store(how_many, tl.sum(many, 0))
    few = tl.where(many > 0, 0, count)
    start = tl.cumsum(few, 0) - few
    tl.store(offsets + neuron, tl.where(many > 0, -1, start), mask=inside & (neuron < H))
