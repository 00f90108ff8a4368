"""How often each neuron fired, and from that how its weights' gradients are computed.

Frequent neurons go together through dense products over all tokens; rare ones go token by token.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["blocks"])
def count_tokens(places, before, firing, blocks, H, NEURONS: tl.constexpr, GROUP: tl.constexpr):
    """before int32 [B, H]: tokens of earlier blocks that fire a neuron; firing int32 [H]: of all blocks."""
    neuron = tl.program_id(0) * NEURONS + tl.arange(0, NEURONS)
    carry = tl.zeros([NEURONS], tl.int32)
    for first in range(0, blocks, GROUP):
        block = first + tl.arange(0, GROUP)
        inside = (block < blocks)[:, None] & (neuron < H)[None, :]
        cell = block[:, None] * H + neuron[None, :]
        count = tl.load(places + cell, mask=inside, other=0) & 255
        upto = tl.cumsum(count, 0)
        tl.store(before + cell, carry[None, :] + upto - count, mask=inside)
        carry += tl.sum(count, 0)
    tl.store(firing + neuron, carry, mask=neuron < H)


@triton.jit(do_not_specialize=["limit", "tokens"])
def order_neurons(
    firing,
    bounds,
    frequent,
    how_many,
    offsets,
    H,
    tokens,
    limit,
    processors,
    units,
    NEURONS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program. Of the round's neurons: the frequent ones, ascending, and where the tokens of each other
    one start; -1 for frequent ones.

        frequent int32 [H]; how_many int32 [1]; offsets int32 [H]

    Frequent is what fires for more than 1, 2, ... or CANDIDATES times `limit` tokens, whichever costs least.
    Dense products run in waves of `processors` units, `units` for every NEURONS frequent neurons; a wave
    takes about as long as six rare activations for every token (H200).
    """
    neuron = tl.arange(0, WIDTH)
    inside = (neuron >= tl.load(bounds)) & (neuron < tl.load(bounds + 1))
    count = tl.load(firing + neuron, mask=inside & (neuron < H), other=0)
    best = limit
    least = 0.0
    for times in tl.static_range(1, CANDIDATES + 1):
        dense = count > times * limit
        waves = tl.cdiv(tl.cdiv(tl.sum(dense.to(tl.int32), 0), NEURONS) * units, processors)
        cost = 6.0 * waves * tokens + tl.sum(tl.where(dense, 0, count), 0)
        if times == 1:
            least = cost
        else:
            best = tl.where(cost < least, times * limit, best)
            least = tl.minimum(cost, least)
    many = (count > best).to(tl.int32)
    position = tl.cumsum(many, 0) - many
    tl.store(frequent + position, neuron, mask=many > 0)
    tl.store(how_many, tl.sum(many, 0))
    few = tl.where(many > 0, 0, count)
    start = tl.cumsum(few, 0) - few
    tl.store(offsets + neuron, tl.where(many > 0, -1, start), mask=inside & (neuron < H))
