"""`frequent_weights` for compute capability 9.0, in Gluon; persistent.

The producer warpgroup brings x or grad_y by TMA and gathers the neurons' rows of the pool, zeros for neurons
that a block does not have; it looks up the next block's rows while it loads this one's. Two consumer
warpgroups own half of a tile's neurons each.
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
def _send(desc, source, inside, row, column, step, rings):
    """Two steps: the tokens of one block. Returns the next step."""
    v_ring, side_ring, ready, free = rings
    STAGES: gl.constexpr = v_ring.shape[0]
    DEPTH: gl.constexpr = v_ring.shape[2]
    for half in gl.static_range(2):
        stage = step % STAGES
        mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(stage), desc.block_type.nbytes)
        tma_load(desc, [row + half * DEPTH, column], ready.index(stage), side_ring.index(stage))
        copy_rows(v_ring.index(stage), source + half * DEPTH, mask=inside)
        async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
        step += 1
    return step


@gluon.jit
def _load(x_desc, grad_desc, pool, places, frequent, how_many, rings, sizes, MATRICES: gl.constexpr):
    v_ring, side_ring, _ready, _free = rings
    blocks, H, rows, across, planes = sizes
    NEURONS: gl.constexpr = v_ring.shape[1]
    DEPTH: gl.constexpr = v_ring.shape[2]
    ROWS: gl.constexpr = 2 * DEPTH
    WIDTH: gl.constexpr = side_ring.shape[2]
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    entry = gl.arange(0, NEURONS, gl.SliceLayout(1, COPY))
    depth = gl.arange(0, DEPTH, gl.SliceLayout(0, COPY))[None, :]
    total = gl.load(how_many)
    tiles = gl.cdiv(total, NEURONS)
    step = 0
    for unit in range(gl.program_id(0), MATRICES * tiles * across, gl.num_programs(0)):
        plane = _plane(planes, unit // (tiles * across))
        listed = (unit // across % tiles) * NEURONS + entry
        neuron = gl.load(frequent + listed, mask=listed < total, other=0)
        column = (unit % across) * WIDTH
        base = pool + plane.to(gl.int64) * rows * ROWS
        place = gl.load(places + neuron, mask=listed < total, other=0)
        for block in range(0, blocks):
            inside = (place > 0)[:, None] & (depth < DEPTH)
            source = base + ((place // 256).to(gl.int64) * ROWS)[:, None] + depth
            following = gl.minimum(block + 1, blocks - 1)
            place = gl.load(places + following * H + neuron, mask=listed < total, other=0)
            if plane == 0:
                step = _send(grad_desc, source, inside, block * ROWS, column, step, rings)
            else:
                step = _send(x_desc, source, inside, block * ROWS, column, step, rings)


@gluon.jit
def _plane(planes, number):
    """The plane of the pool that product `number` multiplies; planes: four bits each."""
    return (planes >> (4 * number)) & 15


@gluon.jit
def _cells(targets, plane, frequent, first, total, column, D, E, LAYOUT: gl.constexpr, SHAPE: gl.constexpr):
    """Where a tile of sums goes: (pointers, mask)."""
    grad_select, grad_down, grad_up = targets
    listed = first + gl.arange(0, SHAPE[0], gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, SHAPE[1], gl.SliceLayout(0, LAYOUT))
    neuron = gl.load(frequent + listed, mask=listed < total, other=0)
    target = gl.where(plane == 0, grad_down, gl.where(plane == 1, grad_select, grad_up))
    width = gl.where(plane == 0, E, D)
    inside = (listed < total)[:, None] & (columns < width)[None, :]
    return target + (neuron * width)[:, None] + columns[None, :], inside


@gluon.jit
def _multiply(
    targets,
    frequent,
    how_many,
    rings,
    sizes,
    D,
    E,
    HALF: gl.constexpr,
    MATRICES: gl.constexpr,
    ADD: gl.constexpr,
):
    v_ring, side_ring, ready, free = rings
    blocks, _H, _rows, across, planes = sizes
    STAGES: gl.constexpr = v_ring.shape[0]
    NEURONS: gl.constexpr = v_ring.shape[1] // 2
    WIDTH: gl.constexpr = side_ring.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    OUT: gl.constexpr = stored_layout(NEURONS, WIDTH)
    SHAPE: gl.constexpr = (NEURONS, WIDTH)
    total = gl.load(how_many)
    tiles = gl.cdiv(total, 2 * NEURONS)
    step = 0
    for unit in range(gl.program_id(0), MATRICES * tiles * across, gl.num_programs(0)):
        plane = _plane(planes, unit // (tiles * across))
        first = (unit // across % tiles) * 2 * NEURONS + HALF * NEURONS
        column = (unit % across) * WIDTH
        acc = gl.zeros([NEURONS, WIDTH], gl.float32, ACC)
        for k in range(0, 2 * blocks):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
            # The copies are ordinary writes; the product reads shared memory by another proxy.
            fence_async_shared()
            values = v_ring.index(stage).slice(HALF * NEURONS, NEURONS)
            acc = warpgroup_mma(values, side_ring.index(stage), acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1)
        if ADD:  # as the sums lie in registers: another layout would take shared memory for float32
            cell, inside = _cells(targets, plane, frequent, first, total, column, D, E, ACC, SHAPE)
            acc += gl.load(cell, mask=inside, other=0.0).to(gl.float32)
            gl.store(cell, acc.to(targets[0].dtype.element_ty), mask=inside)
        else:
            cell, inside = _cells(targets, plane, frequent, first, total, column, D, E, OUT, SHAPE)
            gl.store(cell, gl.convert_layout(acc.to(targets[0].dtype.element_ty), OUT), mask=inside)


@gluon.jit(do_not_specialize=["blocks"])
def frequent_weights_hopper(
    x_desc,
    grad_desc,
    pool,
    places,
    frequent,
    how_many,
    grad_select,
    grad_down,
    grad_up,
    blocks,
    H,
    D,
    E,
    rows,
    planes,
    MATRICES: gl.constexpr,
    NEURONS: gl.constexpr,
    V_LAYOUT: gl.constexpr,
    STAGES: gl.constexpr,
    ADD: gl.constexpr,
):
    """As `frequent_weights` on blocks of 128 tokens; x_desc, grad_desc: blocks [64, WIDTH]; 4 warps.

    planes: of the pool, four bits each, those of the MATRICES products in turn.
    """
    DEPTH: gl.constexpr = x_desc.block_shape[0]
    WIDTH: gl.constexpr = x_desc.block_shape[1]
    v_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, NEURONS, DEPTH], V_LAYOUT)
    side_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_desc.block_shape, x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1 + 128)  # the TMA's arrival and one per copying thread
        mbarrier.init(free.index(stage), count=2)
    rings = (v_ring, side_ring, ready, free)
    sizes = (blocks, H, rows, gl.cdiv(gl.maximum(D, E), WIDTH), planes)
    targets = (grad_select, grad_down, grad_up)
    gl.warp_specialize(
        [
            (_multiply, (targets, frequent, how_many, rings, sizes, D, E, 0, MATRICES, ADD)),
            (_multiply, (targets, frequent, how_many, rings, sizes, D, E, 1, MATRICES, ADD)),
            (_load, (x_desc, grad_desc, pool, places, frequent, how_many, rings, sizes, MATRICES)),
        ],
        [4, 4],
        [216, 72],
    )
