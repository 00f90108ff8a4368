"""What the launchers know of the device they launch on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU. capability: (major, minor), (0, 0) for Triton's interpreter on the CPU;
    processors: streaming multiprocessors; shared_memory: bytes that one program may use."""

    name: str
    capability: tuple[int, int]
    processors: int
    shared_memory: int

    @property
    def hopper(self) -> bool:
        return self.capability == (9, 0)


_INTERPRETER = Gpu(name="interpreter", capability=(0, 0), processors=3, shared_memory=48 << 10)


def gpu_of(device: torch.device) -> Gpu:
    return _INTERPRETER if device.type == "cpu" else _gpu(torch.cuda._utils._get_device_index(device, True))


@lru_cache(maxsize=64)
def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    return Gpu(
        name=properties.name,
        capability=(properties.major, properties.minor),
        processors=properties.multi_processor_count,
        shared_memory=properties.shared_memory_per_block_optin,
    )
