"""Up to which share of active neurons the sparse kernels beat dense, by number of tokens.

The share is that of the union: neurons that any token of a block activates. Built-in limits were measured
on an H200 (bf16, D 2048, H 5632, time on the device); `twell tune` measures the device at hand and stores
its own in the cache directory, by GPU and version. GPUs that are neither Hopper nor tuned run dense.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path

from ..._version import __version__

CACHE_VARIABLE = "TWELL_CACHE"

# tokens -> share. Hopper: the block path is at least as fast as dense at any share from 4,096 tokens on.
_HOPPER = {1: 0.5, 2: 0.3, 16: 0.3, 32: 0.15, 64: 0.1, 65: 0.0, 4096: 1.0}
# Elsewhere nothing has been measured: dense, until `twell tune` has.
_OTHER = {1: 0.0}


def share_limit(gpu: str, hopper: bool, tokens: int) -> float:
    """The largest share of active neurons at which the sparse path is chosen for `tokens` tokens."""
    table = _tuned(gpu) or (_HOPPER if hopper else _OTHER)
    known = [count for count in table if count <= max(tokens, min(table))]
    return table[max(known)]


def cache_file(gpu: str) -> Path:
    """Where `twell tune` keeps the limits of a GPU."""
    root = os.environ.get(CACHE_VARIABLE)
    base = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "twell"
    return base / f"limits-{gpu.replace(' ', '-').replace('/', '-')}-{__version__}.json"


def store(gpu: str, limits: dict[int, float]) -> Path:
    """Keep tuned limits; they hold for this process at once."""
    path = cache_file(gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".tmp")
    written.write_text(json.dumps({str(k): v for k, v in sorted(limits.items())}, indent=1) + "\n")
    written.replace(path)
    _tuned.cache_clear()
    return path


@lru_cache(maxsize=16)
def _tuned(gpu: str) -> dict[int, float] | None:
    try:
        stored = json.loads(cache_file(gpu).read_text())
        table = {int(tokens): float(share) for tokens, share in stored.items()}
    except (OSError, ValueError, AttributeError):
        return None
    return table or None
