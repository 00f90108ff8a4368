"""Up to which share of active neurons the sparse kernels beat dense, by number of tokens.

The share is that of the union: neurons that any token of a block activates. Built-in limits were measured
on an H200 (bf16, D 2048, H 5632, time on the device); `twell tune` measures the device at hand and stores
its own in the cache directory, by GPU, version and shape. GPUs that are neither Hopper nor tuned run dense.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path

from ..._version import __version__

CACHE_VARIABLE = "TWELL_CACHE"

# tokens -> share. Hopper: up to 32 tokens sparse pays up to about 0.7, up to 64 to 0.35 (D 2048, H 5632; less
# is said here); from 16,384 tokens on the block path is about as fast as dense even at 1.
_HOPPER = {1: 0.5, 33: 0.2, 65: 0.0, 16384: 1.0}
# Elsewhere nothing has been measured: dense, until `twell tune` has.
_OTHER = {1: 0.0}


def share_limit(gpu: str, measured: bool, shape: str, tokens: int) -> float:
    """The largest share of active neurons at which the sparse path is chosen for `tokens` tokens.

    measured: whether the built-in limits of Hopper apply where nothing was tuned; else dense.
    shape: as `shape_name` gives it; limits tuned for another shape are not used.
    """
    table = _tuned(gpu).get(shape) or (_HOPPER if measured else _OTHER)
    known = [count for count in table if count <= max(tokens, min(table))]
    return table[max(known)]


def shape_name(hidden: int, neurons: int, gated: bool) -> str:
    """What tuned limits are kept under."""
    return f"{hidden}x{neurons}{'' if gated else ' plain'}"


def cache_file(gpu: str) -> Path | None:
    """Where `twell tune` keeps the limits of a GPU; None where there is no place for it."""
    root = os.environ.get(CACHE_VARIABLE)
    if not root:
        try:
            home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        except RuntimeError:  # no home directory
            return None
        root = Path(home) / "twell"
    return Path(root) / f"limits-{gpu.replace(' ', '-').replace('/', '-')}-{__version__}.json"


def store(gpu: str, shape: str, limits: dict[int, float]) -> Path | None:
    """Keep tuned limits beside those of other shapes; they hold for this process at once."""
    path = cache_file(gpu)
    if path is not None:
        kept = {**_tuned(gpu), shape: limits}
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(".tmp")
        written.write_text(json.dumps(kept, indent=1) + "\n")
        written.replace(path)
        _tuned.cache_clear()
    return path


@lru_cache(maxsize=16)
def _tuned(gpu: str) -> dict[str, dict[int, float]]:
    """shape -> tokens -> share; empty where there is no file, or one that cannot be read."""
    path = cache_file(gpu)
    try:
        stored = json.loads(path.read_text()) if path is not None else {}
        return {
            shape: {int(tokens): float(share) for tokens, share in table.items()}
            for shape, table in stored.items()
        }
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
