"""`combine` in Gluon, where every thread keeps its 8 neighbouring tokens from load to store.

Triton gives scattered stores a layout of their own and moves all operands there through shared memory, which
takes as long as the rest.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .common import activate, add, factor_of


@gluon.jit(do_not_specialize=["M"])
def combine_hopper(
    pool,
    grad_l1,
    before,
    offsets,
    tokens,
    values,
    lists,
    work,
    counter,
    M,
    H,
    rows,
    threshold,
    HAS_L1: gl.constexpr,
    GATED: gl.constexpr,
    SQUARE: gl.constexpr,
    CLAMP_UP: gl.constexpr,
    RARE: gl.constexpr,
    CHUNK: gl.constexpr,
    ENTRIES: gl.constexpr,
    ROWS: gl.constexpr,
):
    """As `combine`; ENTRIES a multiple of 8, ROWS 64 or 128; 4 warps."""
    DTYPE: gl.constexpr = pool.dtype.element_ty
    PARTS: gl.constexpr = CHUNK // ENTRIES
    LANES: gl.constexpr = ROWS // 8
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    token = gl.arange(0, ROWS, gl.SliceLayout(0, FLAT))
    plane = rows.to(gl.int64) * ROWS
    pull = 0.0
    if HAS_L1:
        pull = (gl.load(grad_l1).to(gl.float64) / M).to(gl.float32)  # plain float32 division errs by 2 units
    for unit in range(gl.program_id(0), gl.load(counter) * PARTS, gl.num_programs(0)):
        item = unit // PARTS
        entry = (unit % PARTS) * ENTRIES + gl.arange(0, ENTRIES, gl.SliceLayout(1, FLAT))
        block = gl.load(work + item * 3)
        listed = entry < gl.load(work + item * 3 + 2)
        neuron = gl.load(lists + gl.load(work + item * 3 + 1) + entry, mask=listed, other=0)
        cell = pool + ((item * CHUNK + entry).to(gl.int64) * ROWS)[:, None] + token[None, :]
        pre = gl.load(cell).to(gl.float32)
        grad = gl.load(cell + plane).to(gl.float32)
        active = listed[:, None] & (block * ROWS + token < M)[None, :] & ~(pre <= threshold)
        hidden = (activate(pre, threshold, SQUARE)).to(DTYPE).to(gl.float32)
        if GATED:
            activated = hidden
            up = gl.load(cell + 2 * plane).to(gl.float32)
            factor = factor_of(up, CLAMP_UP)
            hidden = (activated * factor).to(DTYPE).to(gl.float32)
        if HAS_L1:
            sign = gl.where(hidden > 0.0, pull, gl.where(hidden < 0.0, -pull, 0.0))
            grad += sign  # not rounded: it is often less than half a unit of the sum
        grad_pre = grad
        if GATED:
            grad_pre = (grad * factor).to(DTYPE).to(gl.float32)
        if SQUARE:
            grad_pre = grad_pre * (2.0 * pre)
        # Inactive tokens keep exact zeros, whatever their up values and gradients are.
        hidden = gl.where(active, hidden, 0.0).to(DTYPE)
        grad_pre = gl.where(active, grad_pre, 0.0).to(DTYPE)
        gl.store(cell + plane, grad_pre)
        if GATED:
            grad_up = grad * activated
            if CLAMP_UP:
                grad_up = gl.where(up <= 0.0, 0.0, grad_up)
            grad_up = gl.where(active, grad_up, 0.0).to(DTYPE)
            gl.store(cell + 2 * plane, grad_up)
        if RARE:
            offset = gl.load(offsets + neuron, mask=listed, other=-1)
            gl.store(cell, hidden, mask=(listed & (offset < 0))[:, None])
            start = offset + gl.load(before + block * H + neuron, mask=listed, other=0)
            target = start[:, None] + gl.associative_scan(active.to(gl.int32), 1, add) - 1
            kept = active & (offset >= 0)[:, None]
            gl.store(tokens + target, block * ROWS + token[None, :] + gl.zeros_like(target), mask=kept)
            gl.store(values + target * 4, hidden, mask=kept)
            gl.store(values + target * 4 + 1, grad_pre, mask=kept)
            if GATED:
                gl.store(values + target * 4 + 2, grad_up, mask=kept)
        else:
            gl.store(cell, hidden)
