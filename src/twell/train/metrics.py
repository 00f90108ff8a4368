"""Metrics of a run: written to metrics.jsonl, sent elsewhere, shown in a progress bar.

Speed and memory are measured here; losses and sparsity come from `recipe`, evaluations from `trainer`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from .._errors import reject
from .._files import needs_space, write_atomically
from .log_lines import END, place, read_metrics

_WIDE = 150  # columns of a terminal where the bar has room beside all that it says

# Reporters that transformers has and does not list: name -> the module they need.
_UNLISTED = {"flyte": "flytekit", "azure_ml": "azureml"}


class Pace(TrainerCallback):
    """Tokens per second and peak memory since the last report, without evaluations and saves."""

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self._since = (0, perf_counter())

    def report(self, step: int) -> dict[str, float]:
        before, then = self._since
        self._since = step, perf_counter()
        tokens = (step - before) * self.tokens_per_step
        found = {"tokens_per_second": tokens / max(self._since[1] - then, 1e-9)}
        if torch.cuda.is_available():  # per stretch: a run that turns sparse needs less memory later
            found["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        return found

    def on_train_begin(self, args, state, control, **kwargs):
        self._since = state.global_step, perf_counter()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    on_evaluate = on_save = on_train_begin


class MetricsFile(TrainerCallback):
    """Appends to `path` on the first process, one line per step and kind (log, evaluation, end of training).

    A resumed run drops the lines after the step it resumes from; a line logged again replaces the old one.
    """

    def __init__(self, path: Path, tokens_per_step: int) -> None:
        self.path, self.tokens_per_step = path, tokens_per_step
        self._written: set[tuple[int, str]] = set()

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self._written = {place(line) for line in cut_after(self.path, state.global_step)}

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero:
            return
        line = {"step": state.global_step, "tokens": state.global_step * self.tokens_per_step}
        line |= logs or {}
        line.pop("epoch", None)  # transformers takes the whole run for one epoch
        if place(line) in self._written:
            _rewrite(self.path, [old for old in read_metrics(self.path) if place(old) != place(line)])
        self._written.add(place(line))
        with needs_space(str(self.path)), self.path.open("a") as out:
            out.write(json.dumps(line) + "\n")


def cut_after(path: Path, step: int) -> list[dict[str, Any]]:
    """Drop lines after `step`, from which a run is resumed; returns the lines that stay."""
    kept = [line for line in read_metrics(path) if line["step"] <= step]
    kept = [line for line in kept if place(line) != (step, END)]  # training did not end there
    if path.exists():
        _rewrite(path, kept)
    return kept


def _rewrite(path: Path, lines: list[dict[str, Any]]) -> None:
    write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines))


def check_reporters(names: Sequence[str]) -> None:
    """Refuse unknown and missing reporters now: transformers would notice after the text is tokenised."""
    if tuple(names) in ((), ("none",), ("all",)):  # all: every installed one
        return
    installed = set(get_available_reporting_integrations())
    installed |= {name for name, module in _UNLISTED.items() if find_spec(module) is not None}
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            reject("train.report", repr(name), f"any of {', '.join(INTEGRATION_TO_CALLBACK)}")
        if name not in installed:
            here = ", ".join(sorted(installed)) or "none"
            reject(
                "train.report",
                f"{name!r}, whose package is not installed",
                f"what is installed here ({here}), or install it first",
            )


def dead_of(logs: Mapping[str, float], prefix: str = "") -> str:
    """The share of dead neurons, with the window it was counted in: the share depends on the window."""
    return f"dead {logs[f'{prefix}dead']:.1%} in {logs[f'{prefix}dead_window']:,} tokens"


class ProgressBar(TrainerCallback):
    """Loss, active and dead neurons, tokens per second and time left: a bar, or lines without a terminal."""

    def __init__(self, tokens_per_step: int, console: Console) -> None:
        self.tokens_per_step, self.console = tokens_per_step, console
        self.bar: Progress | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero or not self.console.is_terminal:
            return
        columns = (
            TextColumn("training"),
            BarColumn(bar_width=40 if self.console.width >= _WIDE else 6),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}"),
        )
        self.bar = Progress(*columns, console=self.console)
        self._task = self.bar.add_task("", total=state.max_steps, completed=state.global_step, status="")
        self.bar.start()

    def on_step_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.update(self._task, completed=state.global_step)

    def on_prediction_step(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.update(self._task, status="evaluating on held-out text")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs:
            return
        if "eval_loss" in logs:
            sparse = ""
            if "eval_nnz" in logs:
                sparse = f", nnz {logs['eval_nnz']:.1f}, {dead_of(logs, 'eval_')}"
            self._say(f"step {state.global_step}: held-out cross-entropy {logs['eval_loss']:.4f}{sparse}")
        elif "ce_loss" in logs:
            rate = logs["tokens_per_second"]
            narrow = self.bar is not None and self.console.width < _WIDE
            status = f"{'loss' if narrow else 'cross-entropy'} {logs['ce_loss']:.3f}"
            if "nnz" in logs:
                status += (
                    f"  nnz {logs['nnz']:.1f}" if narrow else f"  nnz {logs['nnz']:.1f}  {dead_of(logs)}"
                )
            status += f"  {rate:,.0f} {'tok/s' if narrow else 'tokens/s'}"
            if self.bar is not None:
                self.bar.update(self._task, status=status)
            else:
                left = (state.max_steps - state.global_step) * self.tokens_per_step / max(rate, 1e-9)
                self._say(f"step {state.global_step}/{state.max_steps}  {status}  {left:,.0f} s left")

    def on_train_end(self, args, state, control, **kwargs):
        self.close()

    def close(self) -> None:
        """Remove the bar, also after an error, which a live bar would hide."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)  # stays one line in a file
