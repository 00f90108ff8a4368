from __future__ import annotations

import triton
import triton.language as tl

from .jit import activate_stored

_BYTES: tl.constexpr = tl.constexpr(0x01010101)
_STORE: tl.constexpr = tl.constexpr("""{
    .reg .pred kept;
    setp.lt.s32 kept, $3, $4;
    @kept st.global.b32 [$1], $2;
    mov.b32 $0, 0;
}""")


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
    DIRECT: tl.constexpr,
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
        token = block * TOKENS + tl.arange(0, TOKENS)
        row = words + token.to(tl.int64) * (tiles_n * WORDS) + (tile % tiles_n) * WORDS
        room = tl.where(token < M, WORDS - 1, 0)
        _scatter(row, count, 0, room, DIRECT)
        _store_entries(row, (ranks & 0xFF), a, 0, first, room, DIRECT)
        _store_entries(row, (ranks >> 8) & 0xFF, b, 1, first, room, DIRECT)
        _store_entries(row, (ranks >> 16) & 0xFF, c, TILE // 2, first, room, DIRECT)
        _store_entries(row, (ranks >> 24) & 0xFF, d, TILE // 2 + 1, first, room, DIRECT)


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
    TOKENS: tl.constexpr = acc.shape[0]
    N: tl.constexpr = acc.shape[1] // 16
    parts = tl.permute(tl.reshape(acc, [TOKENS, 2, N, 4, 2]), [0, 3, 2, 1, 4])
    even, odd = tl.split(parts)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _held_neurons(first, OFFSET: tl.constexpr, N: tl.constexpr):
    """int32 [1, 4, N]: the neurons of the quarter that starts at column OFFSET."""
    return first + OFFSET + 2 * tl.arange(0, 4)[None, :, None] + 8 * tl.arange(0, N)[None, None, :]


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
    q = 8 * tl.arange(0, 4)[None, :]
    lanes = tl.sum(held << q, 1) * _BYTES
    before += (((lanes << 8)[:, None] >> q) & 0xFF)[:, :, None]
    idle = (active ^ _BYTES) << 7
    return ((running << 8) + tl.minimum(before, 127) * _BYTES) | idle, tl.sum(held, 1)


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
def _store_entries(row, rank, bits, OFFSET: tl.constexpr, first, room, DIRECT: tl.constexpr):
    word = bits.to(tl.int32) | _held_neurons(first, OFFSET, bits.shape[2])
    _scatter(row[:, None, None] + 1 + rank, word, rank, room[:, None, None], DIRECT)


@triton.jit
def _scatter(pointer, value, rank, room, DIRECT: tl.constexpr):
    if DIRECT:
        tl.inline_asm_elementwise(_STORE, "=r,l,r,r,r", [pointer, value, rank, room], tl.int32, is_pure=False, pack=1)
    else:
        tl.store(pointer, value, mask=rank < room)
