"""Selector matmul whose epilogue packs row TwELL words.

A tile is [tokens, neurons]. Each token of it owns TILE / C words: the number of its active neurons, then
one word (value << 16 | neuron) for each. Where an entry goes is its rank among the active neurons of its
token and tile. A scan over the accumulator would cost more than the matmul saves, so ranks are counted the
way the accumulator lies in registers: the columns are first put in an order in which a thread's own follow
each other, then summed in groups of four, each a byte of one 32-bit word. Multiplying such a word by
0x01010101 turns its bytes into their running sums.

    words [M, tiles * TILE / C] int32     words past a tile's entries are not written

The count is the true one. A tile with more entries than TILE / C - 1 keeps the first of them, and whoever
reads the words sees that they are not all there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .jit import activate_stored


@triton.jit
def ranks(counts):
    """int32 [TOKENS, N] -> the exclusive running sum of each row, and its total [TOKENS]; sums below 256."""
    TOKENS: tl.constexpr = counts.shape[0]
    N: tl.constexpr = counts.shape[1]
    if N == 1:
        rank, total = tl.zeros_like(counts), tl.sum(counts, 1)
    else:
        RADIX: tl.constexpr = 4 if N % 4 == 0 else 2
        byte = (8 * tl.arange(0, RADIX))[None, None, :]
        groups = tl.reshape(counts, [TOKENS, N // RADIX, RADIX])
        running = tl.sum(groups << byte, 2) * 0x01010101
        before, total = ranks((running >> (8 * RADIX - 8)) & 0xFF)
        running = (running << 8) + before * 0x01010101
        rank = tl.reshape((running[:, :, None] >> byte) & 0xFF, [TOKENS, N])
    return rank, total


@triton.jit
def pack_rows(
    x_desc,
    w_desc,
    bias,
    words,
    M,
    H,
    D,
    threshold,
    HAS_BIAS: tl.constexpr,
    PLAIN: tl.constexpr,
    SQUARE: tl.constexpr,
    EVEN: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Persistent; x_desc: blocks [TOKENS, DEPTH] of x [M, D]; w_desc: blocks [TILE, DEPTH] of w [H, D]."""
    DTYPE: tl.constexpr = x_desc.dtype
    tiles_n = tl.cdiv(H, TILE)
    tiles = tl.cdiv(M, TOKENS) * tiles_n
    # Column c of the order described above, of the tile's own columns 8 j + 2 q + e: q, then j, then e.
    c = tl.arange(0, TILE)
    column = (c // 2 % (TILE // 8)) * 8 + c // (TILE // 4) * 2 + c % 2
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        block = tile // tiles_n
        first = (tile % tiles_n) * TILE
        acc = tl.zeros([TOKENS, TILE], tl.float32)
        for k in range(0, D, DEPTH):
            x = x_desc.load([block * TOKENS, k])
            w = w_desc.load([first, k])
            acc = tl.dot(x, w.T, acc, input_precision=PRECISION)
        acc = tl.reshape(tl.permute(tl.reshape(acc, [TOKENS, TILE // 8, 4, 2]), [0, 2, 1, 3]), [TOKENS, TILE])
        neuron = first + column
        if HAS_BIAS:
            acc += tl.load(bias + neuron, mask=neuron < H, other=0.0).to(tl.float32)[None, :]
        value = activate_stored(acc, threshold, PLAIN, SQUARE, DTYPE)
        bits = value.to(tl.uint16, bitcast=True).to(tl.int32)
        # An activation is positive or NaN, so its bits are 0 where it is inactive and nowhere else.
        live = bits != 0
        if not EVEN:
            live = live & (neuron < H)[None, :]
        rank, total = ranks(live.to(tl.int32))
        token = block * TOKENS + tl.arange(0, TOKENS)
        row = words + token.to(tl.int64) * (tiles_n * WORDS) + (tile % tiles_n) * WORDS
        capacity = tl.where(token < M, WORDS - 1, 0)
        tl.store(row, total, mask=token < M)
        place = row[:, None] + 1 + rank
        tl.store(place, (bits << 16) | neuron[None, :], mask=live & (rank < capacity[:, None]))
