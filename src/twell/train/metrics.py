"""Metrics of a run as JSON lines, one per log or evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import TrainerCallback


class Pace(TrainerCallback):
    """Tokens per second and peak memory since the last report, evaluations and saves left out."""

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self._since = (0, perf_counter())

    def report(self, step: int) -> dict[str, float]:
        before, then = self._since
        self._since = step, perf_counter()
        tokens = (step - before) * self.tokens_per_step
        found = {"tokens_per_second": tokens / max(self._since[1] - then, 1e-9)}
        if torch.cuda.is_available():  # of this stretch: a run that turns sparse needs less later on
            found["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        return found

    def on_train_begin(self, args, state, control, **kwargs):
        self._since = state.global_step, perf_counter()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    on_evaluate = on_save = on_train_begin


class MetricsFile(TrainerCallback):
    """Appends to `path` on the first process; a resumed run goes on behind the step that it resumes from."""

    def __init__(self, path: Path, tokens_per_step: int) -> None:
        self.path, self.tokens_per_step = path, tokens_per_step

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            cut_after(self.path, state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            line = {"step": state.global_step, "tokens": state.global_step * self.tokens_per_step}
            line |= logs or {}
            line.pop("epoch", None)  # transformers counts the run as one
            with self.path.open("a") as out:
                out.write(json.dumps(line) + "\n")


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
