"""Query, key and value projections side by side in memory of a step's own: one product instead of three.

A copy, brought up to date for every request: parameters that moved into one storage would look tied to
whoever saves, shares or shards them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Merged(NamedTuple):
    """weight [queries + keys + values, D]; bias [the same] or None; sizes: of the three."""

    weight: Tensor
    bias: Tensor | None
    sizes: tuple[int, int, int]

    def pairs(self, attention: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """Every part, and what it is a copy of."""
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        found = [(one, p.weight) for one, p in zip(self.weight.split(self.sizes), projections, strict=True)]
        if self.bias is not None:
            found += [(one, p.bias) for one, p in zip(self.bias.split(self.sizes), projections, strict=True)]
        return found


def refresh(merged: Iterable[tuple[Merged, nn.Module]]) -> None:
    """Take the values that the projections of these attentions have now."""
    pairs = [pair for one, attention in merged for pair in one.pairs(attention)]
    if pairs:
        copies, originals = zip(*pairs, strict=True)
        torch._foreach_copy_(copies, originals)  # in few launches


def can_merge(attention: nn.Module) -> bool:
    """Whether the projections of Llama's or Qwen2's attention are plain, and alike."""
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    if any(type(one) is not nn.Linear for one in projections):
        return False
    biases = [one.bias for one in projections if one.bias is not None]
    kinds = {(t.dtype, t.device) for t in (*(one.weight for one in projections), *biases)}
    return len(biases) in (0, 3) and len(kinds) == 1


def merged_projections(attention: nn.Module) -> Merged | None:
    """None where they cannot be merged; empty until they are refreshed."""
    if not can_merge(attention):
        return None
    weights = [one.weight for one in (attention.q_proj, attention.k_proj, attention.v_proj)]
    sizes = tuple(weight.shape[0] for weight in weights)
    weight = weights[0].new_empty(sum(sizes), weights[0].shape[1])
    biased = attention.q_proj.bias is not None
    return Merged(weight, weight.new_empty(sum(sizes)) if biased else None, sizes)


def may_merge(layers: list[nn.Module]) -> bool:
    """Whether a GPU has room to spare for copies: they take at most a quarter of what is free."""
    weights = [
        getattr(projection, "weight", None)
        for layer in layers
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
    ]
    if any(not isinstance(weight, Tensor) for weight in weights):
        return False
    if not weights[0].is_cuda:
        return True
    free, _ = torch.cuda.mem_get_info(weights[0].device)
    return 4 * sum(weight.nbytes for weight in weights) <= free
