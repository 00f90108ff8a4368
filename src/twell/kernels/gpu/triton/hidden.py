"""What lies between the products of the dense path: hidden values, their statistics and their gradients."""

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


@triton.jit(do_not_specialize=["tokens"])
def hidden_with_statistics(
    pre,
    up,
    hidden,
    firing,
    sums,
    tokens,
    neurons,
    threshold,
    GATED: tl.constexpr,
    SQUARE: tl.constexpr,
    CLAMP_UP: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """hidden = act(pre) * up, or act(pre), of [tokens, neurons]; rounded where PyTorch rounds.

    A program takes COLUMNS neurons of ROWS * STEPS tokens: it stores for how many of these tokens each neuron
    is active in `firing` [programs along tokens, neurons], and the sum of |hidden| in `sums`, one for each.
    """
    DTYPE: tl.constexpr = pre.dtype.element_ty
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < neurons
    first = tl.program_id(1) * (ROWS * STEPS)
    count = tl.zeros([ROWS, COLUMNS], tl.int32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(STEPS):
        row = first + step * ROWS + tl.arange(0, ROWS)
        inside = (row < tokens)[:, None] & known[None, :]
        place = row.to(tl.int64)[:, None] * neurons + column[None, :]
        value = activate(tl.load(pre + place, mask=inside, other=0.0).to(tl.float32), threshold, SQUARE)
        value = rounded(value, DTYPE)
        count += (value != 0.0).to(tl.int32)
        if GATED:
            factor = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
            value = rounded(value * factor_of(factor, CLAMP_UP), DTYPE)
        total += tl.abs(value)
        tl.store(hidden + place, value.to(DTYPE), mask=inside)
    tl.store(firing + tl.program_id(1) * neurons + column, tl.sum(count, 0), mask=known)
    tl.store(sums + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.sum(tl.sum(total, 0), 0))


@triton.jit(do_not_specialize=["size", "tokens"])
def hidden_gradients(
    grad_hidden,
    grad_l1,
    pre,
    up,
    grad_pre,
    grad_up,
    hidden,
    size,
    tokens,
    threshold,
    GATED: tl.constexpr,
    SQUARE: tl.constexpr,
    CLAMP_UP: tl.constexpr,
    FROM_Y: tl.constexpr,
    FROM_L1: tl.constexpr,
    HIDDEN: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Gradients of pre and up, of `size` numbers, from those of the hidden values (FROM_Y) and of their mean
    sum of magnitudes over `tokens` (FROM_L1); HIDDEN: also the hidden values, computed again."""
    DTYPE: tl.constexpr = pre.dtype.element_ty
    place = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    inside = place < size
    before = tl.load(pre + place, mask=inside, other=0.0).to(tl.float32)
    activated = rounded(activate(before, threshold, SQUARE), DTYPE)
    value, factor = activated, activated
    if GATED:
        raw = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
        factor = factor_of(raw, CLAMP_UP)
        value = rounded(activated * factor, DTYPE)
    if HIDDEN:
        tl.store(hidden + place, value.to(DTYPE), mask=inside)
    if FROM_Y:
        grad = tl.load(grad_hidden + place, mask=inside, other=0.0).to(tl.float32)
    else:
        grad = tl.zeros([SPAN], tl.float32)
    if FROM_L1:
        sign = tl.where(value > 0.0, 1.0, tl.where(value < 0.0, -1.0, value))  # a NaN stays, and 0
        grad = rounded(grad + sign * (tl.load(grad_l1).to(tl.float32) / tokens.to(tl.float32)), DTYPE)
    through = grad
    if GATED:
        of_up = grad * activated
        if CLAMP_UP:
            of_up = tl.where(raw <= 0.0, 0.0, of_up)
        tl.store(grad_up + place, of_up.to(DTYPE), mask=inside)
        through = rounded(grad * factor, DTYPE)
    if SQUARE:
        through = through * (2.0 * before)
    tl.store(grad_pre + place, tl.where(before <= threshold, 0.0, through).to(DTYPE), mask=inside)
