"""How a run shows itself: its training curves as a file, its results and metrics in notebooks."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

from .._html import image, table
from ..plots import can_draw, training_curves

_MOST_ROWS = 8
_COLUMNS = {
    "step": ("step", "{:,}"),
    "tokens": ("tokens", "{:,}"),
    "ce_loss": ("cross-entropy", "{:.3f}"),
    "nnz": ("active per token", "{:.1f}"),
    "dead": ("dead", "{:.1%}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
}

# Keys of summary.json in words; the others say it themselves.
_RESULTS = {
    "train_ce_loss": "training cross-entropy",
    "held_out_ce_loss": "held-out cross-entropy",
    "held_out_perplexity": "held-out perplexity",
    "held_out_nnz": "active per held-out token",
    "held_out_dead": "dead in held-out text",
    "held_out_dead_window": "tokens of held-out text",
    "nnz": "active per training token",
    "dead": "dead at the end of training",
    "dead_window": "tokens they were silent for",
    "revived": "neurons revived",
    "tokens_per_second": "tokens/s, median",
    "data_tokens": "tokens of the training text",
    "peak_memory_bytes": "peak memory, bytes",
}

Lines = Sequence[Mapping[str, Any]]


def draw_training(
    lines: Lines, path: str | os.PathLike[str] | io.BytesIO, *, title: str, subtitle: str
) -> bool:
    """Draw a PNG of cross-entropy and active neurons; False without matplotlib or anything to draw."""
    logs = _logs(lines)
    if not logs or not can_draw():
        return False
    training_curves({title: logs}, path, title=title, subtitle=subtitle)
    return True


def metrics_html(lines: Lines, title: str = "Training") -> str:
    """Some lines of training, and the curves of all if matplotlib is installed."""
    logs = _logs(lines)
    if not logs:
        return f"<p>{len(lines)} lines, none of training</p>"
    places = sorted({round(row * (len(logs) - 1) / (_MOST_ROWS - 1)) for row in range(_MOST_ROWS)})
    names = [name for name in _COLUMNS if any(name in line for line in logs)]
    rows = [[_cell(logs[place], name) for name in names] for place in places]
    drawn, subtitle = io.BytesIO(), f"{len(logs):,} logged steps of {logs[-1]['step']:,}"
    shown = table([_COLUMNS[name][0] for name in names], rows, left=())
    if draw_training(logs, drawn, title=title, subtitle=subtitle):
        shown += image(drawn.getvalue(), "cross-entropy and active neurons over training")
    return shown


def summary_html(summary: Mapping[str, Any], caption: str) -> str:
    return table(("result", "value"), summary_rows(summary), caption=caption)


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What is known, in words, for people."""
    return [
        (_RESULTS.get(name, name), _shown(name, value))
        for name, value in summary.items()
        if value is not None
    ]


def _shown(name: str, value: Any) -> str:
    if not _is_number(value):
        return str(value)
    if name in ("dead", "held_out_dead"):
        return f"{value:.1%}"
    if isinstance(value, int) or value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _logs(lines: Lines) -> list[dict[str, Any]]:
    """Lines of training steps, without what is no number: a file may have been edited."""
    numbers = [{name: value for name, value in line.items() if _is_number(value)} for line in lines]
    return [line for line in numbers if {"step", "tokens", "ce_loss"} <= line.keys()]


def _cell(line: Mapping[str, Any], name: str) -> str:
    return _COLUMNS[name][1].format(line[name]) if name in line else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not abs(value) > 1e300
