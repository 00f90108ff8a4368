"""`gather_products` for compute capability 9.0, in Gluon; built like `hopper_up.py`.

A producer warpgroup brings x or grad_y by TMA and the weight rows of listed neurons by 16-byte asynchronous
copies; two consumer warpgroups take products in turn, so that one stores while the other multiplies.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..hopper_names import copy_rows, tma_load
from ..hopper_select import stored_layout


@gluon.jit
def _item(work, unit, total, MATRICES: gl.constexpr):
    """(block, offset in the lists, entries) of a unit, or of the last one where the queue has ended."""
    item = work + gl.minimum(unit, total - 1) // MATRICES * 3
    return gl.load(item), gl.load(item + 1), gl.load(item + 2)


@gluon.jit
def _send(desc, source, inside, block, width, step, rings):
    """One product's operands, step by step. Returns the next step."""
    x_ring, w_ring, ready, free, _turns = rings
    ROWS: gl.constexpr = desc.block_shape[0]
    DEPTH: gl.constexpr = desc.block_shape[1]
    STAGES: gl.constexpr = w_ring.shape[0]
    for k in range(0, width, DEPTH):
        stage = step % STAGES
        mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(stage), desc.block_type.nbytes)
        tma_load(desc, [block * ROWS, k], ready.index(stage), x_ring.index(stage))
        copy_rows(w_ring.index(stage), source + k, mask=inside)
        async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
        step += 1
    return step


@gluon.jit
def _load(x_desc, grad_desc, weights, lists, work, counter, rings, D, E, MATRICES: gl.constexpr):
    select, down, up = weights
    CHUNK: gl.constexpr = rings[1].shape[1]
    DEPTH: gl.constexpr = x_desc.block_shape[1]
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    entry = gl.arange(0, CHUNK, gl.SliceLayout(1, COPY))
    depth = gl.arange(0, DEPTH, gl.SliceLayout(0, COPY))[None, :]
    total = gl.load(counter) * MATRICES
    stride = gl.num_programs(0)
    step = 0
    if gl.program_id(0) < total:
        block, offset, entries = _item(work, gl.program_id(0), total, MATRICES)
        neuron = gl.load(lists + offset + entry)
        next_block, next_offset, next_entries = _item(work, gl.program_id(0) + stride, total, MATRICES)
        for unit in range(gl.program_id(0), total, stride):
            inside = (entry < entries)[:, None] & (depth < DEPTH)
            here, mine = block, neuron
            block, entries = next_block, next_entries
            neuron = gl.load(lists + next_offset + entry)  # past a list: anything, masked before use
            next_block, next_offset, next_entries = _item(work, unit + 2 * stride, total, MATRICES)
            if unit % MATRICES == 1:
                step = _send(grad_desc, down + (mine * E)[:, None] + depth, inside, here, E, step, rings)
            else:
                source = gl.where(unit % MATRICES == 0, select, up)
                step = _send(x_desc, source + (mine * D)[:, None] + depth, inside, here, D, step, rings)


@gluon.jit
def _listed(work, lists, unit, total, entry, MATRICES: gl.constexpr):
    """(block, which entries are listed, their neurons) of a unit."""
    block, offset, entries = _item(work, unit, total, MATRICES)
    listed = entry < entries
    return block, listed, gl.load(lists + offset + entry, mask=listed, other=0)


@gluon.jit
def _steps(unit, D, E, MATRICES: gl.constexpr, DEPTH: gl.constexpr):
    return gl.cdiv(gl.where(unit % MATRICES == 1, E, D), DEPTH)


