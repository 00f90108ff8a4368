"""What the library tells: log lines, each once per process, and which paths ran."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

_log = logging.getLogger("twell")
_logged: set[str] = set()


def log_once(message: str) -> None:
    """Warn once per process and message: fallbacks are never silent, and never noisy."""
    if message not in _logged:
        _logged.add(message)
        _log.warning("twell: %s", message)


class Ran(NamedTuple):
    """One piece of a call.

    path:    "dense", "row", "block", or "decode", the block path's form for decode.
    device:  its type.
    tokens, hidden, neurons:  M, D and H.
    phase:   "forward", or "backward" where the backward is ours and not autograd's.
    reason:  why, where an automatic plan chose.

    The CPU backend decides every few hundred tokens, and again in the backward ("row": on active pairs).
    """

    path: str
    device: str
    tokens: int
    hidden: int
    neurons: int
    phase: str = "forward"
    reason: str = ""


_recordings: list[list[Ran]] = []


@contextmanager
def recorded_paths() -> Iterator[list[Ran]]:
    """Record the paths that blocks take inside the `with`, in launch order.

        with twell.recorded_paths() as ran:
            model(ids)
        print(collections.Counter(piece.path for piece in ran))

    A CUDA graph records when it is captured, not when it is replayed. Inside compiled code, dense blocks that
    the compiler sees through are not recorded.
    """
    ran: list[Ran] = []
    _recordings.append(ran)
    try:
        yield ran
    finally:
        _recordings[:] = [other for other in _recordings if other is not ran]


def paths_are_recorded() -> bool:
    return bool(_recordings)


def note_path(path: str, x: torch.Tensor, neurons: int, phase: str = "forward", reason: str = "") -> None:
    """x [..., D] takes `path` through a block of `neurons`."""
    if torch.compiler.is_compiling() or not _recordings:
        return
    hidden = x.shape[-1]
    for ran in _recordings:
        ran.append(Ran(path, x.device.type, x.numel() // max(hidden, 1), hidden, neurons, phase, reason))
