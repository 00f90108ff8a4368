"""Query, key and value projections side by side in memory of a step's own: one product instead of three.

A copy, brought up to date for every request: parameters that moved into one storage would look tied to
whoever saves, shares or shards them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Merged(NamedTuple):
    """weight [queries + keys + values, D]; bias [the same] or None; sizes: of the three."""

    weight: Tensor
    bias: Tensor | None
    sizes: tuple[int, int, int]

    def refresh(self, attention: nn.Module) -> None:
        """Take the projections' values as they are now."""
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        for place, one in enumerate(self.weight.split(self.sizes)):
            one.copy_(projections[place].weight)
        if self.bias is not None:
            for place, one in enumerate(self.bias.split(self.sizes)):
                one.copy_(projections[place].bias)


def merged_projections(attention: nn.Module) -> Merged | None:
    """Of Llama's or Qwen2's attention; None where its projections are not plain."""
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    if any(type(one) is not nn.Linear for one in projections):
        return None
    weights = [one.weight for one in projections]
    biases = [one.bias for one in projections if one.bias is not None]
    kinds = {(t.dtype, t.device) for t in (*weights, *biases)}
    if len(biases) not in (0, 3) or len(kinds) != 1:
        return None
    sizes = tuple(weight.shape[0] for weight in weights)
    weight = weights[0].new_empty(sum(sizes), weights[0].shape[1])
    return Merged(weight, weight.new_empty(sum(sizes)) if biases else None, sizes)


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
