"""The gathered down projection for compute capability 9.0, in Gluon; persistent.

The producer warpgroup brings packed hidden rows by TMA and gathers weight rows by 16-byte asynchronous
copies; it knows the next tile's count and first neurons before it needs them, so the ring stays full across
tiles. Two consumer warpgroups own half of the block's tokens each; results leave through shared memory.
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

from .hopper_names import copy_rows, tma_load, tma_store


@gluon.jit
def _load(hidden_desc, w, lists, counts, rings, tiles, across, H, E, padded, STAGES: gl.constexpr):
    h_ring, w_ring, ready, free = rings
    DEPTH: gl.constexpr = w_ring.shape[1]
    WIDTH: gl.constexpr = w_ring.shape[2]
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    entry = gl.arange(0, DEPTH, gl.SliceLayout(1, COPY))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, COPY))
    step = 0
    coming = gl.load(counts + gl.program_id(0) // across)
    neuron = gl.load(lists + (gl.program_id(0) // across) * H + entry)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        block = tile // across
        listing = lists + block * H
        count = coming
        first = (tile % across) * WIDTH + column
        following = gl.minimum(tile + gl.num_programs(0), tiles - 1) // across
        coming = gl.load(counts + following)
        for k in range(0, count, DEPTH):
            stage = step % STAGES
            source = w + (neuron * E)[:, None] + first[None, :]
            inside = (k + entry < count)[:, None] & (first < E)[None, :]
            last = k + DEPTH >= count
            ahead = gl.where(last, lists + following * H, listing + k + DEPTH)
            neuron = gl.load(ahead + entry)  # past a list: anything, masked before use
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(stage), hidden_desc.block_type.nbytes)
            tma_load(hidden_desc, [block * padded + k, 0], ready.index(stage), h_ring.index(stage))
            copy_rows(w_ring.index(stage), source, mask=inside)
            async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
            step += 1
        if count == 0:
            neuron = gl.load(lists + following * H + entry)


@gluon.jit
def _multiply(
    y_desc,
    bias,
    counts,
    rings,
    y_tile,
    tiles,
    across,
    E,
    HALF: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    STAGES: gl.constexpr,
):
    h_ring, w_ring, ready, free = rings
    DEPTH: gl.constexpr = w_ring.shape[1]
    WIDTH: gl.constexpr = w_ring.shape[2]
    TOKENS: gl.constexpr = h_ring.shape[2] // 2
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    step = 0
    coming = gl.load(counts + gl.program_id(0) // across)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        count = coming
        coming = gl.load(counts + gl.minimum(tile + gl.num_programs(0), tiles - 1) // across)
        first = (tile % across) * WIDTH
        acc = gl.zeros([TOKENS, WIDTH], gl.float32, ACC)
        for k in range(0, count, DEPTH):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
            # The copies are ordinary writes; the product reads shared memory by another proxy.
            fence_async_shared()
            tokens = h_ring.index(stage).slice(HALF * TOKENS, TOKENS, 1).permute((1, 0))
            acc = warpgroup_mma(tokens, w_ring.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=count > 0)
        if HAS_BIAS:
            column = first + gl.arange(0, WIDTH, gl.SliceLayout(0, ACC))
            acc += gl.load(bias + column, mask=column < E, other=0.0).to(gl.float32)[None, :]
        tma.store_wait(0)  # of the tile before: its rows have left shared memory
        y_tile.index(HALF).store(acc.to(y_desc.dtype))
        fence_async_shared()
        row = (tile // across) * 2 * TOKENS + HALF * TOKENS
        tma_store(y_desc, [row, first], y_tile.index(HALF))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["blocks"])
def down_blocks_hopper(
    hidden_desc,
    w,
    bias,
    y_desc,
    lists,
    counts,
    blocks,
    H,
    E,
    padded,
    HAS_BIAS: gl.constexpr,
    W_LAYOUT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """As `down_blocks` with PACKED; E a multiple of 64; lists readable DEPTH entries past their end.

    hidden_desc blocks [DEPTH, ROWS]; y_desc blocks [ROWS / 2, WIDTH] of y [M, E]; 4 warps.
    """
    HALF_ROWS: gl.constexpr = y_desc.block_shape[0]
    WIDTH: gl.constexpr = y_desc.block_shape[1]
    DEPTH: gl.constexpr = hidden_desc.block_shape[0]
    h_ring = gl.allocate_shared_memory(y_desc.dtype, [STAGES, DEPTH, 2 * HALF_ROWS], hidden_desc.layout)
    w_ring = gl.allocate_shared_memory(y_desc.dtype, [STAGES, DEPTH, WIDTH], W_LAYOUT)
    y_tile = gl.allocate_shared_memory(y_desc.dtype, [2, HALF_ROWS, WIDTH], y_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1 + 128)  # the TMA's arrival and one per copying thread
        mbarrier.init(free.index(stage), count=2)
    across = gl.cdiv(E, WIDTH)
    tiles = blocks * across
    rings = (h_ring, w_ring, ready, free)
    gl.warp_specialize(
        [
            (_multiply, (y_desc, bias, counts, rings, y_tile, tiles, across, E, 0, HAS_BIAS, STAGES)),
            (_multiply, (y_desc, bias, counts, rings, y_tile, tiles, across, E, 1, HAS_BIAS, STAGES)),
            (_load, (hidden_desc, w, lists, counts, rings, tiles, across, H, E, padded, STAGES)),
        ],
        [4, 4],
        [216, 72],
    )
