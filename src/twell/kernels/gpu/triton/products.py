"""Products of tokens with gathered weight rows: the up projection of each block's active neurons, and what
the backward pass computes again.

    hidden [B, P, R]     row e of block b belongs to the e-th listed neuron; P = ceil(H / CHUNK) * CHUNK

Work items of the up projection write whole chunks, zeros past the end of the list: the down projection reads
hidden in whole steps.

    pool [3, rows, R]    one row per listed neuron of a block, one value per token;
                         plane 0: pre-activations, 1: gradients of hidden activations, 2: up values
    places int32 [B, H]  where a neuron of a block is: row * 256 + tokens that activate it; 0 without any

Nothing of this is kept from the forward pass: for the listed neurons, computing it again costs less than
a tenth of the selector.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import add_product, factor_of, rounded, zero_sum


@triton.jit
def _product(
    desc,
    w,
    bias,
    block,
    neuron,
    listed,
    width,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """[CHUNK, ROWS]: gathered rows of w [H, width] times the block's tokens, [M, width] behind desc."""
    depth = tl.arange(0, DEPTH)
    acc = zero_sum(neuron.shape[0], ROWS, DTYPE)
    for k in range(0, width, DEPTH):
        inside = listed[:, None] & (k + depth < width)[None, :]
        rows = tl.load(w + (neuron * width)[:, None] + (k + depth)[None, :], mask=inside, other=0.0)
        acc = add_product(acc, rows, desc.load([block * ROWS, k]).T)
    if HAS_BIAS:
        acc += tl.load(bias + neuron, mask=listed, other=0.0).to(tl.float32)[:, None]
    return acc


@triton.jit
def up_blocks(
    x_desc,
    w,
    bias,
    values,
    hidden,
    lists,
    counts,
    work,
    counter,
    H,
    D,
    chunks_per_block,
    HAS_BIAS: tl.constexpr,
    CLAMP_UP: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """hidden[b, e] = values[b, n] * (x_b w[n]) for the listed neurons n of each work item; persistent.

    The weight rows of CHUNK listed neurons are gathered into one dense tile [CHUNK, DEPTH].
    CLAMP_UP: relu(x_b w[n]) multiplies.
    """
    DTYPE: tl.constexpr = values.dtype.element_ty
    entry = tl.arange(0, CHUNK)
    token = tl.arange(0, ROWS)
    for item in range(tl.program_id(0), tl.load(counter), tl.num_programs(0)):
        packed = tl.load(work + item)
        block = packed // chunks_per_block
        first = (packed % chunks_per_block) * CHUNK
        listed = first + entry < tl.load(counts + block)
        neuron = tl.load(lists + block * H + first + entry, mask=listed, other=0)
        acc = _product(x_desc, w, bias, block, neuron, listed, D, HAS_BIAS, ROWS, DEPTH, DTYPE)
        cell = values + block.to(tl.int64) * H * ROWS + (neuron * ROWS)[:, None] + token[None, :]
        gate = tl.load(cell, mask=listed[:, None], other=0.0).to(tl.float32)
        # A token that does not activate the neuron keeps its exact 0, whatever its up value is.
        product = tl.where(gate == 0.0, 0.0, gate * factor_of(rounded(acc, DTYPE), CLAMP_UP))
        place = tl.cast(block, tl.int64) * chunks_per_block * CHUNK + first + entry
        tl.store(hidden + (place * ROWS)[:, None] + token[None, :], product.to(DTYPE))


@triton.jit(do_not_specialize=["M"])
def gather_products(
    x_desc,
    grad_desc,
    select,
    down,
    up,
    select_bias,
    up_bias,
    pool,
    places,
    lists,
    work,
    counter,
    M,
    H,
    D,
    E,
    rows,
    threshold,
    HAS_SELECT_BIAS: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
    MATRICES: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Persistent; select, up [H, D], down [H, E]; MATRICES: 3 if gated, else 2 (no up)."""
    DTYPE: tl.constexpr = pool.dtype.element_ty
    entry = tl.arange(0, CHUNK)
    token = tl.arange(0, ROWS)
    for unit in range(tl.program_id(0), tl.load(counter) * MATRICES, tl.num_programs(0)):
        item = unit // MATRICES
        plane = unit % MATRICES
        block = tl.load(work + item * 3)
        listed = entry < tl.load(work + item * 3 + 2)
        neuron = tl.load(lists + tl.load(work + item * 3 + 1) + entry, mask=listed, other=0)
        if plane == 0:
            acc = _product(
                x_desc, select, select_bias, block, neuron, listed, D,
                HAS_SELECT_BIAS, ROWS, DEPTH, DTYPE,
            )  # fmt: skip
        elif plane == 1:
            acc = _product(grad_desc, down, down, block, neuron, listed, E, False, ROWS, DEPTH, DTYPE)
        else:
            acc = _product(x_desc, up, up_bias, block, neuron, listed, D, HAS_UP_BIAS, ROWS, DEPTH, DTYPE)
        row = item * CHUNK + entry
        value = acc.to(DTYPE)
        place = (tl.cast(plane, tl.int64) * rows + row) * ROWS
        tl.store(pool + place[:, None] + token[None, :], value)
        if plane == 0:
            active = (block * ROWS + token < M)[None, :] & ~(value.to(tl.float32) <= threshold)
            tokens = tl.sum(active.to(tl.int32), 1)
            tl.store(places + block * H + neuron, row * 256 + tokens, mask=listed & (tokens > 0))
