"""Metrics of a run as JSON lines, one per log or evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import TrainerCallback

from .._log import log_once
from .disk import write_whole, writing

_END = "end"


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
    """Writes to `path` on the first process, one line per step and kind (log, evaluation, end of training).

    A resumed run goes on behind the step that it resumes from; what it logs again takes the place of the
    line that was there.
    """

    def __init__(self, path: Path, tokens_per_step: int) -> None:
        self.path, self.tokens_per_step = path, tokens_per_step
        self._written: set[tuple[int, str]] = set()

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self._written = {_place(line) for line in cut_after(self.path, state.global_step)}

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero:
            return
        line = {"step": state.global_step, "tokens": state.global_step * self.tokens_per_step}
        line |= logs or {}
        line.pop("epoch", None)  # transformers counts the run as one
        if _place(line) in self._written:
            _rewrite(self.path, [old for old in read_metrics(self.path) if _place(old) != _place(line)])
        self._written.add(_place(line))
        with writing(self.path), self.path.open("a") as out:
            out.write(json.dumps(line) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, one per step and kind; what cannot be read is left out, and logged."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    bad = []
    content = path.read_bytes() if path.exists() else b""
    for number, text in enumerate(content.splitlines(), start=1):
        if not text.strip():
            continue
        line = _parsed(text)
        if line is None:
            bad.append(str(number))
        else:
            found[_place(line)] = line  # the last one is that of the run that went on
    if bad:
        log_once(f"{path}: left out what cannot be read, line {', '.join(bad)}")
    return list(found.values())


def cut_after(path: Path, step: int) -> list[dict[str, Any]]:
    """Drop what was logged after `step`, where a run goes on: those steps are run again. What is kept."""
    kept = [line for line in read_metrics(path) if line["step"] <= step]
    kept = [line for line in kept if _place(line) != (step, _END)]  # it did not end there
    if path.exists():
        _rewrite(path, kept)
    return kept


def _rewrite(path: Path, lines: list[dict[str, Any]]) -> None:
    write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and type(line.get("step")) is int else None


def _place(line: dict[str, Any]) -> tuple[int, str]:
    """What no two lines of a run share."""
    for kind, key in (("evaluation", "eval_loss"), (_END, "train_runtime"), ("log", "loss")):
        if key in line:
            return line["step"], kind
    return line["step"], ",".join(sorted(line))  # what somebody else logs
