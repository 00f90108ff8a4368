"""How many backward passes found more active neurons than their pool holds, counted on the device."""

from __future__ import annotations

import torch
from torch import Tensor

_counters: dict[torch.device, Tensor] = {}


def overflow_counter(device: torch.device) -> Tensor:
    """int32 [4], of which the first counts; lasts as long as the process."""
    counter = _counters.get(device)
    if counter is None:
        counter = _outside_of_pools(device)
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            _counters[device] = counter  # one that is captured would start anew with every replay
    return counter


def _outside_of_pools(device: torch.device) -> Tensor:
    """Zeros, allocated on a stream of their own: those of the current one may go to a graph's pool, which is
    gone with the graph."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(4, dtype=torch.int32, device=device)
    here, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    with torch.cuda.stream(aside):
        counter = torch.zeros(4, dtype=torch.int32, device=device)
    here.wait_stream(aside)
    return counter


def overflowed_steps() -> int:
    """How many backward passes on GPUs took rounds, because more neurons were active than their workspace
    holds at once (a third of all): exact as ever, and slower. Waits for the devices.
    """
    return sum(int(counter[0]) for counter in _counters.values())
