"""The gathered up projection for compute capability 9.0, in Gluon.

The producer is a warpgroup: x comes by TMA, the weight rows of listed neurons by 16-byte asynchronous
copies (Hopper's TMA gathers no rows), both arriving at the same barrier. Two consumer warpgroups take
work items in turn from one ring: while one finishes an item (gates, product, store) the other multiplies.
Nobody looks at a stage before its turn: a barrier tells only odd from even rounds of the ring.

Finding out what an item is takes three dependent loads (item, count, list). Everyone looks one item ahead,
so that nobody waits for them, and consumers load an item's gates before its product starts.
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

from .hopper_names import copy_rows, tma_load
from .hopper_select import stored_layout


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
def _load(x_desc, w, queue, rings, H, D, chunks_per_block, STAGES: gl.constexpr):
    x_ring, w_ring, ready, free, _turns = rings
    CHUNK: gl.constexpr = w_ring.shape[1]
    ROWS: gl.constexpr = x_desc.block_shape[0]
    DEPTH: gl.constexpr = x_desc.block_shape[1]
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
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
            for k in range(0, D, DEPTH):
                stage = step % STAGES
                mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(ready.index(stage), x_desc.block_type.nbytes)
                tma_load(x_desc, [block * ROWS, k], ready.index(stage), x_ring.index(stage))
                copy_rows(w_ring.index(stage), source + k, mask=inside)
                async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
                step += 1


@gluon.jit
def _multiply(
    target,
    queue,
    rings,
    H,
    D,
    chunks_per_block,
    TURN: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Items number TURN, TURN + 2, ... of this program."""
    bias, values, hidden = target
    x_ring, w_ring, ready, free, turns = rings
    DTYPE: gl.constexpr = values.dtype.element_ty
    NEURONS: gl.constexpr = w_ring.shape[1]
    ROWS: gl.constexpr = x_ring.shape[1]
    DEPTH: gl.constexpr = x_ring.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
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
            mbarrier.wait(turns.index(TURN), (done & 1) ^ (1 - TURN))
            done += 1
            acc = gl.zeros([NEURONS, ROWS], gl.float32, ACC)
            for k in range(0, D, DEPTH):
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
            step += steps  # the other's item
            if HAS_BIAS:
                acc += gl.convert_layout(shift, gl.SliceLayout(1, ACC))[:, None]
            up = gl.convert_layout(acc.to(DTYPE), OUT).to(gl.float32)
            wide = gate.to(gl.float32)
            product = gl.where(wide == 0.0, 0.0, wide * up).to(DTYPE)
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
    CHUNK: gl.constexpr,
    W_LAYOUT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """As `up_blocks`; D a multiple of DEPTH; lists readable CHUNK entries past their end; 4 warps."""
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
    queue = (lists, counts, work, counter)
    rings = (x_ring, w_ring, ready, free, turns)
    target = (bias, values, hidden)
    gl.warp_specialize(
        [
            (_multiply, (target, queue, rings, H, D, chunks_per_block, 0, HAS_BIAS, STAGES)),
            (_multiply, (target, queue, rings, H, D, chunks_per_block, 1, HAS_BIAS, STAGES)),
            (_load, (x_desc, w, queue, rings, H, D, chunks_per_block, STAGES)),
        ],
        [4, 4],
        [216, 72],
    )
