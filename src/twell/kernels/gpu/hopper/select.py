"""The selector of `triton/select` for compute capability 9.0: TMA, wgmma and warp specialisation, in Gluon.

One producer warp streams tiles into a ring of shared-memory stages; two consumer warpgroups each own half
of a tile's neurons. The two drift apart by as much as the ring allows, so the epilogue of one overlaps the
product of the other, and the producer is already loading the next tile during both.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .common import activate, add_product, arrived, finish, make_ring, nan_max, stored_layout, tma_load

SELECT_TILE = 256 * 128  # neurons x tokens
SELECT_DEPTH = 64  # features of one step
SELECT_STAGES = 4


@gluon.jit
def _load(x_desc, w_desc, ring, M, H, D):
    tokens, weights, ready, free = ring
    STAGES: gl.constexpr = weights.shape[0]
    NEURONS: gl.constexpr = w_desc.block_shape[0]
    TOKENS: gl.constexpr = x_desc.block_shape[0]
    DEPTH: gl.constexpr = x_desc.block_shape[1]
    tiles_n = gl.cdiv(H, NEURONS)
    step = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, TOKENS) * tiles_n, gl.num_programs(0)):
        for k in range(0, D, DEPTH):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(stage), x_desc.block_type.nbytes + w_desc.block_type.nbytes)
            tma_load(w_desc, [(tile % tiles_n) * NEURONS, k], ready.index(stage), weights.index(stage))
            tma_load(x_desc, [(tile // tiles_n) * TOKENS, k], ready.index(stage), tokens.index(stage))
            step += 1


@gluon.jit
def _multiply(
    bias,
    values,
    active,
    ring,
    M,
    H,
    D,
    threshold,
    HALF: gl.constexpr,
    ROWS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PLAIN: gl.constexpr,
    SQUARE: gl.constexpr,
):
    tokens, weights, _ready, _free = ring
    NEURONS: gl.constexpr = weights.shape[1] // 2
    TOKENS: gl.constexpr = tokens.shape[1]
    DEPTH: gl.constexpr = tokens.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    tiles_n = gl.cdiv(H, 2 * NEURONS)
    step = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, TOKENS) * tiles_n, gl.num_programs(0)):
        first = (tile % tiles_n) * 2 * NEURONS + HALF * NEURONS
        acc = gl.zeros([NEURONS, TOKENS], gl.float32, ACC)
        for k in range(0, D, DEPTH):
            stage = arrived(ring, step, False)
            half = weights.index(stage).slice(HALF * NEURONS, NEURONS)
            acc = add_product(acc, half, tokens.index(stage).permute((1, 0)), ring, step, k > 0)
            step += 1
        acc = finish(acc, ring, step, True)

        target = (bias, values, active)
        gl.static_assert(TOKENS == 2 * ROWS)
        left, right = gl.split(gl.permute(gl.reshape(acc, [NEURONS, 2, ROWS]), [0, 2, 1]))
        block = (tile // tiles_n) * 2
        _emit(left, target, block, first, M, H, threshold, HAS_BIAS, PLAIN, SQUARE)
        if (block + 1) * ROWS < M:
            _emit(right, target, block + 1, first, M, H, threshold, HAS_BIAS, PLAIN, SQUARE)


@gluon.jit
def _emit(
    acc,
    target,
    block,
    first,
    M,
    H,
    threshold,
    HAS_BIAS: gl.constexpr,
    PLAIN: gl.constexpr,
    SQUARE: gl.constexpr,
):
    """Activate, mark and store sums [neurons, ROWS] of one block of tokens."""
    bias, values, active = target
    DTYPE: gl.constexpr = values.dtype.element_ty
    ACC: gl.constexpr = acc.type.layout
    NEURONS: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1]
    OUT: gl.constexpr = stored_layout(NEURONS, ROWS)
    neuron = first + gl.arange(0, NEURONS, gl.SliceLayout(1, ACC))
    if HAS_BIAS:
        token = gl.arange(0, ROWS, gl.SliceLayout(0, ACC))
        b = gl.load(bias + neuron, mask=neuron < H, other=0.0).to(gl.float32)
        # Tokens past M hold zeros, which a bias would wake.
        acc = gl.where((block * ROWS + token < M)[None, :], acc + b[:, None], 0.0)
    # Activations are monotone, so the largest pre-activation decides for the whole block.
    peak = activate(gl.reduce(acc, 1, nan_max).to(DTYPE).to(gl.float32), threshold, SQUARE)
    live = (peak.to(DTYPE).to(gl.float32) != 0.0) & (neuron < H)
    gl.store(active + block * H + neuron, live.to(gl.uint8), mask=neuron < H)
    if PLAIN:  # relu: rounding before or after is the same
        value = gl.where(acc <= 0.0, 0.0, acc).to(DTYPE)
    else:
        value = activate(acc.to(DTYPE).to(gl.float32), threshold, SQUARE).to(DTYPE)
    value = gl.convert_layout(value, OUT)
    kept = gl.convert_layout(live, gl.SliceLayout(1, OUT))
    out_neuron = first + gl.arange(0, NEURONS, gl.SliceLayout(1, OUT))
    out_token = gl.arange(0, ROWS, gl.SliceLayout(0, OUT))
    row = values + block.to(gl.int64) * H * ROWS + (out_neuron * ROWS)[:, None]
    gl.store(row + out_token[None, :], value, mask=kept[:, None])


@gluon.jit(do_not_specialize=["M"])
def select_blocks_hopper(
    x_desc,
    w_desc,
    bias,
    values,
    active,
    counter,
    M,
    H,
    D,
    threshold,
    ROWS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PLAIN: gl.constexpr,
    SQUARE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """As `select_blocks`; x_desc has blocks of 2 * ROWS tokens; 4 warps."""
    tokens = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_desc.block_shape, x_desc.layout)
    weights = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_shape, w_desc.layout)
    ring = make_ring(tokens, weights, 2, False)
    if gl.program_id(0) == 0:
        gl.store(counter, 0)  # the list kernel that follows counts its work items from here
    gl.warp_specialize(
        [
            (_multiply, (bias, values, active, ring, M, H, D, threshold, 0, ROWS, HAS_BIAS, PLAIN, SQUARE)),
            (_multiply, (bias, values, active, ring, M, H, D, threshold, 1, ROWS, HAS_BIAS, PLAIN, SQUARE)),
            (_load, (x_desc, w_desc, ring, M, H, D)),
        ],
        [4, 1],
        [240, 24],
    )
