"""A linear layer for few tokens on compute capability 9.0, in Gluon.

Weights go from memory into the registers of tensor-core operands, warps split the depth and add up at the
end. As in `triton/token_linear`, weights are asked for before the kernel waits for x.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .common import sum_over_warps, summed_layout


# One compiled kernel for any number of tokens: a CUDA graph capture must not meet a new one.
@gluon.jit(do_not_specialize=["M"])
def token_linear_hopper(
    x,
    w,
    bias,
    y,
    M,
    N,
    D,
    HAS_BIAS: gl.constexpr,
    NEURONS: gl.constexpr,
    ROWS: gl.constexpr,
):
    """y [M, N] = x [M, D] w^T + bias; w [N, D]; M at most ROWS."""
    gdc_launch_dependents()
    WARPS: gl.constexpr = gl.num_warps()
    DEPTH: gl.constexpr = 64
    PIECES: gl.constexpr = 4  # of so many features for each warp, whose weights are in registers at a time
    STEP: gl.constexpr = WARPS * DEPTH
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    SUM: gl.constexpr = gl.SliceLayout(0, summed_layout(WARPS, NEURONS))
    # 8 neighbours in depth for each lane: both operands permute depth alike, and load 16 bytes at once.
    X: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    W: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, W)))[:, None, None]
    depth = warp * DEPTH + gl.arange(0, DEPTH, gl.SliceLayout(0, gl.SliceLayout(2, W)))[None, :, None]
    neuron = gl.program_id(0) * NEURONS + gl.arange(0, NEURONS, gl.SliceLayout(0, gl.SliceLayout(1, W)))
    real = (neuron < N)[None, None, :]
    weights = w + (neuron * D)[None, None, :] + depth
    x_warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, X)))[:, None, None]
    x_token = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, X)))[None, :, None]
    x_depth = gl.arange(0, DEPTH, gl.SliceLayout(0, gl.SliceLayout(1, X)))[None, None, :]
    x_depth = x_warp * DEPTH + x_depth
    tokens = x + x_token * D + x_depth
    acc = gl.zeros([WARPS, ROWS, NEURONS], gl.float32, MMA)
    for k in range(0, D, PIECES * STEP):
        rows = ()
        for piece in gl.static_range(PIECES):
            at = k + piece * STEP
            rows = rows + (gl.load(weights + at, mask=real & (at + depth < D), other=0.0),)
        if k == 0:
            gdc_wait()
        for piece in gl.static_range(PIECES):
            at = k + piece * STEP
            known = (x_token < M) & (at + x_depth < D)
            acc = mma_v2(gl.load(tokens + at, mask=known, other=0.0), rows[piece], acc)
    total = sum_over_warps(acc)
    token = gl.arange(0, ROWS, gl.SliceLayout(1, SUM))
    out = gl.program_id(0) * NEURONS + gl.arange(0, NEURONS, gl.SliceLayout(0, SUM))
    if HAS_BIAS:
        total += gl.load(bias + out, mask=out < N, other=0.0).to(gl.float32)[None, :]
    inside = (token < M)[:, None] & (out < N)[None, :]
    gl.store(y + (token * N)[:, None] + out[None, :], total.to(y.dtype.element_ty), mask=inside)
