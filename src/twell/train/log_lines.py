"""The lines of metrics.jsonl. Without transformers, which takes seconds to import: reports read them, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .._log import log_once
from .display import metrics_html

END = "end"


class Metrics(list[dict[str, Any]]):
    """Lines of a metrics file. A notebook shows some of them, and the training curves."""

    def _repr_html_(self) -> str:
        return metrics_html(self)


def read_metrics(path: Path) -> Metrics:
    """The lines of a metrics file, one per step and kind; damaged lines are skipped and logged."""
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
            found[place(line)] = line  # the last one wins: a resumed run wrote it
    if bad:
        log_once(f"{path}: skipped what cannot be read, line {', '.join(bad)}")
    return Metrics(found.values())


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and type(line.get("step")) is int else None


def place(line: dict[str, Any]) -> tuple[int, str]:
    """Step and kind, which no two lines of a run share."""
    for kind, key in (("evaluation", "eval_loss"), (END, "train_runtime"), ("log", "loss")):
        if key in line:
            return line["step"], kind
    return line["step"], ",".join(sorted(line))  # logged by another callback
