"""A linear layer for one to a few tokens: bound by reading the weights once.

A program takes NEURONS rows of the weights and all tokens, and multiplies in registers. It asks for its first
weights before it waits for x: they do not depend on the kernel before, whose end they overlap.
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
    DEPTH: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """y [M, N] = x [M, D] w^T + bias; w [N, D]; M at most ROWS."""
    if CHAINED:
        gdc_launch_dependents()
    neuron = tl.program_id(0) * NEURONS + tl.arange(0, NEURONS)
    depth = tl.arange(0, DEPTH)
    source = w + (neuron.to(tl.int64) * D)[:, None] + depth[None, :]
    real = (neuron < N)[:, None]
    rows = tl.load(source, mask=real & (depth < D)[None, :], other=0.0)
    if CHAINED:
        gdc_wait()
    acc = _products(x, rows, depth, M, D, ROWS)
    for k in range(DEPTH, D, DEPTH):
        rows = tl.load(source + k, mask=real & (k + depth < D)[None, :], other=0.0)
        acc += _products(x, rows, k + depth, M, D, ROWS)
    if HAS_BIAS:
        acc += tl.load(bias + neuron, mask=neuron < N, other=0.0).to(tl.float32)[None, :]
    token = tl.arange(0, ROWS)
    cell = y + token[:, None] * N + neuron[None, :]
    tl.store(cell, acc.to(y.dtype.element_ty), mask=(token < M)[:, None] & (neuron < N)[None, :])


@triton.jit
def _products(x, rows, depth, M, D, ROWS: tl.constexpr):
    """float32 [ROWS, NEURONS] of rows [NEURONS, DEPTH] and x at `depth`."""
    token = tl.arange(0, ROWS)
    acc = tl.zeros([ROWS, rows.shape[0]], tl.float32)
    for row in tl.static_range(ROWS):
        one = tl.load(x + row * D + depth, mask=depth < tl.where(row < M, D, 0), other=0.0)
        product = tl.sum(rows.to(tl.float32) * one.to(tl.float32)[None, :], 1)
        acc = tl.where((token == row)[:, None], product[None, :], acc)
    return acc
