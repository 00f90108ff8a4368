"""The order of examples: a matter of length, seed and epoch, the same on every machine."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler

from ..._checks import reject, require_positive_int
from ..seeds import generator_of

_CHUNK = 1 << 16


class EpochOrder:
    """A permutation of 0 .. length - 1 for every epoch."""

    def __init__(self, length: int, seed: int) -> None:
        require_positive_int("length", length)
        _require_not_negative("seed", seed)
        self.length = length
        self.seed = seed

    def indices(self, epoch: int) -> Tensor:
        """int64 [length] on the CPU."""
        _require_not_negative("epoch", epoch)
        return torch.randperm(self.length, generator=generator_of(self.seed, epoch))


class RunOrder(Sampler[int]):
    """`total` indices below `length` for a `DataLoader`: epoch after epoch as one list, the last cut short.

    Skip what was seen already, and a run goes on as if never interrupted. Every process iterates over the
    same order; accelerate gives batch k * world + r to process r.
    """

    def __init__(self, length: int, total: int, seed: int = 0) -> None:
        self._order = EpochOrder(length, seed)
        self.total = total

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[int]:
        left, epoch = self.total, 0
        while left > 0:
            indices = self._order.indices(epoch)[:left]
            # In chunks, since a list of all takes several times the memory of the tensor.
            for chunk in indices.split(_CHUNK):
                yield from chunk.tolist()
            left -= indices.numel()
            epoch += 1


def _require_not_negative(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        reject(name, repr(value), "an integer >= 0")
