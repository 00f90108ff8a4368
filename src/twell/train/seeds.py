"""Random draws that depend on a few numbers only: the same on every process, and after a resume."""

from __future__ import annotations

import hashlib

import torch


def generator_of(*numbers: int) -> torch.Generator:
    """A generator on the CPU. Hashed, since sums and shifts would make different numbers share draws."""
    text = "\0".join(map(str, numbers))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
