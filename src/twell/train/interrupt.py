"""Ctrl-C and SIGTERM end a run after the current step, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import torch
from transformers import TrainerCallback

from .distributed import any_of_all, are_several

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def outlive_signals(then: Callable[[int], None] | None, worker: int) -> None:
    """Make a data-loading process ignore signals, which go to all processes of a job.

    The run still has a step to finish and a checkpoint to save; the training process ends its workers.
    """
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if then is not None:
        then(worker)


class SaveOnInterrupt(TrainerCallback):
    """The first signal saves and stops; a second one stops at once.

    Several processes must agree on the step, so they look at the signal when they log metrics.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> SaveOnInterrupt:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no handlers
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_error: object) -> None:
        self._restore()

    def _note(self, number: int, frame: object) -> None:
        self.interrupted = True
        self._restore()  # the next signal acts as usual

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def on_step_end(self, args, state, control, **kwargs):
        if self._all_stop(args, state.global_step):
            control.should_save = True
            control.should_training_stop = True

    def _all_stop(self, args, step: int) -> bool:
        if are_several():
            if step % args.logging_steps:
                return False
            self.interrupted = any_of_all(torch.tensor(self.interrupted, device=args.device))
        return self.interrupted
