"""Sums over the warps of a program, for kernels whose warps split a product's depth."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def add(a, b):
    return a + b


@gluon.constexpr_function
def summed_layout(warps, columns):
    """[warps, rows, columns] with all partial sums of an element in one thread."""
    return gl.BlockedLayout([warps, 1, 2], [1, 64 // columns, columns // 2], [1, warps, 1], [2, 1, 0])


@gluon.jit
def sum_over_warps(partial):
    """[warps, R, C] with one partial sum in each warp -> [R, C], in `summed_layout` without its first axis.

    `gl.reduce` across warps does the same with bank conflicts that cost microseconds.
    """
    WARPS: gl.constexpr = partial.shape[0]
    C: gl.constexpr = partial.shape[2]
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, C // 8, [2, 1, 0])
    memory = gl.allocate_shared_memory(gl.float32, partial.shape, SWIZZLED)
    memory.store(partial)
    return gl.reduce(memory.load(summed_layout(WARPS, C)), 0, add)
