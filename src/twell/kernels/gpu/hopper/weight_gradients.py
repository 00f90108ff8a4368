"""`frequent_weights` for compute capability 9.0, in Gluon; persistent.

The producer warpgroup brings x or grad_y by TMA and gathers the neurons' rows of the pool, zeros for neurons
that a block does not have; it looks up the next block's rows while it loads this one's. Two consumer
warpgroups own half of a tile's neurons each.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .common import add_product, arrived, copy_layout, fill, finish, make_ring, stored_layout

FREQUENT_DEPTH = 64  # tokens of one step
FREQUENT_WIDTH = 256  # columns of a tile
FREQUENT_STAGES = 4  # what fits


@gluon.jit
def _send(ring, desc, source, inside, row, column, step):
    """Two steps: the tokens of one block. Returns the next step."""
    DEPTH: gl.constexpr = desc.block_shape[0]
    for half in gl.static_range(2):
        corner = [row + half * DEPTH, column]
        step = fill(ring, desc, corner, source + half * DEPTH, inside, step)
    return step


@gluon.jit
def _load(x_desc, grad_desc, pool, places, frequent, how_many, ring, sizes, MATRICES: gl.constexpr):
    sides, values, _ready, _free = ring
    blocks, H, rows, across, planes = sizes
    NEURONS: gl.constexpr = values.shape[1]
    DEPTH: gl.constexpr = values.shape[2]
    ROWS: gl.constexpr = 2 * DEPTH
    WIDTH: gl.constexpr = sides.shape[2]
    COPY: gl.constexpr = copy_layout(DEPTH)
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
                step = _send(ring, grad_desc, source, inside, block * ROWS, column, step)
            else:
                step = _send(ring, x_desc, source, inside, block * ROWS, column, step)


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
    ring,
    sizes,
    D,
    E,
    HALF: gl.constexpr,
    MATRICES: gl.constexpr,
    ADD: gl.constexpr,
):
    sides, values, _ready, _free = ring
    blocks, _H, _rows, across, planes = sizes
    NEURONS: gl.constexpr = values.shape[1] // 2
    WIDTH: gl.constexpr = sides.shape[2]
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
            stage = arrived(ring, step, True)
            half = values.index(stage).slice(HALF * NEURONS, NEURONS)
            acc = add_product(acc, half, sides.index(stage), ring, step, k > 0)
            step += 1
        acc = finish(acc, ring, step, True)
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
    sides = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_desc.block_shape, x_desc.layout)
    values = gl.allocate_shared_memory(x_desc.dtype, [STAGES, NEURONS, DEPTH], V_LAYOUT)
    ring = make_ring(sides, values, 2, True)
    sizes = (blocks, H, rows, gl.cdiv(gl.maximum(D, E), WIDTH), planes)
    targets = (grad_select, grad_down, grad_up)
    gl.warp_specialize(
        [
            (_multiply, (targets, frequent, how_many, ring, sizes, D, E, 0, MATRICES, ADD)),
            (_multiply, (targets, frequent, how_many, ring, sizes, D, E, 1, MATRICES, ADD)),
            (_load, (x_desc, grad_desc, pool, places, frequent, how_many, ring, sizes, MATRICES)),
        ],
        [4, 4],
        [216, 72],
    )
