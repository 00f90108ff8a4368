"""Up projection of the active neurons of each block, times their gates, packed in list order.

    hidden [B, P, R]     row e of block b belongs to the e-th listed neuron; P = ceil(H / CHUNK) * CHUNK

Work items write whole chunks, zeros past the end of the list: the down product reads hidden in whole steps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .jit import add_product, rounded, zero_sum


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
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """hidden[b, e] = values[b, n] * (x_b w[n]) for the listed neurons n of each work item; persistent.

    The weight rows of CHUNK listed neurons are gathered into one dense tile [CHUNK, DEPTH].
    """
    DTYPE: tl.constexpr = values.dtype.element_ty
    entry = tl.arange(0, CHUNK)
    token = tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    for item in range(tl.program_id(0), tl.load(counter), tl.num_programs(0)):
        packed = tl.load(work + item)
        block = packed // chunks_per_block
        first = (packed % chunks_per_block) * CHUNK
        listed = first + entry < tl.load(counts + block)
        neuron = tl.load(lists + block * H + first + entry, mask=listed, other=0)
        acc = zero_sum(CHUNK, ROWS, DTYPE)
        for k in range(0, D, DEPTH):
            inside = listed[:, None] & (k + depth < D)[None, :]
            rows = tl.load(w + (neuron * D)[:, None] + (k + depth)[None, :], mask=inside, other=0.0)
            x = x_desc.load([block * ROWS, k])
            acc = add_product(acc, rows, x.T, PRECISION)
        if HAS_BIAS:
            acc += tl.load(bias + neuron, mask=listed, other=0.0).to(tl.float32)[:, None]
        cell = values + block.to(tl.int64) * H * ROWS + (neuron * ROWS)[:, None] + token[None, :]
        gate = tl.load(cell, mask=listed[:, None], other=0.0).to(tl.float32)
        # A token that does not activate the neuron keeps its exact 0, whatever its up value is.
        product = tl.where(gate == 0.0, 0.0, gate * rounded(acc, DTYPE))
        place = tl.cast(block, tl.int64) * chunks_per_block * CHUNK + first + entry
        tl.store(hidden + (place * ROWS)[:, None] + token[None, :], product.to(DTYPE))
