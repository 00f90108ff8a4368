"""The order in which a run sees its sequences: epoch after epoch, as one list."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class RunOrder(Sampler[int]):
    """`total` indices below `length`: every epoch is shuffled on its own; the last may be cut short.

    The same on every process and machine: it depends on the three numbers alone.
    """

    def __init__(self, length: int, total: int, seed: int = 0) -> None:
        self.length, self.total, self.seed = length, total, seed

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[int]:
        left, epoch = self.total, 0
        while left > 0:
            generator = torch.Generator().manual_seed((self.seed << 20) + epoch)
            order = torch.randperm(self.length, generator=generator)[:left].tolist()
            yield from order
            left -= len(order)
            epoch += 1
