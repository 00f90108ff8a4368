"""The one check of a device argument."""

from __future__ import annotations

import torch

from .._checks import reject


def checked_device(device: torch.device | str) -> torch.device:
    """`device` as a `torch.device`: the CPU, or a CUDA device that is there."""
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError):
        reject("device", repr(device), "'cpu' | 'cuda' | 'cuda:<index>'")
    if where.type not in ("cpu", "cuda"):
        reject("device", repr(str(where)), "'cpu' | 'cuda' | 'cuda:<index>'")
    if where.type == "cuda":
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (where.index or 0) >= found:
            reject("device", repr(str(where)), f"'cpu', or one of the {found} CUDA devices found here")
    return where
