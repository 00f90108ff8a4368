"""What the kernels in Gluon share: mostly rings of shared memory between a producer and its consumers.

A ring is (tiles, weights, ready, free), each of so many stages. Tiles come by TMA, weights by TMA as well or,
where they are gathered, by 16-byte asynchronous copies: Hopper's TMA gathers no rows. What a stage waits for
arrives at its barrier in `ready`; consumers hand the stage back through `free`. Nobody looks at a stage
before its turn: a barrier tells only odd from even rounds of the ring.
"""

from __future__ import annotations

import triton.language as tl
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


@gluon.jit
def nan_max(a, b):
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def activate(pre, threshold, SQUARE: gl.constexpr):
    value = gl.where(pre <= threshold, 0.0, pre)
    if SQUARE:
        value = value * value
    return value


@gluon.jit
def factor_of(up, CLAMP_UP: gl.constexpr):
    """What multiplies the activation of the gate; a NaN stays."""
    if CLAMP_UP:
        up = gl.where(up <= 0.0, 0.0, up)
    return up


@gluon.constexpr_function
def copy_layout(columns):
    """A warpgroup that copies rows of so many 16-bit columns, 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])


@gluon.constexpr_function
def stored_layout(rows, columns):
    """Registers of a warpgroup so that 4 lanes hold 32 neighbouring values of a row, 16 bytes each.

    The accumulator's own layout gives each lane 2 neighbouring values; storing that writes half sectors.
    Rows stay where they are, so the conversion never leaves the warp.
    """
    registers = [[0, 1], [0, 2], [0, 4]]
    column = 32
    while column < columns:
        registers.append([0, column])
        column *= 2
    registers.append([8, 0])
    row = 64
    while row < rows:
        registers.append([row, 0])
        row *= 2
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, columns])


@gluon.jit
def make_ring(tiles, weights, CONSUMERS: gl.constexpr, GATHERED: gl.constexpr):
    """The ring of these shared tiles and weights, [STAGES, ...] each; all its stages are free.

    CONSUMERS: that hand a stage back. GATHERED: whether a warpgroup copies the weights.
    """
    STAGES: gl.constexpr = weights.shape[0]
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # The producer's own arrival, which tells what comes by TMA, and that of every copying thread.
        mbarrier.init(ready.index(stage), count=1 + 128 if GATHERED else 1)
        mbarrier.init(free.index(stage), count=CONSUMERS)
    return tiles, weights, ready, free


@gluon.jit
def fill(ring, desc, corner, source, inside, step):
    """The producer's: bring the tile of `desc` at `corner`, and weights. Returns the next step."""
    tiles, weights, ready, free = ring
    STAGES: gl.constexpr = weights.shape[0]
    stage = step % STAGES
    mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(stage), desc.block_type.nbytes)
    tma_load(desc, corner, ready.index(stage), tiles.index(stage))
    copy_rows(weights.index(stage), source, mask=inside)
    async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
    return step + 1


@gluon.jit
def fill_gathered(ring, tile_source, tile_inside, source, inside, step):
    """As `fill`, where the rows of the tile are gathered, too."""
    tiles, weights, ready, free = ring
    STAGES: gl.constexpr = weights.shape[0]
    stage = step % STAGES
    mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
    copy_rows(tiles.index(stage), tile_source, mask=tile_inside)
    copy_rows(weights.index(stage), source, mask=inside)
    mbarrier.arrive(ready.index(stage), count=1)
    async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
    return step + 1


@gluon.jit
def arrived(ring, step, GATHERED: gl.constexpr):
    """Wait for what a step multiplies. Returns its stage."""
    _tiles, weights, ready, _free = ring
    STAGES: gl.constexpr = weights.shape[0]
    stage = step % STAGES
    mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
    if GATHERED:  # the copies are ordinary writes; the product reads shared memory by another proxy
        fence_async_shared()
    return stage


@gluon.jit
def add_product(acc, a, b, ring, step, later):
    """acc + a b, or a b in the first step of a sum; the product goes on when this returns.

    The stage before is free then, since its product is done, if this sum has read it (`later`).
    """
    _tiles, weights, _ready, free = ring
    STAGES: gl.constexpr = weights.shape[0]
    acc = warpgroup_mma(a, b, acc, use_acc=later, is_async=True)
    acc = warpgroup_mma_wait(1, deps=[acc])
    mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=later)
    return acc


@gluon.jit
def finish(acc, ring, step, any_product):
    """Wait for the last product of a sum, and hand its stage back. step: the next one."""
    _tiles, weights, _ready, free = ring
    STAGES: gl.constexpr = weights.shape[0]
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=any_product)
    return acc


_renamed = hasattr(tma, "async_load")
tma_load = tma.async_load if _renamed else tma.async_copy_global_to_shared
tma_store = tma.async_store if _renamed else tma.async_copy_shared_to_global
copy_rows = async_copy.async_load if _renamed else async_copy.async_copy_global_to_shared
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

_memory = gl.shared_memory_descriptor
reinterpret = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret


@gluon.jit
def add(a, b):
    return a + b


@gluon.constexpr_function
def summed_layout(warps, columns):
    """[warps, rows, columns] with all partial sums of an element in one thread."""
    return gl.BlockedLayout([warps, 1, 2], [1, 64 // columns, columns // 2], [1, warps, 1], [2, 1, 0])


@gluon.jit
def sum_over_warps(partial):
    """[warps, R, C] with one partial sum in each warp -> [R, C], in `summed_layout` without its first axis.

    `gl.reduce` across warps does the same with bank conflicts that cost microseconds.
    """
    WARPS: gl.constexpr = partial.shape[0]
    C: gl.constexpr = partial.shape[2]
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, C // 8, [2, 1, 0])
    memory = gl.allocate_shared_memory(gl.float32, partial.shape, SWIZZLED)
    memory.store(partial)
    return gl.reduce(memory.load(summed_layout(WARPS, C)), 0, add)
