"""From activity marks to lists of active neurons and work items, on the device."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def list_active(
    active,
    lists,
    counts,
    work,
    counter,
    H,
    chunks_per_block,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    FILL: tl.constexpr,
):
    """One program per block: its active neurons in ascending order, and one work item per CHUNK of them.

    lists [B, H] int32; counts [B] int32; a work item is block * chunks_per_block + chunk. Items of a block
    are contiguous; the order of blocks is that of arrival, which no result depends on.
    FILL: zeros past the end of a list, and so many past the last one, for lists that outlive the call.
    """
    block = tl.program_id(0)
    neuron = tl.arange(0, WIDTH)
    mark = tl.load(active + block * H + neuron, mask=neuron < H, other=0).to(tl.int32)
    position = tl.cumsum(mark, 0) - mark
    total = tl.sum(mark, 0)
    tl.store(lists + block * H + position, neuron, mask=mark > 0)
    tl.store(counts + block, total)
    if FILL > 0:
        tl.store(lists + block * H + neuron, 0, mask=(neuron >= total) & (neuron < H))
        if block == tl.num_programs(0) - 1:
            past = tl.arange(0, FILL)
            tl.store(lists + (block + 1) * H + past, tl.zeros_like(past))
    chunks = tl.cdiv(total, CHUNK)
    base = tl.atomic_add(counter, chunks)
    for chunk in range(0, chunks):
        tl.store(work + base + chunk, block * chunks_per_block + chunk)
