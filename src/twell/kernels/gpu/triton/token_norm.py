"""Adds to the residual stream of few tokens, and normalises it (RMSNorm), in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .common import rounded


@triton.jit
def token_norm(
    x,
    change,
    weight,
    total,
    normed,
    D,
    epsilon,
    HAS_CHANGE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """total = x + change, normed = weight * total / rms(total); all [M, D], a program per token."""
    DTYPE: tl.constexpr = normed.dtype.element_ty
    if CHAINED:
        gdc_launch_dependents()
    feature = tl.arange(0, WIDTH)
    inside = feature < D
    scale = tl.load(weight + feature, mask=inside, other=0.0).to(tl.float32)
    cell = tl.program_id(0).to(tl.int64) * D + feature
    if CHAINED:
        gdc_wait()
    value = tl.load(x + cell, mask=inside, other=0.0).to(tl.float32)
    if HAS_CHANGE:
        value += tl.load(change + cell, mask=inside, other=0.0).to(tl.float32)
        value = rounded(value, DTYPE)
        tl.store(total + cell, value.to(DTYPE), mask=inside)
    mean = tl.sum(value * value, 0) / D
    value = rounded(value * (1.0 / tl.sqrt(mean + epsilon)), DTYPE)
    tl.store(normed + cell, (scale * value).to(DTYPE), mask=inside)
