"""The processes of a run, started by torchrun or `accelerate launch`: sums, agreement, equal random draws."""

from __future__ import annotations

import hashlib
import os

import torch
import torch.distributed as dist
from torch import Tensor


def is_first() -> bool:
    """Whether this is the first process; known before the processes have met."""
    return int(os.environ.get("RANK", "0")) == 0


def are_several() -> bool:
    return dist.is_available() and dist.is_initialized()


def sum_over_all(tensor: Tensor) -> Tensor:
    """`tensor`, summed in place. Call it on every process."""
    if are_several():
        dist.all_reduce(tensor)
    return tensor


def any_of_all(flag: Tensor) -> bool:
    """Whether `flag` [] is set on any process; waits for the device. Call it on every process."""
    return bool(sum_over_all(flag.long()))


def wait_for_all() -> None:
    if are_several():
        dist.barrier()


def generator_of(*numbers: int) -> torch.Generator:
    """A CPU generator that depends on `numbers` alone: equal on every process, and after a resume.

    The numbers are hashed, since sums or shifts would give different numbers the same draws.
    """
    text = "\0".join(map(str, numbers))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
