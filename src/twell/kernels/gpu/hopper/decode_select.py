"""The selector and up projection for few tokens on compute capability 9.0, in Gluon; see `launch_decode`.

Per tile of 64 neurons a producer warp streams the selector's rows by TMA and a warpgroup multiplies them.
Then up, for the neurons that a token activates: a few are gathered straight into the registers of tensor-core
operands (x from shared memory where all of it fits, else from L2), more come the way the selector did.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .common import (
    activate,
    add,
    add_product,
    arrived,
    factor_of,
    finish,
    make_ring,
    reinterpret,
    sum_over_warps,
    summed_layout,
    thread_barrier,
    tma_load,
)


@gluon.jit
def _or(a, b):
    return a | b


@gluon.jit
def _cell(slot, tile, tiles, ROWS: gl.constexpr):
    """Where a slot of a tile lies in `neurons` (ROWS 1) or, for its first token, in `values`."""
    return ((slot // 8) * tiles + tile) * (8 * ROWS) + slot % 8


@gluon.jit
def _send(w_desc, x_desc, ring, tile, step, start, span, WITH_X: gl.constexpr, RESIDENT: gl.constexpr):
    """One tile of weight rows from depth `start` on, and x beside it if wanted. Returns the next step."""
    x_ring, w_ring, ready, free = ring
    NEURONS: gl.constexpr = w_desc.block_shape[0]
    DEPTH: gl.constexpr = x_desc.block_shape[1]
    STAGES: gl.constexpr = w_ring.shape[0]
    for k in range(start, span, DEPTH):
        stage = step % STAGES
        mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
        if WITH_X:
            mbarrier.expect(ready.index(stage), x_desc.block_type.nbytes + w_desc.block_type.nbytes)
            tma_load(w_desc, [tile * NEURONS, k], ready.index(stage), w_ring.index(stage))
            place = k // DEPTH if RESIDENT else stage
            tma_load(x_desc, [0, k], ready.index(stage), x_ring.index(place))
        else:
            mbarrier.expect(ready.index(stage), w_desc.block_type.nbytes)
            tma_load(w_desc, [tile * NEURONS, k], ready.index(stage), w_ring.index(stage))
        step += 1
    return step


@gluon.jit
def _send_first(w_desc, x_desc, ring, tile, span, early, RESIDENT: gl.constexpr):
    """The first tile of weight rows, with x. Early, the ring fills with weights while the kernel that makes x
    may still run. Returns the next step."""
    x_ring, w_ring, ready, _free = ring
    NEURONS: gl.constexpr = w_desc.block_shape[0]
    DEPTH: gl.constexpr = x_desc.block_shape[1]
    EARLY: gl.constexpr = min(w_ring.shape[0], x_ring.shape[0])
    if early == 0:
        gdc_wait()
    for step in gl.static_range(EARLY):
        if step * DEPTH < span:
            mbarrier.expect(ready.index(step), x_desc.block_type.nbytes + w_desc.block_type.nbytes)
            tma_load(w_desc, [tile * NEURONS, step * DEPTH], ready.index(step), w_ring.index(step))
    gdc_wait()
    for step in gl.static_range(EARLY):
        if step * DEPTH < span:
            tma_load(x_desc, [0, step * DEPTH], ready.index(step), x_ring.index(step))
    sent = gl.minimum(EARLY, gl.cdiv(span, DEPTH))
    return _send(w_desc, x_desc, ring, tile, sent, EARLY * DEPTH, span, True, RESIDENT)


@gluon.jit
def _produce(
    weights,
    x_desc,
    counts,
    ring,
    decided,
    H,
    span,
    early,
    GATED: gl.constexpr,
    GATHERED: gl.constexpr,
    RESIDENT: gl.constexpr,
):
    select_desc, up_desc, _up, _select_bias, _up_bias, _x = weights
    NEURONS: gl.constexpr = select_desc.block_shape[0]
    step = 0
    for tile in range(gl.program_id(0), gl.cdiv(H, NEURONS), gl.num_programs(0)):
        turn = tile // gl.num_programs(0)
        if turn == 0:
            step = _send_first(select_desc, x_desc, ring, tile, span, early, RESIDENT)
        else:
            step = _send(select_desc, x_desc, ring, tile, step, 0, span, not RESIDENT, RESIDENT)
        if GATED:
            mbarrier.wait(decided, turn & 1)
            if gl.load(counts + tile) > GATHERED:
                step = _send(up_desc, x_desc, ring, tile, step, 0, span, not RESIDENT, RESIDENT)


@gluon.jit
def _receive(ring, step, span, ACC: gl.constexpr, RESIDENT: gl.constexpr):
    """float32 [NEURONS, ROWS] of one tile of weights times x, and the next step."""
    x_ring, w_ring, _ready, _free = ring
    NEURONS: gl.constexpr = w_ring.shape[1]
    ROWS: gl.constexpr = x_ring.shape[1]
    DEPTH: gl.constexpr = x_ring.shape[2]
    acc = gl.zeros([NEURONS, ROWS], gl.float32, ACC)
    for k in range(0, span, DEPTH):
        stage = arrived(ring, step, False)
        place = k // DEPTH if RESIDENT else stage
        tokens = x_ring.index(place).permute((1, 0))
        acc = add_product(acc, w_ring.index(stage), tokens, ring, step, k > 0)
        step += 1
    return finish(acc, ring, step, True), step


@gluon.jit
def _consume(
    weights,
    target,
    ring,
    decided,
    sizes,
    threshold,
    HAS_SELECT_BIAS: gl.constexpr,
    HAS_UP_BIAS: gl.constexpr,
    GATED: gl.constexpr,
    SQUARE: gl.constexpr,
    CLAMP_UP: gl.constexpr,
    GATHERED: gl.constexpr,
    RESIDENT: gl.constexpr,
):
    _select_desc, _up_desc, _up, select_bias, up_bias, _x = weights
    values, neurons, counts = target
    M, H, _D, span = sizes
    x_ring, w_ring, _ready, _free = ring
    DTYPE: gl.constexpr = values.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    NEURONS: gl.constexpr = w_ring.shape[1]
    ROWS: gl.constexpr = x_ring.shape[1]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, ROWS * 4 // WARPS, 16])
    # Every warp holds all neurons of the tile, a lane two of them: ranks need no exchange between warps.
    FLAT: gl.constexpr = gl.BlockedLayout([NEURONS // 32], [32], [WARPS], [0])
    across = gl.arange(0, NEURONS, gl.SliceLayout(1, ACC))
    token = gl.arange(0, ROWS, gl.SliceLayout(0, ACC))
    tiles = gl.cdiv(H, NEURONS)
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first = tile * NEURONS
        pre, step = _receive(ring, step, span, ACC, RESIDENT)
        if HAS_SELECT_BIAS:
            shift = gl.load(select_bias + first + across, mask=first + across < H, other=0.0)
            pre += shift.to(gl.float32)[:, None]
        value = activate(pre.to(DTYPE).to(gl.float32), threshold, SQUARE).to(DTYPE).to(gl.float32)
        value = gl.where((token < M)[None, :], value, 0.0)
        live = gl.convert_layout(gl.reduce((value != 0.0).to(gl.int32), 1, _or), FLAT)
        neuron = first + gl.arange(0, NEURONS, FLAT)
        live = gl.where(neuron < H, live, 0)
        rank = gl.associative_scan(live, 0, add)
        count = gl.sum(live, 0)
        gl.store(counts + tile, count)
        slot = gl.where(live > 0, rank - 1, -1)
        gl.store(neurons + _cell(slot, tile, tiles, 1), neuron, mask=slot >= 0)
        if GATED:
            thread_barrier()  # the producer reads the count
            mbarrier.arrive(decided, count=1)
            if count > GATHERED:
                factor, step = _receive(ring, step, span, ACC, RESIDENT)
                if HAS_UP_BIAS:
                    shift = gl.load(up_bias + first + across, mask=first + across < H, other=0.0)
                    factor += shift.to(gl.float32)[:, None]
                factor = factor_of(factor.to(DTYPE).to(gl.float32), CLAMP_UP)
                value = gl.where(value == 0.0, 0.0, value * factor)
        if count > 0:
            place = gl.convert_layout(slot, gl.SliceLayout(1, ACC))
            cell = values + _cell(place, tile, tiles, ROWS)[:, None] + token[None, :] * 8
            gl.store(cell, value.to(DTYPE), mask=(place >= 0)[:, None] & (token < M)[None, :])
            if GATED and GATHERED > 0:  # noqa: SIM102 - decided by the compiler, the next when it runs
                if count <= GATHERED:
                    found = (slot, neuron, tile, tiles, count)
                    _gather_up(
                        weights, target, x_ring, found, sizes, HAS_UP_BIAS, CLAMP_UP, GATHERED, RESIDENT
                    )


@gluon.jit
def _listed(slot, neuron, GATHERED: gl.constexpr):
    """int32 [GATHERED]: the neurons of slots 0, 1, ... from each neuron's slot, by comparing all with all.

    A list in memory would take a store, a barrier and a load before the first row could be asked for.
    """
    WARPS: gl.constexpr = gl.num_warps()
    ALL: gl.constexpr = gl.BlockedLayout([slot.shape[0] // 32, GATHERED], [32, 1], [WARPS, 1], [1, 0])
    slot = gl.convert_layout(slot, gl.SliceLayout(1, ALL))[:, None]
    neuron = gl.convert_layout(neuron, gl.SliceLayout(1, ALL))[:, None]
    entry = gl.arange(0, GATHERED, gl.SliceLayout(0, ALL))[None, :]
    return gl.sum(gl.where(slot == entry, neuron, 0), 0)


@gluon.jit
def _gather_up(
    weights,
    target,
    x_ring,
    found,
    sizes,
    HAS_BIAS: gl.constexpr,
    CLAMP_UP: gl.constexpr,
    GATHERED: gl.constexpr,
    RESIDENT: gl.constexpr,
):
    """Gates in `values` become hidden activations of at most GATHERED neurons; warps split the depth."""
    _select_desc, _up_desc, up, _select_bias, bias, x = weights
    values, _neurons, _counts = target
    slots, neurons, tile, tiles, count = found
    M, _H, D, _span = sizes
    DTYPE: gl.constexpr = values.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = x_ring.shape[1]
    DEPTH: gl.constexpr = 64  # the width of TMA's swizzle
    STEP: gl.constexpr = WARPS * DEPTH
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    SUM: gl.constexpr = gl.SliceLayout(0, summed_layout(WARPS, GATHERED))
    # 8 neighbours in depth for each lane: both operands permute depth alike, and weights load 16 bytes.
    X: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    W: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, W)))[:, None, None]
    depth = warp * DEPTH + gl.arange(0, DEPTH, gl.SliceLayout(0, gl.SliceLayout(2, W)))[None, :, None]
    listed = _listed(slots, neurons, GATHERED)
    neuron = gl.convert_layout(listed, gl.SliceLayout(0, gl.SliceLayout(1, W)))
    wanted = (gl.arange(0, GATHERED, gl.SliceLayout(0, gl.SliceLayout(1, W))) < count)[None, None, :]
    source = up + (neuron * D)[None, None, :] + depth
    entry = gl.arange(0, GATHERED, gl.SliceLayout(0, SUM))
    token = gl.arange(0, ROWS, gl.SliceLayout(1, SUM))
    cell = values + _cell(entry, tile, tiles, ROWS)[None, :] + token[:, None] * 8
    inside = (entry < count)[None, :] & (token < M)[:, None]
    acc = gl.zeros([WARPS, ROWS, GATHERED], gl.float32, MMA)
    if RESIDENT:
        # All rows are asked for before any is used.
        PIECES: gl.constexpr = x_ring.shape[0] * x_ring.shape[2] // STEP
        rows = ()
        for piece in gl.static_range(PIECES):
            at = piece * STEP
            rows = rows + (gl.load(source + at, mask=wanted & (at + depth < D), other=0.0),)
        thread_barrier()  # gates are read by other threads than wrote them
        gate = gl.load(cell, mask=inside, other=0.0).to(gl.float32)
        # TMA's swizzle, said in a way that lets every warp load its own step of depth.
        SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
        x_all = reinterpret(x_ring, x_ring.dtype, [PIECES, WARPS, ROWS, DEPTH], SWIZZLED)
        for piece in gl.static_range(PIECES):
            acc = mma_v2(x_all.index(piece).load(X), rows[piece], acc)
    else:
        AHEAD: gl.constexpr = 4  # steps whose rows are asked for before any is used
        x_warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, X)))[:, None, None]
        x_token = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, X)))[None, :, None]
        x_depth = gl.arange(0, DEPTH, gl.SliceLayout(0, gl.SliceLayout(1, X)))[None, None, :]
        x_depth = x_warp * DEPTH + x_depth
        thread_barrier()
        for k in range(0, D, AHEAD * STEP):
            rows = ()
            for piece in gl.static_range(AHEAD):
                at = k + piece * STEP
                rows = rows + (gl.load(source + at, mask=wanted & (at + depth < D), other=0.0),)
            for piece in gl.static_range(AHEAD):
                at = k + piece * STEP
                known = (x_token < M) & (at + x_depth < D)
                acc = mma_v2(gl.load(x + x_token * D + at + x_depth, mask=known, other=0.0), rows[piece], acc)
        gate = gl.load(cell, mask=inside, other=0.0).to(gl.float32)
    factor = sum_over_warps(acc)
    if HAS_BIAS:
        which = gl.convert_layout(listed, gl.SliceLayout(0, SUM))
        factor += gl.load(bias + which, mask=entry < count, other=0.0).to(gl.float32)[None, :]
    factor = factor_of(factor.to(DTYPE).to(gl.float32), CLAMP_UP)
    hidden = gl.where(gate == 0.0, 0.0, gate * factor)
    gl.store(cell, hidden.to(DTYPE), mask=inside)


# One compiled kernel for any number of tokens: a CUDA graph capture must not meet a new one.
@gluon.jit(do_not_specialize=["M", "early"])
def decode_select_up_hopper(
    x,
    x_desc,
    select_desc,
    up_desc,
    up,
    select_bias,
    up_bias,
    values,
    neurons,
    counts,
    M,
    H,
    D,
    threshold,
    early,
    HAS_SELECT_BIAS: gl.constexpr,
    HAS_UP_BIAS: gl.constexpr,
    GATED: gl.constexpr,
    SQUARE: gl.constexpr,
    CLAMP_UP: gl.constexpr,
    X_TILES: gl.constexpr,
    GATHERED: gl.constexpr,
    STAGES: gl.constexpr,
    RESIDENT: gl.constexpr,
):
    """counts, neurons, values of `launch_decode` from x [M, D] and up [H, D]; M at most the rows of x_desc.

    early: whether the kernel in front writes none of the weights (1), or may (0).
    GATHERED: up to how many active neurons of a tile are gathered: 0, 8 or 16.
    RESIDENT: whether all of x stays in shared memory: X_TILES steps of depth that cover D, so many that warps
              share them out evenly. Else x passes by with the weights and X_TILES is STAGES.
    """
    gdc_launch_dependents()
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [X_TILES] + x_desc.block_shape, x_desc.layout)
    w_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + select_desc.block_shape, select_desc.layout)
    decided = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(decided, count=1)
    ring = make_ring(x_ring, w_ring, 1, False)
    RESIDENT_SPAN: gl.constexpr = X_TILES * x_desc.block_shape[1]
    span = D
    if RESIDENT:
        span = gl.to_tensor(RESIDENT_SPAN)
    target = (values, neurons, counts)
    weights = (select_desc, up_desc, up, select_bias, up_bias, x)
    sizes = (M, H, D, span)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    weights,
                    target,
                    ring,
                    decided,
                    sizes,
                    threshold,
                    HAS_SELECT_BIAS,
                    HAS_UP_BIAS,
                    GATED,
                    SQUARE,
                    CLAMP_UP,
                    GATHERED,
                    RESIDENT,
                ),
            ),
            (_produce, (weights, x_desc, counts, ring, decided, H, span, early, GATED, GATHERED, RESIDENT)),
        ],
        [1],
        [40],
    )
