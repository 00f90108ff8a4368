"""`input_gradient` for compute capability 9.0, in Gluon; built like `hopper_down.py`.

The producer warpgroup brings rows of the pool by TMA and gathers weight rows; it knows the next tile's span
and first neurons before it needs them, so the ring stays full across tiles. Two consumer warpgroups own half
of a block's tokens each.
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

from ..hopper_names import copy_rows, tma_load, tma_store


@gluon.jit
def _span(spans, tile, tiles, across):
    """(offset in the lists, entries, first row of the pool) of a tile, or of the last one."""
    span = spans + gl.minimum(tile, tiles - 1) // across * 3
    return gl.load(span), gl.load(span + 1), gl.load(span + 2)


@gluon.jit
def _load(pool_desc, weights, lists, spans, rings, tiles, across, D, rows):
    v_ring, w_ring, ready, free = rings
    STAGES: gl.constexpr = w_ring.shape[0]
    DEPTH: gl.constexpr = w_ring.shape[1]
    WIDTH: gl.constexpr = w_ring.shape[2]
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    entry = gl.arange(0, DEPTH, gl.SliceLayout(1, COPY))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, COPY))
    stride = gl.num_programs(0)
    step = 0
    next_offset, next_entries, next_start = _span(spans, gl.program_id(0), tiles, across)
    neuron = gl.load(lists + next_offset + entry)
    for tile in range(gl.program_id(0), tiles, stride):
        offset, entries, start = next_offset, next_entries, next_start
        next_offset, next_entries, next_start = _span(spans, tile + stride, tiles, across)
        first = (tile % across) * WIDTH + column
        for plane in gl.static_range(2):
            following = next_offset if plane == 1 else offset
            for k in range(0, entries, DEPTH):
                stage = step % STAGES
                source = weights[plane] + (neuron * D)[:, None] + first[None, :]
                inside = (k + entry < entries)[:, None] & (first < D)[None, :]
                ahead = gl.where(k + DEPTH >= entries, following, offset + k + DEPTH)
                neuron = gl.load(lists + ahead + entry)  # past a list: anything, masked before use
                mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(ready.index(stage), pool_desc.block_type.nbytes)
                row = (1 + plane) * rows + start + k
                tma_load(pool_desc, [row, 0], ready.index(stage), v_ring.index(stage))
                copy_rows(w_ring.index(stage), source, mask=inside)
                async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
                step += 1
        if entries == 0:
            neuron = gl.load(lists + next_offset + entry)


@gluon.jit
def _multiply(
    out_desc, out, spans, rings, out_tile, tiles, across, M, D, HALF: gl.constexpr, LATER: gl.constexpr
):
    v_ring, w_ring, ready, free = rings
    STAGES: gl.constexpr = w_ring.shape[0]
    DEPTH: gl.constexpr = w_ring.shape[1]
    WIDTH: gl.constexpr = w_ring.shape[2]
    TOKENS: gl.constexpr = v_ring.shape[2] // 2
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    step = 0
    _offset, coming, _start = _span(spans, gl.program_id(0), tiles, across)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        entries = coming
        _offset, coming, _start = _span(spans, tile + gl.num_programs(0), tiles, across)
        first = (tile % across) * WIDTH
        if entries >= LATER:
            steps = 2 * gl.cdiv(entries, DEPTH)
            acc = gl.zeros([TOKENS, WIDTH], gl.float32, ACC)
            for k in range(0, steps):
                stage = step % STAGES
                mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
                # The copies are ordinary writes; the product reads shared memory by another proxy.
                fence_async_shared()
                tokens = v_ring.index(stage).slice(HALF * TOKENS, TOKENS, 1).permute((1, 0))
                acc = warpgroup_mma(tokens, w_ring.index(stage), acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[acc])
                mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
                step += 1
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=steps > 0)
            row = (tile // across) * 2 * TOKENS + HALF * TOKENS
            if LATER:  # rare: more was active than the pool holds
                token = row + gl.arange(0, TOKENS, gl.SliceLayout(1, ACC))
                column = first + gl.arange(0, WIDTH, gl.SliceLayout(0, ACC))
                cell = out + token.to(gl.int64)[:, None] * D + column[None, :]
                inside = (token < M)[:, None] & (column < D)[None, :]
                acc += gl.load(cell, mask=inside, other=0.0).to(gl.float32)
            tma.store_wait(0)  # of the tile before: its rows have left shared memory
            out_tile.index(HALF).store(acc.to(out_desc.dtype))
            fence_async_shared()
            tma_store(out_desc, [row, first], out_tile.index(HALF))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["blocks", "M"])
def input_gradient_hopper(
    pool_desc,
    out_desc,
    out,
    select,
    up,
    lists,
    spans,
    blocks,
    M,
    D,
    rows,
    LATER: gl.constexpr,
    W_LAYOUT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """As `input_gradient` with two planes; D a multiple of 64; lists readable DEPTH entries past their end.

    pool_desc blocks [DEPTH, ROWS]; out_desc blocks [ROWS / 2, WIDTH] of out [M, D]; 4 warps.
    """
    HALF_ROWS: gl.constexpr = out_desc.block_shape[0]
    WIDTH: gl.constexpr = out_desc.block_shape[1]
    DEPTH: gl.constexpr = pool_desc.block_shape[0]
    v_ring = gl.allocate_shared_memory(out_desc.dtype, [STAGES, DEPTH, 2 * HALF_ROWS], pool_desc.layout)
    w_ring = gl.allocate_shared_memory(out_desc.dtype, [STAGES, DEPTH, WIDTH], W_LAYOUT)
    out_tile = gl.allocate_shared_memory(out_desc.dtype, [2, HALF_ROWS, WIDTH], out_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1 + 128)  # the TMA's arrival and one per copying thread
        mbarrier.init(free.index(stage), count=2)
    across = gl.cdiv(D, WIDTH)
    tiles = blocks * across
    rings = (v_ring, w_ring, ready, free)
    gl.warp_specialize(
        [
            (_multiply, (out_desc, out, spans, rings, out_tile, tiles, across, M, D, 0, LATER)),
            (_multiply, (out_desc, out, spans, rings, out_tile, tiles, across, M, D, 1, LATER)),
            (_load, (pool_desc, (select, up), lists, spans, rings, tiles, across, D, rows)),
        ],
        [4, 4],
        [216, 72],
    )
