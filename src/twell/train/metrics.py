"""Metrics of a run as JSON lines, one per log or evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import TrainerCallback


class MetricsFile(TrainerCallback):
    """Appends to `path` on the first process; a resumed run goes on behind the step that it resumes from."""

    def __init__(self, path: Path, tokens_per_step: int) -> None:
        self.path, self.tokens_per_step = path, tokens_per_step
        self._last: tuple[int, float] | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        self._last = state.global_step, perf_counter()
        if state.is_world_process_zero:
            cut_after(self.path, state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        logs = dict(logs or {})
        if "loss" in logs:  # on every process: others read it from the same dictionary
            step, then = self._last or (state.global_step, perf_counter())
            now = perf_counter()
            logs["tokens_per_second"] = (
                (state.global_step - step) * self.tokens_per_step / max(now - then, 1e-9)
            )
            self._last = state.global_step, now
            if torch.cuda.is_available():  # of this stretch: a run that turns sparse needs less later on
                logs["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
                torch.cuda.reset_peak_memory_stats()
        if state.is_world_process_zero:
            line = {"step": state.global_step, "tokens": state.global_step * self.tokens_per_step} | logs
            with self.path.open("a") as out:
                out.write(json.dumps(line) + "\n")

    def on_evaluate(self, args, state, control, **kwargs):
        # The time of an evaluation or a save is not that of training.
        self._last = state.global_step, perf_counter()

    on_save = on_evaluate


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics file; a last line that was cut short is left out."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return


def cut_after(path: Path, step: int) -> None:
    """Drop what was logged after `step`: those steps are run again."""
    kept = [line for line in read_metrics(path) if line["step"] <= step]
    if not path.exists() and not kept:
        return
    temporary = path.with_suffix(".part")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
    temporary.replace(path)
