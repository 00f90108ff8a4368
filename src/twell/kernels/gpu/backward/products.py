"""Pre-activations, up values and gradients of hidden activations of the listed neurons, from x and grad_y.

The pool has three planes of rows, one row per listed neuron of a block, one value per token:

    pool [3, rows, R]    plane 0: pre-activations, 1: gradients of hidden activations, 2: up values

and, for whoever looks for a neuron of a block, `places` int32 [B, H]: row * 256 + tokens that activate it;
0 if there are none.

Nothing of this is kept from the forward pass: for the listed neurons, computing it again costs less than
a tenth of the selector.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..jit import add_product, zero_sum


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
    PRECISION: tl.constexpr,
):
    """Persistent; select, up [H, D], down [H, E]; MATRICES: 3 if gated, else 2 (no up)."""
    DTYPE: tl.constexpr = pool.dtype.element_ty
    entry = tl.arange(0, CHUNK)
    token = tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    for unit in range(tl.program_id(0), tl.load(counter) * MATRICES, tl.num_programs(0)):
        item = unit // MATRICES
        plane = unit % MATRICES
        block = tl.load(work + item * 3)
        listed = entry < tl.load(work + item * 3 + 2)
        neuron = tl.load(lists + tl.load(work + item * 3 + 1) + entry, mask=listed, other=0)
        acc = zero_sum(CHUNK, ROWS, DTYPE)
        if plane == 1:
            for k in range(0, E, DEPTH):
                inside = listed[:, None] & (k + depth < E)[None, :]
                w = tl.load(down + (neuron * E)[:, None] + (k + depth)[None, :], mask=inside, other=0.0)
                acc = add_product(acc, w, grad_desc.load([block * ROWS, k]).T, PRECISION)
        else:
            source = select
            if plane == 2:
                source = up
            for k in range(0, D, DEPTH):
                inside = listed[:, None] & (k + depth < D)[None, :]
                w = tl.load(source + (neuron * D)[:, None] + (k + depth)[None, :], mask=inside, other=0.0)
                acc = add_product(acc, w, x_desc.load([block * ROWS, k]).T, PRECISION)
        if HAS_SELECT_BIAS:  # noqa: SIM102 - decided by the compiler, the next when it runs
            if plane == 0:
                acc += tl.load(select_bias + neuron, mask=listed, other=0.0).to(tl.float32)[:, None]
        if HAS_UP_BIAS:  # noqa: SIM102 - decided by the compiler, the next when it runs
            if plane == 2:
                acc += tl.load(up_bias + neuron, mask=listed, other=0.0).to(tl.float32)[:, None]
        row = item * CHUNK + entry
        value = acc.to(DTYPE)
        place = (tl.cast(plane, tl.int64) * rows + row) * ROWS
        tl.store(pool + place[:, None] + token[None, :], value)
        if plane == 0:
            active = (block * ROWS + token < M)[None, :] & ~(value.to(tl.float32) <= threshold)
            tokens = tl.sum(active.to(tl.int32), 1)
            tl.store(places + block * H + neuron, row * 256 + tokens, mask=listed & (tokens > 0))
