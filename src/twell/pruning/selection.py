"""Which neurons stay."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.gpu.sizes import WEIGHT_STEP

_TILE = 128  # neurons of the kernels' tiles
_TILED_FROM = 1024  # neurons from which a part of a tile more costs less than an odd size


def rounded_size(kept: int, neurons: int) -> int:
    """A size for at least `kept` of `neurons` that suits the kernels."""
    step = _TILE if kept >= _TILED_FROM else WEIGHT_STEP
    return min(max(-(-kept // step) * step, WEIGHT_STEP), neurons)


def firing_neurons(firing: Tensor, min_fires: int) -> int:
    """How many neurons fired at least `min_fires` times."""
    return int((firing >= min_fires).sum())


def most_firing(firing: Tensor, count: int) -> Tensor:
    """int64 [count], ascending: the neurons that fired most; of equals the first."""
    return torch.sort(firing, descending=True, stable=True).indices[:count].sort().values
