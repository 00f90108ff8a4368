"""Firing counts and magnitudes, from the workspace of the block kernels; how active a dense call was."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def count_firing(values, active, firing, M, H, per_program, NEURONS: tl.constexpr, ROWS: tl.constexpr):
    """firing[n] += tokens whose value is not 0; integers, so the order of additions does not matter."""
    neuron = tl.program_id(0) * NEURONS + tl.arange(0, NEURONS)
    token = tl.arange(0, ROWS)
    first = tl.program_id(1) * per_program
    count = tl.zeros([NEURONS], tl.int32)
    for block in range(first, tl.minimum(first + per_program, tl.cdiv(M, ROWS))):
        live = tl.load(active + block * H + neuron, mask=neuron < H, other=0) > 0
        cell = values + (tl.cast(block, tl.int64) * H + neuron)[:, None] * ROWS + token[None, :]
        known = (block * ROWS + token < M)[None, :]  # an infinite weight makes NaN of the zeros past M
        value = tl.load(cell, mask=live[:, None] & known, other=0.0)
        count += tl.sum((value != 0.0).to(tl.int32), 1)
    tl.atomic_add(firing + neuron, count.to(tl.int64), mask=neuron < H)


@triton.jit(do_not_specialize=["M"])
def sum_magnitudes(
    hidden,
    active,
    counts,
    sums,
    M,
    H,
    padded,
    per_program,
    PACKED: tl.constexpr,
    NEURONS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """sums[program] = sum of |hidden| over its neurons and blocks; one number each, so no order to lose.

    Tokens of a block are added as a tree, in float32; blocks come one after the other, in float64.

    PACKED: rows in list order, [B, padded, ROWS]; else by neuron, [B, H, ROWS].
    """
    row = tl.program_id(0) * NEURONS + tl.arange(0, NEURONS)
    token = tl.arange(0, ROWS)
    first = tl.program_id(1) * per_program
    total = tl.zeros([NEURONS], tl.float64)
    for block in range(first, tl.minimum(first + per_program, tl.cdiv(M, ROWS))):
        if PACKED:
            live = row < tl.load(counts + block)
            start = tl.cast(block, tl.int64) * padded
        else:
            live = tl.load(active + block * H + row, mask=row < H, other=0) > 0
            start = tl.cast(block, tl.int64) * H
        known = (block * ROWS + token < M)[None, :]
        cell = hidden + (start + row)[:, None] * ROWS + token[None, :]
        value = tl.load(cell, mask=live[:, None] & known, other=0.0)
        total += tl.sum(tl.abs(value.to(tl.float32)), 1).to(tl.float64)
    tl.store(sums + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.sum(total, 0))


@triton.jit(do_not_specialize=["M"])
def count_unions(pre, counts, M, H, threshold, ROWS: tl.constexpr, NEURONS: tl.constexpr):
    """counts[block, tile] = neurons of the tile that any token of the block activates; pre [M, H].

    Grid: tiles of NEURONS, blocks of ROWS tokens. A NaN is not <= anything: it counts.
    """
    neuron = tl.program_id(0) * NEURONS + tl.arange(0, NEURONS)
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    cell = pre + token.to(tl.int64)[:, None] * H + neuron[None, :]
    inside = (token < M)[:, None] & (neuron < H)[None, :]
    value = tl.load(cell, mask=inside, other=0.0).to(tl.float32)
    live = inside & ((value > threshold) | (value != value))
    found = tl.max(live.to(tl.int32), 0)
    tl.store(counts + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.sum(found, 0))
