from __future__ import annotations

import triton
import triton.language as tl

from .jit import activate_stored

_BYTES: tl.constexpr = tl.constexpr(0x01010101)


@triton.jit
def _quarters(acc):
    TOKENS: tl.constexpr = acc.shape[0]
    N: tl.constexpr = acc.shape[1] // 16
    parts = tl.reshape(acc, [TOKENS // 16, 2, 8, 2, N, 4, 2])
    parts = tl.permute(parts, [5, 1, 0, 2, 4, 3, 6])
    even, odd = tl.split(tl.reshape(parts, [4, TOKENS, N, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _before(counts):
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
def _bits(
    acc,
    neuron,
    bias,
    H,
    threshold,
    HAS_BIAS: tl.constexpr,
    PLAIN: tl.constexpr,
    SQUARE: tl.constexpr,
    EVEN: tl.constexpr,
    DTYPE: tl.constexpr,
):
    value = activate_stored(acc, threshold, PLAIN, SQUARE, DTYPE)
    bits = value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    if not EVEN:
        bits = tl.where(neuron < H, bits, 0).to(tl.uint32)
    return bits


@triton.jit
def _flags(a, b, c, d):
    low = tl.minimum(a, 0x10000) + (tl.minimum(b, 0x10000) << 8)
    high = tl.minimum(c, 0x10000) + (tl.minimum(d, 0x10000) << 8)
    return ((low >> 16) + high).to(tl.int32)


@triton.jit
def _put(row, ranks, bits, neuron, capacity, I: tl.constexpr):
    rank = (ranks >> (8 * I)) & 0xFF
    tl.store(row + 1 + rank, bits.to(tl.int32) | neuron, mask=rank < capacity)


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
    PRECISION: tl.constexpr,
):
    """Persistent; x_desc: blocks [TOKENS, DEPTH] of x [M, D]; w_desc: blocks [TILE, DEPTH] of w [H, D]."""
    if DESCRIBED:
        DTYPE: tl.constexpr = x.dtype
    else:
        DTYPE: tl.constexpr = x.dtype.element_ty
    tl.assume(D > 0)
    tiles_n = tl.cdiv(H, TILE)
    tiles = tl.cdiv(M, TOKENS) * tiles_n
    q = tl.arange(0, 4)
    column = 2 * q[:, None, None] + 8 * tl.arange(0, TILE // 16)
    t = tl.arange(0, TOKENS)
    slot = t % 8 + t // 8 % (TOKENS // 16) * 16 + t // (TOKENS // 2) * 8
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=DESCRIBED):
        block = tile // tiles_n
        first = (tile % tiles_n) * TILE
        acc = tl.zeros([TOKENS, TILE], tl.float32)
        for k in range(0, D, DEPTH):
            if DESCRIBED:
                xs = x.load([block * TOKENS, k])
                ws = w.load([first, k])
            else:
                depth = k + tl.arange(0, DEPTH)
                r = block * TOKENS + t
                n = first + tl.arange(0, TILE)
                xs = tl.load(
                    x + r.to(tl.int64)[:, None] * D + depth, mask=(r < M)[:, None] & (depth < D), other=0.0
                )
                ws = tl.load(w + n[:, None] * D + depth, mask=(n < H)[:, None] & (depth < D), other=0.0)
            acc = tl.dot(xs, ws.T, acc, input_precision=PRECISION)
        if HAS_BIAS:
            n = first + tl.arange(0, TILE)
            acc += tl.load(bias + n, mask=n < H, other=0.0).to(tl.float32)[None, :]
        a, b, c, d = _quarters(acc)
        neuron = first + column
        a = _bits(a, neuron, bias, H, threshold, HAS_BIAS, PLAIN, SQUARE, EVEN, DTYPE)
        b = _bits(b, neuron + 1, bias, H, threshold, HAS_BIAS, PLAIN, SQUARE, EVEN, DTYPE)
        c = _bits(c, neuron + TILE // 2, bias, H, threshold, HAS_BIAS, PLAIN, SQUARE, EVEN, DTYPE)
        d = _bits(d, neuron + TILE // 2 + 1, bias, H, threshold, HAS_BIAS, PLAIN, SQUARE, EVEN, DTYPE)
        live = _flags(a, b, c, d)
        running = live * _BYTES
        before, held = _before((running >> 24) & 0xFF)
        lanes = tl.sum(held << (8 * q)[:, None], 0) * _BYTES
        before += (((lanes << 8)[None, :] >> (8 * q)[:, None]) & 0xFF)[:, :, None]
        ranks = ((running << 8) + tl.minimum(before, 127) * _BYTES) | ((live ^ _BYTES) << 7)
        token = block * TOKENS + slot
        row = words + token.to(tl.int64) * (tiles_n * WORDS) + (tile % tiles_n) * WORDS
        total = tl.sum(held, 0)
        once = (q == 0)[:, None] & (token < M)[None, :]
        tl.store(row[None, :] + 0 * q[:, None], total[None, :] + 0 * q[:, None], mask=once)
        capacity = tl.where(token < M, WORDS - 1, 0)[None, :, None]
        row = row[None, :, None]
        _put(row, ranks, a, neuron, capacity, 0)
        _put(row, ranks, b, neuron + 1, capacity, 1)
        _put(row, ranks, c, neuron + TILE // 2, capacity, 2)
        _put(row, ranks, d, neuron + TILE // 2 + 1, capacity, 3)
