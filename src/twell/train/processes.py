"""The processes of a run, started by torchrun or `accelerate launch`; mostly there is one."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch import Tensor


def is_first() -> bool:
    """Whether this is the first process; known before the processes have met."""
    return int(os.environ.get("RANK", "0")) == 0


def are_several() -> bool:
    return dist.is_available() and dist.is_initialized()


def sum_over_all(tensor: Tensor) -> Tensor:
    """`tensor`, changed in place. Call it on every process."""
    if are_several():
        dist.all_reduce(tensor)
    return tensor


def any_of_all(flag: Tensor) -> bool:
    """Whether `flag` [] is set anywhere; waits for the device. Call it on every process."""
    return bool(sum_over_all(flag.long()))


def wait_for_all() -> None:
    if are_several():
        dist.barrier()
