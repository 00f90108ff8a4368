"""Hidden values of the dense path."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import activate, factor_of, rounded


@triton.jit(do_not_specialize=["size"])
def hidden_values(
    pre,
    up,
    size,
    threshold,
    GATED: tl.constexpr,
    SQUARE: tl.constexpr,
    CLAMP_UP: tl.constexpr,
    SPAN: tl.constexpr,
):
    """pre = act(pre) * up, or act(pre), in place, of `size` numbers; rounded where PyTorch rounds."""
    DTYPE: tl.constexpr = pre.dtype.element_ty
    place = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    inside = place < size
    value = activate(tl.load(pre + place, mask=inside, other=0.0).to(tl.float32), threshold, SQUARE)
    if GATED:
        factor = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
        value = rounded(value, DTYPE) * factor_of(factor, CLAMP_UP)
    tl.store(pre + place, value.to(DTYPE), mask=inside)