@gluon.jit
def _multiply(
    target,
    biases,
    lists,
    work,
    counter,
    rings,
    D,
    E,
    TURN: gl.constexpr,
    HAS_SELECT_BIAS: gl.constexpr,
    HAS_UP_BIAS: gl.constexpr,
    MATRICES: gl.constexpr,
):
    """Units number TURN, TURN + 2, ... of this program."""
    pool, rows, places, M, H, threshold = target
    select_bias, up_bias = biases
    x_ring, w_ring, ready, free, turns = rings
    DTYPE: gl.constexpr = pool.dtype.element_ty
    STAGES: gl.constexpr = w_ring.shape[0]
    NEURONS: gl.constexpr = w_ring.shape[1]
    ROWS: gl.constexpr = x_ring.shape[1]
    DEPTH: gl.constexpr = x_ring.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OUT: gl.constexpr = stored_layout(NEURONS, ROWS)
    token = gl.arange(0, ROWS, gl.SliceLayout(0, OUT))
    entry = gl.arange(0, NEURONS, gl.SliceLayout(1, OUT))
    across = gl.arange(0, NEURONS, gl.SliceLayout(1, ACC))
    sideways = gl.arange(0, ROWS, gl.SliceLayout(0, ACC))
    total = gl.load(counter) * MATRICES
    stride = gl.num_programs(0)
    start = gl.program_id(0) + TURN * stride
    step = TURN * _steps(gl.program_id(0), D, E, MATRICES, DEPTH)
    done = 0
    for unit in range(start, total, 2 * stride):
        plane = unit % MATRICES
        width = gl.where(plane == 1, E, D)
        mbarrier.wait(turns.index(TURN), (done & 1) ^ (1 - TURN))
        done += 1
        acc = gl.zeros([NEURONS, ROWS], gl.float32, ACC)
        for k in range(0, width, DEPTH):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
            # The copies are ordinary writes; the product reads shared memory by another proxy.
            fence_async_shared()
            acc = warpgroup_mma(
                w_ring.index(stage),
                x_ring.index(stage).permute((1, 0)),
                acc,
                use_acc=k > 0,
                is_async=True,
            )
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        mbarrier.arrive(turns.index(1 - TURN), count=1)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1)
        step += _steps(unit + stride, D, E, MATRICES, DEPTH)  # the other's
        if HAS_UP_BIAS:  # noqa: SIM102 - decided by the compiler, the next when it runs
            if plane == 2:
                _block, listed, neuron = _listed(work, lists, unit, total, across, MATRICES)
                acc += gl.load(up_bias + neuron, mask=listed, other=0.0).to(gl.float32)[:, None]
        if plane == 0:
            block, listed, neuron = _listed(work, lists, unit, total, across, MATRICES)
            if HAS_SELECT_BIAS:
                acc += gl.load(select_bias + neuron, mask=listed, other=0.0).to(gl.float32)[:, None]
            active = ~(acc.to(DTYPE).to(gl.float32) <= threshold)
            active = active & (block * ROWS + sideways < M)[None, :]
            tokens = gl.sum(active.to(gl.int32), 1)
            place = ((unit // MATRICES) * NEURONS + across) * 256 + tokens
            gl.store(places + block * H + neuron, place, mask=listed & (tokens > 0))
        row = plane.to(gl.int64) * rows + (unit // MATRICES) * NEURONS
        cell = pool + row * ROWS + (entry * ROWS)[:, None] + token[None, :]
        gl.store(cell, gl.convert_layout(acc.to(DTYPE), OUT))


@gluon.jit(do_not_specialize=["M"])
def gather_products_hopper(
    x_desc,
    grad_desc,
    select,
    down,
    up,
    select_bias,
    up_bias,
    pool,
    places,
    lists,
    work,
    counter,
    M,
    H,
    D,
    E,
    rows,
    threshold,
    HAS_SELECT_BIAS: gl.constexpr,
    HAS_UP_BIAS: gl.constexpr,
    MATRICES: gl.constexpr,
    CHUNK: gl.constexpr,
    W_LAYOUT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """As `gather_products`; D and E multiples of DEPTH; lists readable CHUNK past their end; 4 warps."""
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_desc.block_shape, x_desc.layout)
    w_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, CHUNK, x_desc.block_shape[1]], W_LAYOUT)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1 + 128)  # the TMA's arrival and one per copying thread
        mbarrier.init(free.index(stage), count=1)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for turn in gl.static_range(2):
        mbarrier.init(turns.index(turn), count=1)
    rings = (x_ring, w_ring, ready, free, turns)
    target = (pool, rows, places, M, H, threshold)
    biases = (select_bias, up_bias)
    weights = (select, down, up)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    target,
                    biases,
                    lists,
                    work,
                    counter,
                    rings,
                    D,
                    E,
                    0,
                    HAS_SELECT_BIAS,
                    HAS_UP_BIAS,
                    MATRICES,
                ),
            ),
            (
                _multiply,
                (
                    target,
                    biases,
                    lists,
                    work,
                    counter,
                    rings,
                    D,
                    E,
                    1,
                    HAS_SELECT_BIAS,
                    HAS_UP_BIAS,
                    MATRICES,
                ),
            ),
            (_load, (x_desc, grad_desc, weights, lists, work, counter, rings, D, E, MATRICES)),
        ],
        [4, 4],
        [216, 72],
    )
