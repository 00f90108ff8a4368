"""The down projection and the gradient of x on Hopper, in Gluon: sums over gathered weight rows; persistent.

The producer warpgroup brings values by TMA, or gathers them where they lie as the selector left them, and
gathers weight rows by asynchronous copies; it knows where the
next tile's list begins before it needs that, so the ring stays full across tiles. Two consumer warpgroups own
half of a block's tokens each; results leave through shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .common import add_product, arrived, copy_layout, fill, fill_gathered, finish, make_ring, tma_store

# For the down projection and for the gradient of x alike.
SUMS_DEPTH = 64  # listed neurons of one step
SUMS_WIDTH = 256  # columns of an output tile
SUMS_STAGES = 3  # what fits beside its output tile


@gluon.jit
def _span(queue, tile, tiles, across, SPANS: gl.constexpr):
    """(offset in the lists, entries, first row of the values) of a tile, or of the last one."""
    _lists, spans, H, padded = queue
    block = gl.minimum(tile, tiles - 1) // across
    if SPANS:
        span = spans + block * 3
        offset, entries, start = gl.load(span), gl.load(span + 1), gl.load(span + 2)
    else:
        offset, entries, start = block * H, gl.load(spans + block), block * padded
    return offset, entries, start


@gluon.jit
def _load(
    sources,
    queue,
    ring,
    sizes,
    rows,
    PLANES: gl.constexpr,
    SPANS: gl.constexpr,
    PACKED: gl.constexpr,
):
    v_desc, values, weights = sources
    lists, _spans, _H, _padded = queue
    tiles, across, width = sizes
    DEPTH: gl.constexpr = ring[1].shape[1]
    WIDTH: gl.constexpr = ring[1].shape[2]
    ROWS: gl.constexpr = ring[0].shape[2]
    COPY: gl.constexpr = copy_layout(WIDTH)
    entry = gl.arange(0, DEPTH, gl.SliceLayout(1, COPY))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, COPY))
    VALUES: gl.constexpr = copy_layout(ROWS)
    line = gl.arange(0, DEPTH, gl.SliceLayout(1, VALUES))
    token = gl.arange(0, ROWS, gl.SliceLayout(0, VALUES))
    stride = gl.num_programs(0)
    step = 0
    next_offset, next_entries, next_start = _span(queue, gl.program_id(0), tiles, across, SPANS)
    neuron = gl.load(lists + next_offset + entry)
    owner = line if PACKED else gl.load(lists + next_offset + line)
    for tile in range(gl.program_id(0), tiles, stride):
        offset, entries, start = next_offset, next_entries, next_start
        next_offset, next_entries, next_start = _span(queue, tile + stride, tiles, across, SPANS)
        first = (tile % across) * WIDTH + column
        for plane in gl.static_range(PLANES):
            following = next_offset if plane == PLANES - 1 else offset
            for k in range(0, entries, DEPTH):
                source = weights[plane] + (neuron * width)[:, None] + first[None, :]
                inside = (k + entry < entries)[:, None] & (first < width)[None, :]
                ahead = gl.where(k + DEPTH >= entries, following, offset + k + DEPTH)
                neuron = gl.load(lists + ahead + entry)  # past a list: anything, masked before use
                if PACKED:
                    row = (SPANS + plane) * rows + start + k
                    step = fill(ring, v_desc, [row, 0], source, inside, step)
                else:
                    at = values + offset.to(gl.int64) * ROWS + (owner * ROWS)[:, None] + token[None, :]
                    owner = gl.load(lists + ahead + line)
                    listed = (k + line < entries)[:, None] & (token < ROWS)[None, :]
                    step = fill_gathered(ring, at, listed, source, inside, step)
        if entries == 0:
            neuron = gl.load(lists + next_offset + entry)
            owner = line if PACKED else gl.load(lists + next_offset + line)


@gluon.jit
def _multiply(
    target,
    queue,
    ring,
    sizes,
    HALF: gl.constexpr,
    PLANES: gl.constexpr,
    SPANS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    LATER: gl.constexpr,
):
    out_desc, out, out_tile, bias, M = target
    tiles, across, width = sizes
    values, weights, _ready, _free = ring
    DEPTH: gl.constexpr = weights.shape[1]
    WIDTH: gl.constexpr = weights.shape[2]
    TOKENS: gl.constexpr = values.shape[2] // 2
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    step = 0
    _offset, coming, _start = _span(queue, gl.program_id(0), tiles, across, SPANS)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        entries = coming
        _offset, coming, _start = _span(queue, tile + gl.num_programs(0), tiles, across, SPANS)
        first = (tile % across) * WIDTH
        if entries >= LATER:
            steps = PLANES * gl.cdiv(entries, DEPTH)
            acc = gl.zeros([TOKENS, WIDTH], gl.float32, ACC)
            for k in range(0, steps):
                stage = arrived(ring, step, True)
                tokens = values.index(stage).slice(HALF * TOKENS, TOKENS, 1).permute((1, 0))
                acc = add_product(acc, tokens, weights.index(stage), ring, step, k > 0)
                step += 1
            acc = finish(acc, ring, step, steps > 0)
            row = (tile // across) * 2 * TOKENS + HALF * TOKENS
            if HAS_BIAS:
                column = first + gl.arange(0, WIDTH, gl.SliceLayout(0, ACC))
                acc += gl.load(bias + column, mask=column < width, other=0.0).to(gl.float32)[None, :]
            if LATER:  # rare: more was active than the pool holds
                token = row + gl.arange(0, TOKENS, gl.SliceLayout(1, ACC))
                column = first + gl.arange(0, WIDTH, gl.SliceLayout(0, ACC))
                cell = out + token.to(gl.int64)[:, None] * width + column[None, :]
                inside = (token < M)[:, None] & (column < width)[None, :]
                acc += gl.load(cell, mask=inside, other=0.0).to(gl.float32)
            tma.store_wait(0)  # of the tile before: its rows have left shared memory
            out_tile.index(HALF).store(acc.to(out_desc.dtype))
            fence_async_shared()
            tma_store(out_desc, [row, first], out_tile.index(HALF))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["blocks", "M"])
def gathered_sums_hopper(
    v_desc,
    values,
    out_desc,
    out,
    weights,
    more_weights,
    bias,
    lists,
    spans,
    blocks,
    M,
    H,
    width,
    padded,
    rows,
    PLANES: gl.constexpr,
    SPANS: gl.constexpr,
    PACKED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    LATER: gl.constexpr,
    W_LAYOUT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """As `gathered_sums` without a rest; width a multiple of 64; lists readable DEPTH entries
    past their end.

    v_desc blocks [DEPTH, ROWS]; out_desc blocks [ROWS / 2, WIDTH] of out [M, width]; 4 warps.
    """
    HALF_ROWS: gl.constexpr = out_desc.block_shape[0]
    WIDTH: gl.constexpr = out_desc.block_shape[1]
    DEPTH: gl.constexpr = v_desc.block_shape[0]
    held = gl.allocate_shared_memory(out_desc.dtype, [STAGES, DEPTH, 2 * HALF_ROWS], v_desc.layout)
    gathered = gl.allocate_shared_memory(out_desc.dtype, [STAGES, DEPTH, WIDTH], W_LAYOUT)
    out_tile = gl.allocate_shared_memory(out_desc.dtype, [2, HALF_ROWS, WIDTH], out_desc.layout)
    ring = make_ring(held, gathered, 2, True)
    across = gl.cdiv(width, WIDTH)
    sizes = (blocks * across, across, width)
    queue = (lists, spans, H, padded)
    target = (out_desc, out, out_tile, bias, M)
    sources = (v_desc, values, (weights, more_weights))
    gl.warp_specialize(
        [
            (_multiply, (target, queue, ring, sizes, 0, PLANES, SPANS, HAS_BIAS, LATER)),
            (_multiply, (target, queue, ring, sizes, 1, PLANES, SPANS, HAS_BIAS, LATER)),
            (_load, (sources, queue, ring, sizes, rows, PLANES, SPANS, PACKED)),
        ],
        [4, 4],
        [216, 72] if PACKED else [208, 96],
    )
