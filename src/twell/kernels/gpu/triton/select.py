"""Selector matmul with the pack in its epilogue, for blocks of tokens.

The product is computed transposed: a tile is [neurons, tokens]. Every neuron of a tile then lies within
one warp, so "does any token of the block activate it" is a reduction in registers and two shuffles, and a
stored neuron is one contiguous row of a block's tokens. A neuron that no token activates costs one byte.

    active [B, H] uint8           1 where any token of block b activates neuron n
    values [B, H, R]              activations; only rows with active = 1 are ever written or read

There is no capacity to overflow: a block with every neuron active fills its part of `values`. A second kernel
turns the marks into lists of active neurons and work items.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import activate, activate_stored, add_product, nan_max, rounded, zero_sum


# One compiled kernel for any number of tokens: a CUDA graph capture must not meet a new one.
@triton.jit(do_not_specialize=["M"])
def select_blocks(
    x_desc,
    w_desc,
    bias,
    values,
    active,
    counter,
    M,
    H,
    D,
    threshold,
    HAS_BIAS: tl.constexpr,
    PLAIN: tl.constexpr,
    SQUARE: tl.constexpr,
    NEURONS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Persistent; x_desc: blocks [ROWS, DEPTH] of x [M, D]; w_desc: blocks [NEURONS, DEPTH] of w [H, D]."""
    DTYPE: tl.constexpr = values.dtype.element_ty
    if tl.program_id(0) == 0:
        tl.store(counter, 0)  # the list kernel that follows counts its work items from here
    tiles_n = tl.cdiv(H, NEURONS)
    tiles = tl.cdiv(M, ROWS) * tiles_n
    token = tl.arange(0, ROWS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        # Neurons fastest: the programs of one wave share few blocks of x, and w stays in the L2 cache.
        block = tile // tiles_n
        first = (tile % tiles_n) * NEURONS
        acc = zero_sum(NEURONS, ROWS, DTYPE)
        for k in range(0, D, DEPTH):
            w = w_desc.load([first, k])
            x = x_desc.load([block * ROWS, k])
            acc = add_product(acc, w, x.T)
        acc = acc.to(tl.float32)
        neuron = first + tl.arange(0, NEURONS)
        if HAS_BIAS:
            b = tl.load(bias + neuron, mask=neuron < H, other=0.0).to(tl.float32)
            # Tokens past M hold zeros, which a bias would wake.
            acc = tl.where((block * ROWS + token < M)[None, :], acc + b[:, None], 0.0)
        # Activations are monotone, so the largest pre-activation decides for the whole block.
        peak = activate(rounded(tl.reduce(acc, 1, nan_max), DTYPE), threshold, SQUARE)
        live = (rounded(peak, DTYPE) != 0.0) & (neuron < H)
        tl.store(active + block * H + neuron, live.to(tl.uint8), mask=neuron < H)
        value = activate_stored(acc, threshold, PLAIN, SQUARE, DTYPE)
        row = values + block.to(tl.int64) * H * ROWS + neuron[:, None] * ROWS
        tl.store(row + token[None, :], value, mask=live[:, None])


@triton.jit
def list_active(
    active,
    lists,
    counts,
    work,
    counter,
    H,
    chunks_per_block,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    FILL: tl.constexpr,
):
    """One program per block: its active neurons in ascending order, and one work item per CHUNK of them.

    lists [B, H] int32; counts [B] int32; a work item is block * chunks_per_block + chunk. Items of a block
    are contiguous; the order of blocks is that of arrival, which no result depends on.
    FILL: zeros past the end of a list, and so many past the last one, for lists that outlive the call.
    """
    block = tl.program_id(0)
    neuron = tl.arange(0, WIDTH)
    mark = tl.load(active + block * H + neuron, mask=neuron < H, other=0).to(tl.int32)
    position = tl.cumsum(mark, 0) - mark
    total = tl.sum(mark, 0)
    tl.store(lists + block * H + position, neuron, mask=mark > 0)
    tl.store(counts + block, total)
    if FILL > 0:
        tl.store(lists + block * H + neuron, 0, mask=(neuron >= total) & (neuron < H))
        if block == tl.num_programs(0) - 1:
            past = tl.arange(0, FILL)
            tl.store(lists + (block + 1) * H + past, tl.zeros_like(past))
    chunks = tl.cdiv(total, CHUNK)
    base = tl.atomic_add(counter, chunks)
    for chunk in range(0, chunks):
        tl.store(work + base + chunk, block * chunks_per_block + chunk)
