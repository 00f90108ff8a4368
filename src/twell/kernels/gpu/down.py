"""Down projection of the active neurons of each block: a matrix product over gathered weight rows."""

from __future__ import annotations

import triton
import triton.language as tl

from .jit import add_product, zero_sum


# One compiled kernel for any number of tokens: a CUDA graph capture must not meet a new one.
@triton.jit(do_not_specialize=["M"])
def down_blocks(
    w,
    bias,
    hidden,
    hidden_desc,
    lists,
    counts,
    y,
    M,
    H,
    D,
    padded,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y [M, D] from hidden activations and w [H, D] (neuron-major); one tile [ROWS, WIDTH] per program.

    PACKED: hidden rows are in list order, [B, padded, ROWS], as `up_blocks` writes them, and come through
    hidden_desc, blocks [DEPTH, ROWS] of [B * padded, ROWS]. Else they lie where the selector put them,
    [B, H, ROWS], and are gathered (non-gated blocks).

    Listed neurons are summed in ascending order, so results do not depend on scheduling.
    """
    DTYPE: tl.constexpr = y.dtype.element_ty
    tiles = tl.cdiv(D, WIDTH)
    block = tl.program_id(0) // tiles
    column = (tl.program_id(0) % tiles) * WIDTH + tl.arange(0, WIDTH)
    token = tl.arange(0, ROWS)
    entry = tl.arange(0, DEPTH)
    count = tl.load(counts + block)
    base = hidden + block.to(tl.int64) * H * ROWS
    acc = zero_sum(ROWS, WIDTH, DTYPE)
    for k in range(0, count, DEPTH):
        listed = k + entry < count
        neuron = tl.load(lists + block * H + k + entry, mask=listed, other=0)
        if PACKED:
            h = hidden_desc.load([block * padded + k, 0])
        else:
            h = tl.load(base + (neuron * ROWS)[:, None] + token[None, :], mask=listed[:, None], other=0.0)
        inside = listed[:, None] & (column < D)[None, :]
        rows = tl.load(w + (neuron * D)[:, None] + column[None, :], mask=inside, other=0.0)
        acc = add_product(acc, h.T, rows, PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    row = block * ROWS + token
    out = y + row.to(tl.int64)[:, None] * D + column[None, :]
    tl.store(out, acc.to(DTYPE), mask=(row < M)[:, None] & (column < D)[None, :])
