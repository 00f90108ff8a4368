"""Up to which share of active neurons the sparse GPU kernels beat dense, by number of tokens.

A neuron counts as active if any token of a block activates it. Built-in limits were measured on an H200
(bf16, GPU time; decode at four shapes, 768 to 8,191 tokens at D 2048, H 5632 only). `twell tune` measures the
GPU at hand and stores its limits in the cache folder, by GPU, version and shape. GPUs that are neither Hopper
nor tuned run dense.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from .._files import cache_folder, write_atomically
from .._version import __version__

# tokens -> share, measured in CUDA graphs on an H200 and set a little lower. Decode at D 2048: sparse pays up
# to about 0.7, with 33 to 64 tokens up to 0.4. Wide layers leave no room for x of more than 16 tokens beside
# the weights: about 0.25 and 0.15. Many tokens (whole blocks of 128, and their shares): 768 to 1,024 1.2x at
# 0.28 and 0.97x at 0.46; 1,536 1.38x at 0.46; from 8,192 on as fast as dense with everything active.
_MANY = {65: 0.0, 768: 0.35, 1536: 0.6, 4096: 0.8, 8192: 1.0}
_HOPPER = {1: 0.5, 33: 0.25, **_MANY}
_HOPPER_WIDE = {1: 0.4, 17: 0.15, 33: 0.08, **_MANY}
_WIDE = 2048  # layers with more features are wide
_DECODE_MEASURED = range(1024, 5633)  # features; beyond, x of 16 tokens does not fit either
_HOPPER_UNKNOWN = {1: 0.0, **_MANY}
# Other GPUs were not measured: dense until `twell tune` has run.
_OTHER = {1: 0.0}


class Shape(NamedTuple):
    """The key of tuned limits: D, H and whether the block has a gate."""

    hidden: int
    neurons: int
    gated: bool

    @property
    def name(self) -> str:
        return f"{self.hidden}x{self.neurons}{'' if self.gated else ' plain'}"


def share_limit(gpu: str, measured: bool, shape: Shape, tokens: int) -> float:
    """The largest share of active neurons at which `tokens` tokens run sparse.

    measured: whether Hopper's built-in limits apply where this very shape was not tuned; else 0.
    """
    built_in = _built_in(shape.hidden) if measured else _OTHER
    table = _tuned(gpu).get(shape.name) or built_in
    known = [count for count in table if count <= max(tokens, min(table))]
    return table[max(known)]


def _built_in(hidden: int) -> dict[int, float]:
    if hidden not in _DECODE_MEASURED:
        return _HOPPER_UNKNOWN
    return _HOPPER if hidden <= _WIDE else _HOPPER_WIDE


def cache_file(gpu: str) -> Path | None:
    """Where `twell tune` keeps the limits of a GPU; None without a cache folder."""
    folder, name = cache_folder(), gpu.replace(" ", "-").replace("/", "-")
    return None if folder is None else folder / f"limits-{name}-{__version__}.json"


def store(gpu: str, shape: Shape, limits: dict[int, float]) -> Path | None:
    """Keep tuned limits, other shapes' too; they apply in this process at once."""
    path = cache_file(gpu)
    if path is not None:
        kept = {**_tuned(gpu), shape.name: limits}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(kept, indent=1) + "\n")
        _tuned.cache_clear()
    return path


def tuned_shapes(gpu: str) -> list[str]:
    """The shapes that `twell tune` has measured on this GPU."""
    return sorted(_tuned(gpu))


@lru_cache(maxsize=16)
def _tuned(gpu: str) -> dict[str, dict[int, float]]:
    """shape -> tokens -> share; empty without a readable file."""
    path = cache_file(gpu)
    try:
        stored = json.loads(path.read_text()) if path is not None else {}
        return {
            shape: {int(tokens): float(share) for tokens, share in table.items()}
            for shape, table in stored.items()
        }
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
