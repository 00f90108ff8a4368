"""Device functions that every kernel shares."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def zero_sum(ROWS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr):
    """Zeros [ROWS, COLUMNS] to which `add_product` adds products of DTYPE operands."""
    if tl.float32 == DTYPE:
        zeros = tl.zeros([ROWS, COLUMNS], tl.float64)
    else:
        zeros = tl.zeros([ROWS, COLUMNS], tl.float32)
    return zeros


@triton.jit
def add_product(total, a, b):
    """total + a b. Tiles of float32 products are added in float64: one after the other in float32, a sum over
    thousands of neurons erred 2.4 to 3.4 times as much as cuBLAS' (H200, 1 to 20 tokens)."""
    if total.dtype == tl.float64:
        total += tl.dot(a, b, input_precision="ieee").to(tl.float64)
    else:
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit
def nan_max(a, b):
    """Maximum that keeps a NaN: a block with a NaN gate is active."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def activate(pre, threshold, SQUARE: tl.constexpr):
    """float32 activations of float32 values that are already rounded to the storage type.

    relu and drelu are threshold 0; fatrelu brings its own; relu2 is SQUARE. A NaN is not <= anything: it
    stays.
    """
    value = tl.where(pre <= threshold, 0.0, pre)
    if SQUARE:
        value = value * value
    return value


@triton.jit
def factor_of(up, CLAMP_UP: tl.constexpr):
    """What multiplies the activation of the gate; a NaN stays."""
    if CLAMP_UP:
        up = tl.where(up <= 0.0, 0.0, up)
    return up


@triton.jit
def activate_stored(acc, threshold, PLAIN: tl.constexpr, SQUARE: tl.constexpr, DTYPE: tl.constexpr):
    """The activation of float32 sums as stored. PLAIN: relu, where rounding before or after is the same."""
    if PLAIN:
        value = tl.where(acc <= 0.0, 0.0, acc)
    else:
        value = activate(acc.to(DTYPE).to(tl.float32), threshold, SQUARE)
    return value.to(DTYPE)


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    """`value` as the storage type would hold it, in float32."""
    return value.to(DTYPE).to(tl.float32)
