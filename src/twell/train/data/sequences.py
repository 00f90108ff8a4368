"""Token files as training sequences, and the order in which a run sees them."""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from ..._errors import reject, require_int, require_positive_int
from ..distributed import generator_of

_CHUNK = 1 << 16


class PackedDataset(Dataset):
    """A stream of tokens, cut into windows of `sequence_length` across documents and files.

    Item i holds tokens i * S to (i + 1) * S, S = sequence_length, as "input_ids" and "labels": int64 [S],
    equal, since models shift labels themselves. The last, incomplete window is dropped. Each process maps
    the files on first use, also with a pickled copy.

    files:   paths with the number of tokens in each.
    dtype:   numpy's name of the ids' type in the files.
    """

    def __init__(self, files: Sequence[tuple[Path, int]], *, dtype: str, sequence_length: int) -> None:
        require_positive_int("sequence_length", sequence_length)
        self.sequence_length = sequence_length
        self._files = tuple(files)
        self._dtype = dtype
        self._ends = list(itertools.accumulate(tokens for _, tokens in self._files))
        self._maps: list[np.ndarray] | None = None
        stored = self._ends[-1] if self._ends else 0
        if stored < sequence_length:
            reject("data", f"{stored:,} tokens", f"at least one sequence: {sequence_length:,} tokens")
        self._length = stored // sequence_length

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> int:
        """Tokens of one epoch, in complete windows."""
        return self._length * self.sequence_length

    def __getitem__(self, index: SupportsIndex) -> dict[str, Tensor]:
        position = operator.index(index)
        if position < 0:
            position += self._length
        if not 0 <= position < self._length:
            raise IndexError(f"sequence {index} of {self._length}")
        ids = torch.from_numpy(self._window(position * self.sequence_length))
        return {"input_ids": ids, "labels": ids.clone()}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": None}

    def _window(self, start: int) -> np.ndarray:
        """int64 [sequence_length] from position `start` of the stream."""
        if self._maps is None:
            self._maps = [
                np.memmap(path, dtype=self._dtype, mode="r", shape=(tokens,)) for path, tokens in self._files
            ]
        window = np.empty(self.sequence_length, dtype=np.int64)
        filled = 0
        file = bisect.bisect_right(self._ends, start)
        offset = start - (self._ends[file - 1] if file else 0)
        while filled < self.sequence_length:
            part = self._maps[file][offset : offset + self.sequence_length - filled]
            window[filled : filled + len(part)] = part
            filled += len(part)
            file, offset = file + 1, 0
        return window


class EpochOrder:
    """A permutation of 0 .. length - 1 for every epoch, the same on every machine."""

    def __init__(self, length: int, seed: int) -> None:
        require_positive_int("length", length)
        require_int("seed", seed, 0)
        self.length = length
        self.seed = seed

    def indices(self, epoch: int) -> Tensor:
        """int64 [length] on the CPU."""
        require_int("epoch", epoch, 0)
        return torch.randperm(self.length, generator=generator_of(self.seed, epoch))


class RunOrder(Sampler[int]):
    """`total` indices below `length` for a `DataLoader`: epoch after epoch as one list, the last cut short.

    A run that skips what it has seen continues as if never interrupted. Every process iterates over the same
    order; accelerate gives batch k * world + r to process r.
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
            # In chunks: a list of all takes several times the memory of the tensor.
            for chunk in indices.split(_CHUNK):
                yield from chunk.tolist()
            left -= indices.numel()
            epoch += 1
