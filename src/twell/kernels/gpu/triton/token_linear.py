"""A linear layer for few tokens: bound by reading the weights once.

A program takes NEURONS rows of the weights and all tokens. It asks for its first weights before it waits for
x: they do not depend on the kernel before, whose end they overlap.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


# One compiled kernel for any number of tokens: a CUDA graph capture must not meet a new one.
@triton.jit(do_not_specialize=["M"])
def token_linear(
    x,
    w,
    bias,
    y,
    M,
    N,
    D,
    HAS_BIAS: tl.constexpr,
    NEURONS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    DEPTH: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """y [M, N] = x [M, D] w^T + bias; w [N, D]; M at most ROWS.

    ROWS 1: weights are multiplied in registers. Else tensor cores: each of PARTS warps takes DEPTH of a
    step's depth, and their sums are added at the end.
    """
    if CHAINED:
        gdc_launch_dependents()
    neuron = tl.program_id(0) * NEURONS + tl.arange(0, NEURONS)
    part = tl.arange(0, PARTS)
    depth = part[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :]
    token = tl.arange(0, ROWS)
    source = w + (neuron.to(tl.int64) * D)[None, :, None] + depth[:, None, :]
    real = (neuron < N)[None, :, None]
    rows = tl.load(source, mask=real & (depth < D)[:, None, :], other=0.0)
    if CHAINED:
        gdc_wait()
    acc = _product(x, rows, depth, token, M, D, ROWS)
    for k in range(PARTS * DEPTH, D, PARTS * DEPTH):
        rows = tl.load(source + k, mask=real & (k + depth < D)[:, None, :], other=0.0)
        acc += _product(x, rows, k + depth, token, M, D, ROWS)
    if HAS_BIAS:
        acc += tl.load(bias + neuron, mask=neuron < N, other=0.0).to(tl.float32)[:, None]
    cell = y + token[None, :] * N + neuron[:, None]
    tl.store(cell, acc.to(y.dtype.element_ty), mask=(neuron < N)[:, None] & (token < M)[None, :])


@triton.jit
def _product(x, rows, depth, token, M, D, ROWS: tl.constexpr):
    """float32 [NEURONS, ROWS] of rows [PARTS, NEURONS, DEPTH] and x at `depth` [PARTS, DEPTH]."""
    if ROWS == 1:
        one = tl.load(x + depth, mask=depth < D, other=0.0)
        products = rows.to(tl.float32) * one.to(tl.float32)[:, None, :]
        total = tl.sum(tl.sum(products, 2), 0)[:, None]
    else:
        inside = (token < M)[None, None, :] & (depth < D)[:, :, None]
        columns = tl.load(x + token[None, None, :] * D + depth[:, :, None], mask=inside, other=0.0)
        total = tl.sum(tl.dot(rows, columns, input_precision="ieee"), 0)
    return total
