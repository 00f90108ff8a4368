"""Selector matmul whose epilogue packs row TwELL words.

A tile is [tokens, neurons]. Each token of it owns WORDS = TILE / C words: the number of its active neurons,
then one word, value bits above neuron index, for each of them.

    words [M, tiles * WORDS] int32     words past a tile's entries are not written

The count is the true one. A tile with more than WORDS - 1 active neurons keeps that many of them, and
whoever reads the words sees that some are missing.

An entry goes to its rank among the active neurons of its token and tile. Order within a tile means nothing,
so ranks follow the order in which a tensor core leaves a tile in registers, and neither a scan nor a
transposition has to touch the accumulator. Of every 8 columns a thread holds two, 2 q and 2 q + 1 with q its
lane modulo 4; of every 16 rows it holds two, 8 apart. `_quarters` names these axes: a tile becomes four
tensors [q, token, n], in which a thread holds all n. Triton lays out the scattered stores of such a tensor
(first axis fastest) exactly like that, so words are stored from where their values were computed.

Ranks are counted four at a time, in the bytes of 32-bit words: the product of such a word and 0x01010101
holds the running sums of its bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .jit import activate_stored

_BYTES: tl.constexpr = tl.constexpr(0x01010101)


@triton.jit
def pack_rows(
    x,
    w,
    bias,
    words,
    M,
    H,
    D,
    threshold,
    DESCRIBED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PLAIN: tl.constexpr,
    SQUARE: tl.constexpr,
    EVEN: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """words of x [M, D] and w [H, D], 16-bit types; persistent.

    DESCRIBED: x and w are descriptors with blocks [TOKENS, DEPTH] and [TILE, DEPTH], else pointers.
    EVEN: H is a multiple of TILE. At most 128 words per tile; H up to 65,536.
    """
    if DESCRIBED:
        DTYPE: tl.constexpr = x.dtype
    else:
        DTYPE: tl.constexpr = x.dtype.element_ty
    tl.assume(D > 0)  # else the whole epilogue is compiled once more, for a loop that never runs
    tiles_n = tl.cdiv(H, TILE)
    tiles = tl.cdiv(M, TOKENS) * tiles_n
    column = tl.arange(0, TILE)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=DESCRIBED):
        # Neurons fastest: the programs of one wave share few blocks of x, and w stays in the L2 cache.
        block = tile // tiles_n
        first = (tile % tiles_n) * TILE
        acc = tl.zeros([TOKENS, TILE], tl.float32)
        for k in range(0, D, DEPTH):
            tokens = _block(x, block * TOKENS, k, M, D, DESCRIBED, TOKENS, DEPTH)
            weights = _block(w, first, k, H, D, DESCRIBED, TILE, DEPTH)
            acc = tl.dot(tokens, weights.T, acc)
        if HAS_BIAS:
            acc += tl.load(bias + first + column, mask=first + column < H, other=0.0).to(tl.float32)[None, :]
        a, b, c, d = _quarters(acc)
        a = _word_values(a, 0, first, H, threshold, PLAIN, SQUARE, EVEN, DTYPE)
        b = _word_values(b, 1, first, H, threshold, PLAIN, SQUARE, EVEN, DTYPE)
        c = _word_values(c, TILE // 2, first, H, threshold, PLAIN, SQUARE, EVEN, DTYPE)
        d = _word_values(d, TILE // 2 + 1, first, H, threshold, PLAIN, SQUARE, EVEN, DTYPE)
        ranks, count = _ranks(a, b, c, d)
        token = block * TOKENS + _held_tokens(TOKENS)
        row = words + token.to(tl.int64) * (tiles_n * WORDS) + (tile % tiles_n) * WORDS
        _store_counts(row, count, token < M)
        room = tl.where(token < M, WORDS - 1, 0)
        _store_entries(row, (ranks & 0xFF), a, 0, first, room)
        _store_entries(row, (ranks >> 8) & 0xFF, b, 1, first, room)
        _store_entries(row, (ranks >> 16) & 0xFF, c, TILE // 2, first, room)
        _store_entries(row, (ranks >> 24) & 0xFF, d, TILE // 2 + 1, first, room)


@triton.jit
def _block(source, row, k, rows, D, DESCRIBED: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """[ROWS, DEPTH] of a matrix [rows, D] from (row, k) on, zeros outside.

    Without the bulk copies of compute capability 9.0, a descriptor hides from the compiler that rows are
    contiguous; pointers show it.
    """
    if DESCRIBED:
        block = source.load([row, k])
    else:
        index = row + tl.arange(0, ROWS)
        depth = k + tl.arange(0, DEPTH)
        inside = (index < rows)[:, None] & (depth < D)[None, :]
        block = tl.load(source + index.to(tl.int64)[:, None] * D + depth[None, :], mask=inside, other=0.0)
    return block


@triton.jit
def _quarters(acc):
    """[TOKENS, TILE] -> four [4, TOKENS, TILE / 16], from columns 8 n + 2 q + (0, 1, TILE / 2, TILE / 2 + 1).

    Element [q, t, n]; the order of tokens is that of `_held_tokens`.
    """
    TOKENS: tl.constexpr = acc.shape[0]
    N: tl.constexpr = acc.shape[1] // 16
    parts = tl.permute(tl.reshape(acc, [TOKENS // 16, 2, 8, 2, N, 4, 2]), [5, 1, 0, 2, 4, 3, 6])
    even, odd = tl.split(tl.reshape(parts, [4, TOKENS, N, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _held_tokens(TOKENS: tl.constexpr):
    """int32 [TOKENS]: the rows of a tile in the order of `_quarters`: 0-7, 16-23, ..., then 8-15, 24-31, ..."""
    t = tl.arange(0, TOKENS)
    half = t // (TOKENS // 2)
    return (t % (TOKENS // 2)) // 8 * 16 + half * 8 + t % 8


@triton.jit
def _held_neurons(first, OFFSET: tl.constexpr, N: tl.constexpr):
    """int32 [4, 1, N]: the neurons of the quarter that starts at column OFFSET."""
    return first + OFFSET + 2 * tl.arange(0, 4)[:, None, None] + 8 * tl.arange(0, N)[None, None, :]


@triton.jit
def _word_values(
    acc,
    OFFSET: tl.constexpr,
    first,
    H,
    threshold,
    PLAIN: tl.constexpr,
    SQUARE: tl.constexpr,
    EVEN: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """uint32 [4, TOKENS, N]: the activations' 16 bits in the upper half of a word.

    An activation is positive or NaN, so this is 0 where a neuron is inactive and nowhere else.
    """
    value = activate_stored(acc, threshold, PLAIN, SQUARE, DTYPE)
    bits = value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    if not EVEN:  # zero weights past H still meet Inf and NaN
        bits = tl.where(_held_neurons(first, OFFSET, acc.shape[2]) < H, bits, 0).to(tl.uint32)
    return bits


@triton.jit
def _ranks(a, b, c, d):
    """int32 [4, TOKENS, N]: in byte i the rank of quarter i's entry among the active ones of its token;
    127 or more where it is inactive or has that many before it. int32 [TOKENS]: how many are active."""
    low = tl.minimum(a, 0x10000) + (tl.minimum(b, 0x10000) << 8)
    high = tl.minimum(c, 0x10000) + (tl.minimum(d, 0x10000) << 8)
    active = ((low >> 16) + high).to(tl.int32)  # a byte each, 0 or 1
    running = active * _BYTES
    before, held = _before((running >> 24) & 0xFF)
    q = 8 * tl.arange(0, 4)[:, None]
    lanes = tl.sum(held << q, 0) * _BYTES
    before += (((lanes << 8)[None, :] >> q) & 0xFF)[:, :, None]
    idle = (active ^ _BYTES) << 7
    return ((running << 8) + tl.minimum(before, 127) * _BYTES) | idle, tl.sum(held, 0)


@triton.jit
def _before(counts):
    """int32 [A, B, N] -> sums of all before along the last axis [A, B, N], and of all [A, B]; sums below 256."""
    A: tl.constexpr = counts.shape[0]
    B: tl.constexpr = counts.shape[1]
    N: tl.constexpr = counts.shape[2]
    if N == 1:
        before, total = tl.zeros_like(counts), tl.sum(counts, 2)
    else:
        RADIX: tl.constexpr = 4 if N % 4 == 0 else 2
        byte = 8 * tl.arange(0, RADIX)
        running = tl.sum(tl.reshape(counts, [A, B, N // RADIX, RADIX]) << byte, 3) * _BYTES
        outer, total = _before((running >> (8 * RADIX - 8)) & 0xFF)
        running = (running << 8) + outer * _BYTES
        before = tl.reshape((running[:, :, :, None] >> byte) & 0xFF, [A, B, N])
    return before, total


@triton.jit
def _store_counts(row, count, real):
    """As a store of [4, TOKENS] of which one lane in four writes: like the entries, from where counts are."""
    q = tl.arange(0, 4)[:, None]
    tl.store(row[None, :] + 0 * q, count[None, :] + 0 * q, mask=(q == 0) & real[None, :])


@triton.jit
def _store_entries(row, rank, bits, OFFSET: tl.constexpr, first, room):
    word = bits.to(tl.int32) | _held_neurons(first, OFFSET, bits.shape[2])
    tl.store(row[None, :, None] + 1 + rank, word, mask=rank < room[None, :, None])
