"""The gathered up projection for compute capability 9.0, in Gluon.

Four warpgroups:

    producer    x by TMA, the weight rows of listed neurons by 16-byte asynchronous copies (Hopper's TMA gathers
                no rows), both arriving at the same barrier
    consumers   two, each with half of a work item's neurons; hand their sums over in shared memory
    finisher    loads the gates, multiplies, stores, while the consumers are at the next item

Finding out what an item is takes three dependent loads (item, count, list). Everyone looks one item ahead, so
that nobody waits for them.
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
    x_ring, w_ring, ready, free = rings
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
    bias,
    counts_of,
    rings,
    handover,
    H,
    D,
    chunks_per_block,
    HALF: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    STAGES: gl.constexpr,
):
    queue, total = counts_of
    x_ring, w_ring, ready, free = rings
    u_tile, u_ready, u_free = handover
    CHUNK: gl.constexpr = w_ring.shape[1]
    NEURONS: gl.constexpr = CHUNK // 2
    ROWS: gl.constexpr = x_ring.shape[1]
    DEPTH: gl.constexpr = x_ring.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    stride = gl.num_programs(0)
    step = 0
    done = 0
    if gl.program_id(0) < total:
        packed = _item(queue, gl.program_id(0), total)
        coming = _item(queue, gl.program_id(0) + stride, total)
        count = gl.load(queue[1] + packed // chunks_per_block)
        for item in range(gl.program_id(0), total, stride):
            first = (packed % chunks_per_block) * CHUNK + HALF * NEURONS
            some = first < count
            if HAS_BIAS:
                entry = first + gl.arange(0, NEURONS, gl.SliceLayout(1, ACC))
                listed = entry < count
                neuron = gl.load(queue[0] + (packed // chunks_per_block) * H + entry, mask=listed, other=0)
                shift = gl.load(bias + neuron, mask=listed, other=0.0).to(gl.float32)
            packed = coming
            count = gl.load(queue[1] + packed // chunks_per_block)
            coming = _item(queue, item + 2 * stride, total)
            if some:
                acc = gl.zeros([NEURONS, ROWS], gl.float32, ACC)
                for k in range(0, D, DEPTH):
                    stage = step % STAGES
                    mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
                    # The copies are ordinary writes; the product reads shared memory by another proxy.
                    fence_async_shared()
                    weights = w_ring.index(stage).slice(HALF * NEURONS, NEURONS)
                    acc = warpgroup_mma(
                        weights, x_ring.index(stage).permute((1, 0)), acc, use_acc=k > 0, is_async=True
                    )
                    acc = warpgroup_mma_wait(1, deps=[acc])
                    mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
                    step += 1
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1)
                if HAS_BIAS:
                    acc += shift[:, None]
                mbarrier.wait(u_free.index(HALF), (done & 1) ^ 1)
                u_tile.index(HALF).store(acc.to(u_tile.dtype))
                mbarrier.arrive(u_ready.index(HALF), count=1)
                done += 1
            else:
                for _k in range(0, D, DEPTH):
                    stage = step % STAGES
                    mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
                    mbarrier.arrive(free.index(stage), count=1)
                    step += 1


@gluon.jit
def _finish(target, counts_of, handover, H, chunks_per_block, CHUNK: gl.constexpr):
    queue, total = counts_of
    PIECE: gl.constexpr = CHUNK // 4  # a quarter of an item at a time fits the registers
    ROWS: gl.constexpr = handover[0].shape[2]
    OUT: gl.constexpr = stored_layout(PIECE, ROWS)
    entry = gl.arange(0, PIECE, gl.SliceLayout(1, OUT))
    stride = gl.num_programs(0)
    left = 0
    right = 0
    if gl.program_id(0) < total:
        packed = _item(queue, gl.program_id(0), total)
        coming = _item(queue, gl.program_id(0) + stride, total)
        count, n0 = _look_up(queue, packed, entry, H, chunks_per_block, CHUNK)
        count, n1 = _look_up(queue, packed, PIECE + entry, H, chunks_per_block, CHUNK)
        count, n2 = _look_up(queue, packed, 2 * PIECE + entry, H, chunks_per_block, CHUNK)
        count, n3 = _look_up(queue, packed, 3 * PIECE + entry, H, chunks_per_block, CHUNK)
        for item in range(gl.program_id(0), total, stride):
            place = (packed // chunks_per_block, (packed % chunks_per_block) * CHUNK, count)
            _finish_piece(target, handover, place, n0, left, H, chunks_per_block, 0)
            _finish_piece(target, handover, place, n1, left, H, chunks_per_block, 1)
            left += 1
            if place[1] + 2 * PIECE < count:
                _finish_piece(target, handover, place, n2, right, H, chunks_per_block, 2)
                _finish_piece(target, handover, place, n3, right, H, chunks_per_block, 3)
                right += 1
            packed = coming
            count, n0 = _look_up(queue, packed, entry, H, chunks_per_block, CHUNK)
            count, n1 = _look_up(queue, packed, PIECE + entry, H, chunks_per_block, CHUNK)
            count, n2 = _look_up(queue, packed, 2 * PIECE + entry, H, chunks_per_block, CHUNK)
            count, n3 = _look_up(queue, packed, 3 * PIECE + entry, H, chunks_per_block, CHUNK)
            coming = _item(queue, item + 2 * stride, total)


@gluon.jit
def _finish_piece(
    target,
    handover,
    place,
    neuron,
    done,
    H,
    chunks_per_block,
    INDEX: gl.constexpr,
):
    """hidden rows of one quarter of an item, half of what a consumer hands over."""
    values, hidden = target
    u_tile, u_ready, u_free = handover
    block, first, count = place
    DTYPE: gl.constexpr = values.dtype.element_ty
    HALF: gl.constexpr = INDEX // 2
    PIECE: gl.constexpr = u_tile.shape[1] // 2
    ROWS: gl.constexpr = u_tile.shape[2]
    OUT: gl.constexpr = stored_layout(PIECE, ROWS)
    token = gl.arange(0, ROWS, gl.SliceLayout(0, OUT))
    entry = gl.arange(0, PIECE, gl.SliceLayout(1, OUT))
    start = first + INDEX * PIECE
    listed = start + entry < count
    cell = values + block.to(gl.int64) * H * ROWS + (neuron * ROWS)[:, None] + token[None, :]
    gate = gl.load(cell, mask=listed[:, None] & (token < ROWS)[None, :], other=0.0).to(gl.float32)
    mbarrier.wait(u_ready.index(HALF), done & 1)
    up = u_tile.index(HALF).slice((INDEX % 2) * PIECE, PIECE).load(OUT)
    if INDEX % 2 == 1:
        mbarrier.arrive(u_free.index(HALF), count=1)
    product = gl.where(gate == 0.0, 0.0, gate * up.to(gl.float32)).to(DTYPE)
    # Rows past the list are zero: the down product reads whole steps.
    row = hidden + (block.to(gl.int64) * chunks_per_block * 4 * PIECE + start) * ROWS
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
    U_LAYOUT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """As `up_blocks`; D a multiple of DEPTH; lists readable CHUNK entries past their end; 4 warps."""
    ROWS: gl.constexpr = x_desc.block_shape[0]
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_desc.block_shape, x_desc.layout)
    w_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, CHUNK, x_desc.block_shape[1]], W_LAYOUT)
    u_tile = gl.allocate_shared_memory(x_desc.dtype, [2, CHUNK // 2, ROWS], U_LAYOUT)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    u_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    u_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1 + 128)  # the TMA's arrival and one per copying thread
        mbarrier.init(free.index(stage), count=2)
    for half in gl.static_range(2):
        mbarrier.init(u_ready.index(half), count=1)
        mbarrier.init(u_free.index(half), count=1)
    queue = (lists, counts, work, counter)
    rings = (x_ring, w_ring, ready, free)
    handover = (u_tile, u_ready, u_free)
    target = (values, hidden)
    counts_of = (queue, gl.load(counter))
    gl.warp_specialize(
        [
            (_multiply, (bias, counts_of, rings, handover, H, D, chunks_per_block, 0, HAS_BIAS, STAGES)),
            (_multiply, (bias, counts_of, rings, handover, H, D, chunks_per_block, 1, HAS_BIAS, STAGES)),
            (_load, (x_desc, w, queue, rings, H, D, chunks_per_block, STAGES)),
            (_finish, (target, counts_of, handover, H, chunks_per_block, CHUNK)),
        ],
        [4, 4, 4],
        [160, 72, 120],
    )
