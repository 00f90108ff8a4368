"""Query, key and value projections in one piece of memory: one product of few tokens instead of three.

The projections stay what they were, parameters of their own shapes and names; only their memory moves, next
to each other. What is changed in one is changed in the other, and saved files are the same.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Merged(NamedTuple):
    """weight [queries + keys + values, D]; bias [the same] or None; sizes: of the three."""

    weight: Tensor
    bias: Tensor | None
    sizes: tuple[int, int, int]


def merged_projections(attention: nn.Module, shared: set[int]) -> Merged | None:
    """Of Llama's or Qwen2's attention; None where its projections are not plain, or belong to others as well.

    shared: ids of parameters that several modules have.
    """
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    weights = [one.weight for one in projections]
    biases = [one.bias for one in projections if getattr(one, "bias", None) is not None]
    plain = all(
        type(one) is nn.Linear and not one._forward_hooks and not one._forward_pre_hooks
        for one in projections
    )
    if not plain or len(biases) not in (0, 3) or len({(w.dtype, w.device) for w in weights}) != 1:
        return None
    if any(type(tensor) is not nn.Parameter or id(tensor) in shared for tensor in (*weights, *biases)):
        return None
    sizes = tuple(weight.shape[0] for weight in weights)
    return Merged(_side_by_side(weights), _side_by_side(biases) if biases else None, sizes)


def shared_parameters(model: nn.Module) -> set[int]:
    """Ids of parameters that several modules of `model` have."""
    found = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
    return {number for number, times in found.items() if times > 1}


def _side_by_side(tensors: list[Tensor]) -> Tensor:
    """All of `tensors` along their first dimension, in memory that they share from now on."""
    first = tensors[0].data
    rows, start = sum(t.shape[0] for t in tensors), first.storage_offset()
    end = start + rows * first.stride(0)
    there = (
        all(t.is_contiguous() for t in tensors) and end <= first.untyped_storage().nbytes() // first.itemsize
    )
    offset = start
    for tensor in tensors:
        there = there and (
            tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and tensor.storage_offset() == offset
        )
        offset += tensor.numel()
    if there:  # as an earlier step left them
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    merged = torch.cat([tensor.data for tensor in tensors])
    for tensor, part in zip(tensors, merged.split([t.shape[0] for t in tensors]), strict=True):
        tensor.data = part
    return merged
