"""Which paths ran, for those who want to know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class Ran(NamedTuple):
    """One piece of a call: its path ("dense", "row", "block", or "decode", the block path's form for decode),
    where, and its size; phase: "forward", or "backward" where it is ours and not that of autograd. The CPU
    backend decides anew for every few hundred tokens, and by itself in the backward ("row": active pairs).
    reason: why, where an automatic plan chose."""

    path: str
    device: str
    tokens: int
    hidden: int
    neurons: int
    phase: str = "forward"
    reason: str = ""


_listeners: list[list[Ran]] = []


@contextmanager
def recorded_paths() -> Iterator[list[Ran]]:
    """The paths that blocks take inside the `with`, in the order in which they are launched.

        with twell.recorded_paths() as ran:
            model(ids)
        print(collections.Counter(piece.path for piece in ran))

    A CUDA graph records when it is captured, and not when it is replayed. Inside compiled code dense blocks
    that the compiler sees through are not recorded.
    """
    ran: list[Ran] = []
    _listeners.append(ran)
    try:
        yield ran
    finally:
        _listeners[:] = [other for other in _listeners if other is not ran]


def listens() -> bool:
    """Whether anybody does."""
    return bool(_listeners)


def note_path(path: str, x: torch.Tensor, neurons: int, phase: str = "forward", reason: str = "") -> None:
    """x [..., D] takes `path` through a block of `neurons`."""
    if torch.compiler.is_compiling() or not _listeners:
        return
    hidden = x.shape[-1]
    for ran in _listeners:
        ran.append(Ran(path, x.device.type, x.numel() // max(hidden, 1), hidden, neurons, phase, reason))
