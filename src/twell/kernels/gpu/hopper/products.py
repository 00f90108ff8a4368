"""Products of tokens with gathered weight rows for compute capability 9.0, in Gluon: the up projection, and
what the backward pass computes again.

The producer is a warpgroup: tokens come by TMA, the weight rows of listed neurons by asynchronous copies.
Two consumer warpgroups take products in turn from one ring: while one finishes (gates, stores) the other
multiplies.

Finding out what a product is takes dependent loads (item, count, list). Everyone looks one item ahead, so
that nobody waits for them, and the up projection loads an item's gates before its product starts.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .common import add_product, arrived, copy_layout, factor_of, fill, finish, make_ring, stored_layout

PRODUCTS_DEPTH = 64  # features of one step
PRODUCTS_STAGES = 6  # what fits
UP_CHUNK = 128  # listed neurons of a work item of the up projection; the backward's are in `tiles`


@gluon.jit
def _make_rings(x_desc, CHUNK: gl.constexpr, W_LAYOUT: gl.constexpr, STAGES: gl.constexpr):
    """A ring of tokens and gathered weights, and whose turn it is."""
    tokens = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_desc.block_shape, x_desc.layout)
    weights = gl.allocate_shared_memory(x_desc.dtype, [STAGES, CHUNK, x_desc.block_shape[1]], W_LAYOUT)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for turn in gl.static_range(2):
        mbarrier.init(turns.index(turn), count=1)
    return make_ring(tokens, weights, 1, True), turns


@gluon.jit
def _send(ring, desc, block, source, inside, width, step):
    """The operands of one product: the tokens of a block, weight rows of `width`. Returns the next step."""
    ROWS: gl.constexpr = desc.block_shape[0]
    DEPTH: gl.constexpr = desc.block_shape[1]
    for k in range(0, width, DEPTH):
        step = fill(ring, desc, [block * ROWS, k], source + k, inside, step)
    return step


@gluon.jit
def _receive(ring, turns, width, step, done, TURN: gl.constexpr):
    """float32 [CHUNK, ROWS], the product that begins at `step`, when its turn has come; and the next step.

    done: products of this warpgroup so far.
    """
    tokens, weights, _ready, _free = ring
    CHUNK: gl.constexpr = weights.shape[1]
    ROWS: gl.constexpr = tokens.shape[1]
    DEPTH: gl.constexpr = tokens.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    mbarrier.wait(turns.index(TURN), (done & 1) ^ (1 - TURN))
    acc = gl.zeros([CHUNK, ROWS], gl.float32, ACC)
    for k in range(0, width, DEPTH):
        stage = arrived(ring, step, True)
        acc = add_product(acc, weights.index(stage), tokens.index(stage).permute((1, 0)), ring, step, k > 0)
        step += 1
    mbarrier.arrive(turns.index(1 - TURN), count=1)
    return finish(acc, ring, step, True), step


@gluon.jit
def _item(queue, position, total):
    """The packed item at `position`, or the last one where the queue has ended."""
    return gl.load(queue[2] + gl.minimum(position, total - 1))


@gluon.jit
def _look_up(queue, packed, entry, H, chunks_per_block, CHUNK: gl.constexpr):
    """(neurons listed, neuron of each entry). Entries past the list hold anything: mask before use."""
    lists, counts, _work, _counter = queue
    block = packed // chunks_per_block
    first = (packed % chunks_per_block) * CHUNK
    return gl.load(counts + block), gl.load(lists + block * H + first + entry)


@gluon.jit
def _load_up(x_desc, w, queue, ring, H, D, chunks_per_block):
    CHUNK: gl.constexpr = ring[1].shape[1]
    DEPTH: gl.constexpr = ring[1].shape[2]
    COPY: gl.constexpr = copy_layout(DEPTH)
    entry = gl.arange(0, CHUNK, gl.SliceLayout(1, COPY))
    depth = gl.arange(0, DEPTH, gl.SliceLayout(0, COPY))
    total = gl.load(queue[3])
    stride = gl.num_programs(0)
    step = 0
    if gl.program_id(0) < total:
        packed = _item(queue, gl.program_id(0), total)
        coming = _item(queue, gl.program_id(0) + stride, total)
        count, neuron = _look_up(queue, packed, entry, H, chunks_per_block, CHUNK)
        for item in range(gl.program_id(0), total, stride):
            block = packed // chunks_per_block
            first = (packed % chunks_per_block) * CHUNK
            inside = (first + entry < count)[:, None] & (depth < DEPTH)[None, :]
            source = w + (neuron * D)[:, None] + depth[None, :]
            packed = coming
            count, neuron = _look_up(queue, packed, entry, H, chunks_per_block, CHUNK)
            coming = _item(queue, item + 2 * stride, total)
            step = _send(ring, x_desc, block, source, inside, D, step)


@gluon.jit
def _multiply_up(
    target,
    queue,
    ring,
    turns,
    H,
    D,
    chunks_per_block,
    TURN: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    CLAMP_UP: gl.constexpr,
):
    """Items number TURN, TURN + 2, ... of this program."""
    bias, values, hidden = target
    DTYPE: gl.constexpr = values.dtype.element_ty
    NEURONS: gl.constexpr = ring[1].shape[1]
    ROWS: gl.constexpr = ring[0].shape[1]
    DEPTH: gl.constexpr = ring[0].shape[2]
    OUT: gl.constexpr = stored_layout(NEURONS, ROWS)
    token = gl.arange(0, ROWS, gl.SliceLayout(0, OUT))
    entry = gl.arange(0, NEURONS, gl.SliceLayout(1, OUT))
    total = gl.load(queue[3])
    stride = 2 * gl.num_programs(0)
    start = gl.program_id(0) + TURN * gl.num_programs(0)
    steps = gl.cdiv(D, DEPTH)
    step = TURN * steps
    done = 0
    if start < total:
        packed = _item(queue, start, total)
        coming = _item(queue, start + stride, total)
        count, neuron = _look_up(queue, packed, entry, H, chunks_per_block, NEURONS)
        for item in range(start, total, stride):
            block = packed // chunks_per_block
            first = (packed % chunks_per_block) * NEURONS
            listed = first + entry < count
            kept = listed[:, None] & (token < ROWS)[None, :]
            cell = values + block.to(gl.int64) * H * ROWS + (neuron * ROWS)[:, None] + token[None, :]
            gate = gl.load(cell, mask=kept, other=0.0)
            if HAS_BIAS:
                shift = gl.load(bias + neuron, mask=listed, other=0.0).to(gl.float32)
            packed = coming
            count, neuron = _look_up(queue, packed, entry, H, chunks_per_block, NEURONS)
            coming = _item(queue, item + 2 * stride, total)
            acc, step = _receive(ring, turns, D, step, done, TURN)
            done += 1
            step += steps  # the other's item
            if HAS_BIAS:
                acc += gl.convert_layout(shift, gl.SliceLayout(1, acc.type.layout))[:, None]
            up = gl.convert_layout(acc.to(DTYPE), OUT).to(gl.float32)
            wide = gate.to(gl.float32)
            product = gl.where(wide == 0.0, 0.0, wide * factor_of(up, CLAMP_UP)).to(DTYPE)
            # Rows past the list are zero: the down product reads whole steps.
            row = hidden + (block.to(gl.int64) * chunks_per_block * NEURONS + first) * ROWS
            gl.store(row + (entry * ROWS)[:, None] + token[None, :], product)


@gluon.jit
def up_blocks_hopper(
    x_desc,
    w,
    bias,
    values,
    hidden,
    lists,
    counts,
    work,
    counter,
    H,
    D,
    chunks_per_block,
    HAS_BIAS: gl.constexpr,
    CLAMP_UP: gl.constexpr,
    CHUNK: gl.constexpr,
    W_LAYOUT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """As `up_blocks`; D a multiple of DEPTH; lists readable CHUNK entries past their end; 4 warps."""
    ring, turns = _make_rings(x_desc, CHUNK, W_LAYOUT, STAGES)
    queue = (lists, counts, work, counter)
    target = (bias, values, hidden)
    gl.warp_specialize(
        [
            (_multiply_up, (target, queue, ring, turns, H, D, chunks_per_block, 0, HAS_BIAS, CLAMP_UP)),
            (_multiply_up, (target, queue, ring, turns, H, D, chunks_per_block, 1, HAS_BIAS, CLAMP_UP)),
            (_load_up, (x_desc, w, queue, ring, H, D, chunks_per_block)),
        ],
        [4, 4],
        [216, 72],
    )


@gluon.jit
def _unit(queue, unit, total, MATRICES: gl.constexpr):
    """(block, offset in the lists, entries) of a unit, or of the last one where the queue has ended."""
    item = queue[1] + gl.minimum(unit, total - 1) // MATRICES * 3
    return gl.load(item), gl.load(item + 1), gl.load(item + 2)


@gluon.jit
def _load_again(x_desc, grad_desc, matrices, queue, ring, D, E, MATRICES: gl.constexpr):
    select, down, up = matrices
    lists, _work, counter = queue
    CHUNK: gl.constexpr = ring[1].shape[1]
    DEPTH: gl.constexpr = ring[1].shape[2]
    COPY: gl.constexpr = copy_layout(DEPTH)
    entry = gl.arange(0, CHUNK, gl.SliceLayout(1, COPY))
    depth = gl.arange(0, DEPTH, gl.SliceLayout(0, COPY))[None, :]
    total = gl.load(counter) * MATRICES
    stride = gl.num_programs(0)
    step = 0
    if gl.program_id(0) < total:
        block, offset, entries = _unit(queue, gl.program_id(0), total, MATRICES)
        neuron = gl.load(lists + offset + entry)
        next_block, next_offset, next_entries = _unit(queue, gl.program_id(0) + stride, total, MATRICES)
        for unit in range(gl.program_id(0), total, stride):
            inside = (entry < entries)[:, None] & (depth < DEPTH)
            here, mine = block, neuron
            block, entries = next_block, next_entries
            neuron = gl.load(lists + next_offset + entry)  # past a list: anything, masked before use
            next_block, next_offset, next_entries = _unit(queue, unit + 2 * stride, total, MATRICES)
            if unit % MATRICES == 1:
                step = _send(ring, grad_desc, here, down + (mine * E)[:, None] + depth, inside, E, step)
            else:
                source = gl.where(unit % MATRICES == 0, select, up)
                step = _send(ring, x_desc, here, source + (mine * D)[:, None] + depth, inside, D, step)


@gluon.jit
def _listed(queue, unit, total, entry, MATRICES: gl.constexpr):
    """(block, which entries are listed, their neurons) of a unit."""
    block, offset, entries = _unit(queue, unit, total, MATRICES)
    listed = entry < entries
    return block, listed, gl.load(queue[0] + offset + entry, mask=listed, other=0)


@gluon.jit
def _width(unit, D, E, MATRICES: gl.constexpr):
    return gl.where(unit % MATRICES == 1, E, D)


@gluon.jit
def _multiply_again(
    target,
    biases,
    queue,
    ring,
    turns,
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
    DTYPE: gl.constexpr = pool.dtype.element_ty
    NEURONS: gl.constexpr = ring[1].shape[1]
    ROWS: gl.constexpr = ring[0].shape[1]
    DEPTH: gl.constexpr = ring[0].shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OUT: gl.constexpr = stored_layout(NEURONS, ROWS)
    token = gl.arange(0, ROWS, gl.SliceLayout(0, OUT))
    entry = gl.arange(0, NEURONS, gl.SliceLayout(1, OUT))
    across = gl.arange(0, NEURONS, gl.SliceLayout(1, ACC))
    sideways = gl.arange(0, ROWS, gl.SliceLayout(0, ACC))
    total = gl.load(queue[2]) * MATRICES
    stride = gl.num_programs(0)
    start = gl.program_id(0) + TURN * stride
    step = TURN * gl.cdiv(_width(gl.program_id(0), D, E, MATRICES), DEPTH)
    done = 0
    for unit in range(start, total, 2 * stride):
        plane = unit % MATRICES
        acc, step = _receive(ring, turns, _width(unit, D, E, MATRICES), step, done, TURN)
        done += 1
        step += gl.cdiv(_width(unit + stride, D, E, MATRICES), DEPTH)  # the other's
        if HAS_UP_BIAS:  # noqa: SIM102 - decided by the compiler, the next when it runs
            if plane == 2:
                _block, listed, neuron = _listed(queue, unit, total, across, MATRICES)
                acc += gl.load(up_bias + neuron, mask=listed, other=0.0).to(gl.float32)[:, None]
        if plane == 0:
            block, listed, neuron = _listed(queue, unit, total, across, MATRICES)
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
    ring, turns = _make_rings(x_desc, CHUNK, W_LAYOUT, STAGES)
    queue = (lists, work, counter)
    target = (pool, rows, places, M, H, threshold)
    biases = (select_bias, up_bias)
    matrices = (select, down, up)
    gl.warp_specialize(
        [
            (
                _multiply_again,
                (target, biases, queue, ring, turns, D, E, 0, HAS_SELECT_BIAS, HAS_UP_BIAS, MATRICES),
            ),
            (
                _multiply_again,
                (target, biases, queue, ring, turns, D, E, 1, HAS_SELECT_BIAS, HAS_UP_BIAS, MATRICES),
            ),
            (_load_again, (x_desc, grad_desc, matrices, queue, ring, D, E, MATRICES)),
        ],
        [4, 4],
        [216, 72],
    )
