"""The gathered up projection for compute capability 9.0, in Gluon.

The producer is a warpgroup: x comes by TMA, the weight rows of listed neurons by 16-byte asynchronous
copies (Hopper's TMA gathers no rows), both arriving at the same barrier. Each consumer warpgroup owns
half of a work item's neurons and skips the product when its half is empty.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_select import stored_layout


@gluon.jit
def _load(
    x_desc,
    w,
    queue,
    rings,
    H,
    D,
    chunks_per_block,
    STAGES: gl.constexpr,
):
    lists, counts, work, counter = queue
    x_ring, w_ring, ready, free = rings
    CHUNK: gl.constexpr = w_ring.shape[1]
    ROWS: gl.constexpr = x_desc.block_shape[0]
    DEPTH: gl.constexpr = x_desc.block_shape[1]
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    entry = gl.arange(0, CHUNK, gl.SliceLayout(1, COPY))
    depth = gl.arange(0, DEPTH, gl.SliceLayout(0, COPY))
    step = 0
    for item in range(gl.program_id(0), gl.load(counter), gl.num_programs(0)):
        packed = gl.load(work + item)
        block = packed // chunks_per_block
        first = (packed % chunks_per_block) * CHUNK
        listed = first + entry < gl.load(counts + block)
        neuron = gl.load(lists + block * H + first + entry, mask=listed, other=0)
        source = w + (neuron * D)[:, None] + depth[None, :]
        inside = listed[:, None] & (depth < DEPTH)[None, :]
        for k in range(0, D, DEPTH):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(stage), x_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                x_desc, [block * ROWS, k], ready.index(stage), x_ring.index(stage)
            )
            async_copy.async_copy_global_to_shared(
                w_ring.index(stage), source + k, mask=inside, eviction_policy="evict_last"
            )
            async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
            step += 1


@gluon.jit
def _multiply(
    bias,
    values,
    hidden,
    queue,
    rings,
    H,
    D,
    chunks_per_block,
    HALF: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    STAGES: gl.constexpr,
):
    lists, counts, work, counter = queue
    x_ring, w_ring, ready, free = rings
    DTYPE: gl.constexpr = values.dtype.element_ty
    padded = chunks_per_block * w_ring.shape[1]
    NEURONS: gl.constexpr = w_ring.shape[1] // 2
    ROWS: gl.constexpr = x_ring.shape[1]
    DEPTH: gl.constexpr = x_ring.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OUT: gl.constexpr = stored_layout(NEURONS, ROWS)
    token = gl.arange(0, ROWS, gl.SliceLayout(0, OUT))
    entry = gl.arange(0, NEURONS, gl.SliceLayout(1, OUT))
    step = 0
    for item in range(gl.program_id(0), gl.load(counter), gl.num_programs(0)):
        packed = gl.load(work + item)
        block = packed // chunks_per_block
        first = (packed % chunks_per_block) * 2 * NEURONS + HALF * NEURONS
        count = gl.load(counts + block)
        if first < count:
            acc = gl.zeros([NEURONS, ROWS], gl.float32, ACC)
            for k in range(0, D, DEPTH):
                stage = step % STAGES
                mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
                fence_async_shared()  # the copies are ordinary writes; the product reads through another proxy
                weights = w_ring.index(stage).slice(HALF * NEURONS, NEURONS)
                acc = warpgroup_mma(
                    weights, x_ring.index(stage).permute((1, 0)), acc, use_acc=k > 0, is_async=True
                )
                acc = warpgroup_mma_wait(1, deps=[acc])
                mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
                step += 1
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1)

            listed = first + entry < count
            neuron = gl.load(lists + block * H + first + entry, mask=listed, other=0)
            cell = values + block.to(gl.int64) * H * ROWS + (neuron * ROWS)[:, None] + token[None, :]
            kept = listed[:, None] & (token < ROWS)[None, :]
            gate = gl.load(cell, mask=kept, other=0.0, eviction_policy="evict_first").to(gl.float32)
            if HAS_BIAS:
                acc_entry = gl.arange(0, NEURONS, gl.SliceLayout(1, ACC))
                real = first + acc_entry < count
                n = gl.load(lists + block * H + first + acc_entry, mask=real, other=0)
                acc += gl.load(bias + n, mask=real, other=0.0).to(gl.float32)[:, None]
            up = gl.convert_layout(acc.to(DTYPE), OUT).to(gl.float32)
            product = gl.where(gate == 0.0, 0.0, gate * up).to(DTYPE)
            row = hidden + (block.to(gl.int64) * padded + first) * ROWS + (entry * ROWS)[:, None]
            gl.store(row + token[None, :], product)  # zeros past the list: the down product reads whole steps
        else:
            for k in range(0, D, DEPTH):
                stage = step % STAGES
                mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
                mbarrier.arrive(free.index(stage), count=1)
                step += 1


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
    """As `up_blocks`; D a multiple of DEPTH; 4 warps."""
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_desc.block_shape, x_desc.layout)
    w_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, CHUNK, x_desc.block_shape[1]], W_LAYOUT)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1 + 128)  # the TMA's arrival and one per copying thread
        mbarrier.init(free.index(stage), count=2)
    queue = (lists, counts, work, counter)
    rings = (x_ring, w_ring, ready, free)
    gl.warp_specialize(
        [
            (_multiply, (bias, values, hidden, queue, rings, H, D, chunks_per_block, 0, HAS_BIAS, STAGES)),
            (_multiply, (bias, values, hidden, queue, rings, H, D, chunks_per_block, 1, HAS_BIAS, STAGES)),
            (_load, (x_desc, w, queue, rings, H, D, chunks_per_block, STAGES)),
        ],
        [4, 4],
        [208, 80],
    )
