"""Keys and values of a generation in memory that stays where it is, so that a captured step finds it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer


class StepCache:
    """keys, values: per layer [B, heads, columns, size]; column: int64 [1], where the next token goes."""

    def __init__(self, prompt: Cache, columns: int, column: Tensor) -> None:
        """With the keys and values of a prompt, [B, heads, tokens, size]."""
        self.column = column
        self.keys, self.values = [], []
        for layer in prompt.layers:
            for kept, given in ((self.keys, layer.keys), (self.values, layer.values)):
                shape = (*given.shape[:2], columns, given.shape[3])
                kept.append(torch.zeros(shape, dtype=given.dtype, device=given.device))
        self.fill(prompt)

    def fill(self, prompt: Cache) -> None:
        """Start again, with another prompt of the same batch. Columns past it are not attended to; zeros
        there keep a NaN of an earlier text out of the sums."""
        torch._foreach_zero_([*self.keys, *self.values])  # in few launches
        for layer, keys, values in zip(prompt.layers, self.keys, self.values, strict=True):
            for kept, given in ((keys, layer.keys), (values, layer.values)):
                kept[:, :, : given.shape[2]] = given

    def for_transformers(self) -> Cache:
        """As a model's own forward writes and reads it."""
        return Cache(layers=[_Layer(*pair, self.column) for pair in zip(self.keys, self.values, strict=True)])


class _Layer(CacheLayerMixin):
    """One layer of a `StepCache`, for one token at a time."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, column: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self._column = keys, values, column
        self.is_initialized = True

    def lazy_initialization(self, *_given: Any) -> None:
        """It is there already."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_more: Any, **_options: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self._column, key_states)
        self.values.index_copy_(2, self._column, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        return self._column

    def get_max_length(self) -> int:
        return self.keys.shape[2]

    get_max_cache_shape = get_max_length


def is_plain(cache: Any) -> bool:
    """Whether a cache holds whole sequences of keys and values, layer by layer, and nothing else."""
    return (
        type(cache).__name__ == "DynamicCache"
        and not getattr(cache, "offloading", False)
        and all(type(layer) is DynamicLayer for layer in cache.layers)
    )
