"""Selector matmul whose epilogue packs row TwELL words.

A tile is [tokens, neurons]. Each token of it owns WORDS = TILE / C words: the number of its active neurons,
then one word, value bits above neuron index, for each of them.

    words [M, tiles * WORDS] int32     words past a tile's entries are not written

The count is the true one. A tile with more than WORDS - 1 active neurons keeps that many of them, and
whoever reads the words sees that some are missing.

An entry goes to its rank among the active neurons of its token and tile. A scan over the accumulator would
cost more than packing saves, and so would moving it to another layout. Order within a tile means nothing, so
ranks follow the order in which a tensor core leaves a tile in registers: of every 8 columns a thread holds
two, 2 q and 2 q + 1, with q its lane modulo 4. `_quarters` gives these axes names, four entries at a time are
counted in the bytes of a 32-bit word (times 0x01010101 it holds the running sums of its bytes), and words
are stored from where their values were computed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton.common import activate_stored

_BYTES: tl.constexpr = tl.constexpr(0x01010101)
_STORE_BELOW: tl.constexpr = tl.constexpr(
    "{ .reg .pred below; setp.lt.s32 below, $3, $4; @below st.global.b32 [$1], $2; mov.b32 $0, 0; }"
)


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
    HOPPER: tl.constexpr,
    IN_PLACE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PLAIN: tl.constexpr,
    SQUARE: tl.constexpr,
    EVEN: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """words of x [M, D] and w [H, D], 16-bit types; persistent. At most 128 words per tile, H up to 65,536.

    HOPPER: x and w are descriptors with blocks [TOKENS, DEPTH] and [TILE, DEPTH], and ranks are counted for
    accumulators of which a row lies in four lanes; else pointers, and a scan over counts of four entries.
    IN_PLACE: store by machine instruction, see `_store`. EVEN: H is a multiple of TILE.
    """
    if HOPPER:
        DTYPE: tl.constexpr = x.dtype
    else:
        DTYPE: tl.constexpr = x.dtype.element_ty
    tl.assume(D > 0)  # else the whole epilogue is compiled once more, for a loop that never runs
    tiles_n = tl.cdiv(H, TILE)
    tiles = tl.cdiv(M, TOKENS) * tiles_n
    column = tl.arange(0, TILE)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=HOPPER):
        # Neurons fastest: the programs of one wave share few blocks of x, and w stays in the L2 cache.
        block = tile // tiles_n
        first = (tile % tiles_n) * TILE
        acc = tl.zeros([TOKENS, TILE], tl.float32)
        for k in range(0, D, DEPTH):
            tokens = _block(x, block * TOKENS, k, M, D, HOPPER, TOKENS, DEPTH)
            weights = _block(w, first, k, H, D, HOPPER, TILE, DEPTH)
            acc = tl.dot(tokens, weights.T, acc)
        if HAS_BIAS:
            acc += tl.load(bias + first + column, mask=first + column < H, other=0.0).to(tl.float32)[None, :]
        a, b, c, d = _quarters(acc)
        a = _value_bits(a, 0, first, H, threshold, PLAIN, SQUARE, EVEN, DTYPE)
        b = _value_bits(b, 1, first, H, threshold, PLAIN, SQUARE, EVEN, DTYPE)
        c = _value_bits(c, TILE // 2, first, H, threshold, PLAIN, SQUARE, EVEN, DTYPE)
        d = _value_bits(d, TILE // 2 + 1, first, H, threshold, PLAIN, SQUARE, EVEN, DTYPE)
        ranks, count = _ranks(a, b, c, d, HOPPER)
        token = block * TOKENS + tl.arange(0, TOKENS)
        row = words + token.to(tl.int64) * (tiles_n * WORDS) + (tile % tiles_n) * WORDS
        room = tl.where(token < M, WORDS - 1, 0)
        _store(row, count, 0, room, IN_PLACE)
        _store_entries(row, ranks & 0xFF, a, 0, first, room, IN_PLACE)
        _store_entries(row, (ranks >> 8) & 0xFF, b, 1, first, room, IN_PLACE)
        _store_entries(row, (ranks >> 16) & 0xFF, c, TILE // 2, first, room, IN_PLACE)
        _store_entries(row, (ranks >> 24) & 0xFF, d, TILE // 2 + 1, first, room, IN_PLACE)


@triton.jit
def _block(source, row, k, rows, D, DESCRIBED: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """[ROWS, DEPTH] of a matrix [rows, D] from (row, k) on, zeros outside.

    Where the hardware has no bulk copies, a descriptor only hides from the compiler that rows are contiguous.
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
    """[TOKENS, TILE] -> four [TOKENS, 4, N], N = TILE / 16: element [t, q, n] is that of token t and column
    8 n + 2 q, plus 0, 1, TILE / 2 and TILE / 2 + 1. No value leaves its thread."""
    TOKENS: tl.constexpr = acc.shape[0]
    TILE: tl.constexpr = acc.shape[1]
    parts = tl.permute(tl.reshape(acc, [TOKENS, 2, TILE // 16, 4, 2]), [0, 3, 2, 1, 4])
    even, odd = tl.split(parts)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _neurons(first, OFFSET: tl.constexpr, N: tl.constexpr):
    """int32 [1, 4, N]: the neurons of the quarter that starts at column OFFSET."""
    return first + OFFSET + 2 * tl.arange(0, 4)[None, :, None] + 8 * tl.arange(0, N)[None, None, :]


@triton.jit
def _value_bits(
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
    """uint32 [TOKENS, 4, N]: the bits of a quarter's activations in the upper half of a word.

    An activation is positive or NaN, so this is 0 where a neuron is inactive and nowhere else.
    """
    if not EVEN:
        # The zero weights past H still meet Inf and NaN. Masked at the end instead, fatrelu fails an
        # assertion of LLVM's vectoriser in Triton 3.6, which ends the process.
        acc = tl.where(_neurons(first, OFFSET, acc.shape[2]) < H, acc, 0.0)
    value = activate_stored(acc, threshold, PLAIN, SQUARE, DTYPE)
    return value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16


@triton.jit
def _ranks(a, b, c, d, HOPPER: tl.constexpr):
    """int32 [TOKENS, 4, N]: in byte i the rank of quarter i's entry among the active ones of its token, made
    128 or more where it is inactive. int32 [TOKENS]: the number of active ones."""
    low = tl.minimum(a, 0x10000) + (tl.minimum(b, 0x10000) << 8)
    high = tl.minimum(c, 0x10000) + (tl.minimum(d, 0x10000) << 8)
    active = ((low >> 16) + high).to(tl.int32)  # one byte each, 0 or 1
    running = active * _BYTES
    if HOPPER:
        before, count = _before_by_lanes((running >> 24) & 0xFF)
    else:
        before, count = _before_by_scan((running >> 24) & 0xFF)
    idle = (active ^ _BYTES) << 7
    return ((running << 8) + before * _BYTES) | idle, count


@triton.jit
def _before_by_lanes(counts):
    """int32 [TOKENS, 4, N] -> the sum of what comes before in the row, and the row's sum [TOKENS], up to 256.

    In registers along the last axis, then across the four lanes.
    """
    before, held = _before(counts)
    byte = 8 * tl.arange(0, 4)[None, :]
    running = tl.sum(held << byte, 1) * _BYTES
    before += (((running << 8)[:, None] >> byte) & 0xFF)[:, :, None]
    return before, tl.sum(held, 1)


@triton.jit
def _before(counts):
    """int32 [A, B, N] -> the sum of what comes before along N, and the sum [A, B]; sums below 256."""
    A: tl.constexpr = counts.shape[0]
    B: tl.constexpr = counts.shape[1]
    N: tl.constexpr = counts.shape[2]
    if N == 1:
        before, total = tl.zeros_like(counts), tl.sum(counts, 2)
    else:
        RADIX: tl.constexpr = 4 if N % 4 == 0 else 2
        byte = 8 * tl.arange(0, RADIX)[None, None, None, :]
        running = tl.sum(tl.reshape(counts, [A, B, N // RADIX, RADIX]) << byte, 3) * _BYTES
        outer, total = _before((running >> (8 * RADIX - 8)) & 0xFF)
        running = (running << 8) + outer * _BYTES
        before = tl.reshape((running[:, :, :, None] >> byte) & 0xFF, [A, B, N])
    return before, total


@triton.jit
def _before_by_scan(counts):
    """As `_before_by_lanes`, for accumulators whose rows are spread over warps."""
    flat = tl.reshape(counts, [counts.shape[0], counts.shape[1] * counts.shape[2]])
    return tl.reshape(tl.cumsum(flat, 1) - flat, counts.shape), tl.sum(flat, 1)


@triton.jit
def _store_entries(row, rank, bits, OFFSET: tl.constexpr, first, room, IN_PLACE: tl.constexpr):
    word = bits.to(tl.int32) | _neurons(first, OFFSET, bits.shape[2])
    _store(row[:, None, None] + 1 + rank, word, rank, room[:, None, None], IN_PLACE)


@triton.jit
def _store(pointer, value, rank, room, IN_PLACE: tl.constexpr):
    """value where rank < room, all int32.

    For a store, Triton first moves values to a layout that it thinks suits the addresses. These are
    scattered anyway: the same store as an instruction leaves values where they are. Threads that hold the
    same value all write it.
    """
    if IN_PLACE:
        tl.inline_asm_elementwise(
            _STORE_BELOW, "=r,l,r,r,r", [pointer, value, rank, room], tl.int32, is_pure=False, pack=1
        )
    else:
        tl.store(pointer, value, mask=rank < room)
