"""Attention of one new token per sequence: turns queries and keys, writes the cache, attends to it.

A program takes the query heads that share a key head, and one of SPLITS equal parts of the columns that are
filled so far: a cache with room for more costs nothing. Parts are joined by `join_attention`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _look(query, keys, values, shift, scale, highest, weight, seen):
    """Attend to further columns.

    query [HEADS, WIDTH], keys, values [STEP, WIDTH]; shift [STEP], of the scores.
    highest:  the highest score so far, [HEADS]; weight, seen: sums of exp(score - highest), and of values
              weighted so, [HEADS] and [HEADS, WIDTH].
    """
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale + shift[None, :]
    now = tl.maximum(highest, tl.max(scores, 1))
    base = tl.where(now == float("-inf"), 0.0, now)  # nothing to attend to yet
    chance = tl.exp(scores - base[:, None])
    shrunk = tl.exp(highest - base)
    seen = tl.dot(chance.to(values.dtype), values, seen * shrunk[:, None], input_precision="ieee")
    return now, weight * shrunk + tl.sum(chance, 1), seen


@triton.jit
def token_attention(
    projected,
    cosines,
    sines,
    mask,
    column,
    keys,
    values,
    out,
    sums,
    scale,
    columns,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """out [B, KEY_HEADS * GROUP * SIZE], or parts of it in sums [B * KEY_HEADS * GROUP, SPLITS, SIZE + 2].

    projected:      [B, (KEY_HEADS * GROUP + 2 * KEY_HEADS) * SIZE]: queries, key and value of the token.
    cosines, sines: [B, SIZE]; the turn of its position.
    mask:           [B, columns], added to the scores.
    column:         int64 [1], where its key and value go; columns up to there are attended to.
    keys, values:   [B, KEY_HEADS, columns, SIZE].
    HEADS, WIDTH:   GROUP and SIZE rounded up to what a product takes. STEP: columns at a time.
    """
    DTYPE: tl.constexpr = keys.dtype.element_ty
    if CHAINED:
        gdc_launch_dependents()
    sequence = tl.program_id(0) // KEY_HEADS
    key_head = tl.program_id(0) % KEY_HEADS
    split = tl.program_id(1)
    head = tl.arange(0, HEADS)
    feature = tl.arange(0, WIDTH)
    inside = feature < SIZE
    last = tl.load(column).to(tl.int32)
    cache = (sequence * KEY_HEADS + key_head).to(tl.int64) * columns * SIZE
    share = tl.cdiv(last + 1, SPLITS)
    start = split * share
    stop = tl.minimum(start + share, last)
    step = tl.arange(0, STEP)
    cell = cache + step[:, None] * SIZE + feature[None, :]
    # Earlier tokens wrote the first columns: these are on their way while this token is projected. `column`
    # was written before kernels that nothing overlaps, at the beginning of the step.
    known = (start + step < stop)[:, None] & inside[None, :]
    cached_keys = tl.load(keys + start * SIZE + cell, mask=known, other=0.0)
    cached_values = tl.load(values + start * SIZE + cell, mask=known, other=0.0)
    if CHAINED:
        gdc_wait()
    turn = sequence * SIZE + feature
    cosine = tl.load(cosines + turn, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sines + turn, mask=inside, other=0.0).to(tl.float32)
    # What a feature is turned with: the other half, with its sign.
    other = tl.where(feature < SIZE // 2, feature + SIZE // 2, feature - SIZE // 2)
    sine = tl.where(feature < SIZE // 2, -sine, sine)
    token = projected + sequence.to(tl.int64) * ((GROUP + 2) * KEY_HEADS * SIZE)
    first = token + (key_head * GROUP + head)[:, None] * SIZE
    wanted = (head < GROUP)[:, None] & inside[None, :]
    query = tl.load(first + feature[None, :], mask=wanted, other=0.0).to(tl.float32) * cosine[None, :]
    query += tl.load(first + other[None, :], mask=wanted, other=0.0).to(tl.float32) * sine[None, :]
    query = query.to(DTYPE)
    if split == 0:
        place = token + (KEY_HEADS * GROUP + key_head) * SIZE
        key = tl.load(place + feature, mask=inside, other=0.0).to(tl.float32) * cosine
        key += tl.load(place + other, mask=inside, other=0.0).to(tl.float32) * sine
        key = key.to(DTYPE)
        value = tl.load(place + KEY_HEADS * SIZE + feature, mask=inside, other=0.0)
        tl.store(keys + cache + last * SIZE + feature, key, mask=inside)
        tl.store(values + cache + last * SIZE + feature, value, mask=inside)
        highest = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale
        highest += tl.load(mask + sequence * columns + last).to(tl.float32)
        weight = tl.full([HEADS], 1.0, tl.float32)
        seen = tl.zeros([HEADS, WIDTH], tl.float32) + value.to(tl.float32)[None, :]
    else:
        highest = tl.full([HEADS], float("-inf"), tl.float32)
        weight = tl.zeros([HEADS], tl.float32)
        seen = tl.zeros([HEADS, WIDTH], tl.float32)
    masked = mask + sequence * columns + step
    shift = tl.load(masked + start, mask=start + step < stop, other=float("-inf")).to(tl.float32)
    highest, weight, seen = _look(query, cached_keys, cached_values, shift, scale, highest, weight, seen)
    for begin in range(start + STEP, stop, STEP):
        known = (begin + step < stop)[:, None] & inside[None, :]
        cached_keys = tl.load(keys + begin * SIZE + cell, mask=known, other=0.0)
        cached_values = tl.load(values + begin * SIZE + cell, mask=known, other=0.0)
        shift = tl.load(masked + begin, mask=begin + step < stop, other=float("-inf")).to(tl.float32)
        highest, weight, seen = _look(query, cached_keys, cached_values, shift, scale, highest, weight, seen)
    row = (sequence * KEY_HEADS + key_head) * GROUP + head
    if SPLITS == 1:
        cell = out + (row.to(tl.int64) * SIZE)[:, None] + feature[None, :]
        tl.store(cell, (seen / weight[:, None]).to(DTYPE), mask=wanted)
    else:
        part = sums + (row * SPLITS + split) * (SIZE + 2)
        tl.store(part[:, None] + feature[None, :], seen, mask=wanted)
        tl.store(part + SIZE, highest, mask=head < GROUP)
        tl.store(part + SIZE + 1, weight, mask=head < GROUP)


@triton.jit
def join_attention(
    sums,
    out,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    CHAINED: tl.constexpr,
    ROUND: tl.constexpr,
):
    """out [heads, SIZE] from sums [heads, SPLITS, SIZE + 2]; a program per head. ROUND: SPLITS rounded up."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, ROUND)
    feature = tl.arange(0, WIDTH)
    there = split < SPLITS
    inside = feature < SIZE
    part = sums + (head * SPLITS + split) * (SIZE + 2)
    highest = tl.load(part + SIZE, mask=there, other=float("-inf"))
    weight = tl.load(part + SIZE + 1, mask=there, other=0.0)
    scale = tl.exp(highest - tl.max(highest, 0))
    seen = tl.load(part[:, None] + feature[None, :], mask=there[:, None] & inside[None, :], other=0.0)
    seen = tl.sum(seen * scale[:, None], 0) / tl.sum(weight * scale, 0)
    tl.store(out + head * SIZE + feature, seen.to(out.dtype.element_ty), mask=inside)
