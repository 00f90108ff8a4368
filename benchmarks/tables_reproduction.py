"""The tables of `twell reproduce --scale small`, for tables.py; without its results they say so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results" / "reproduction_small.json"
NOT_MEASURED = "Not measured yet."


def small() -> str:
    """What the columns mean, and a table for each experiment."""
    if not RESULTS.exists():
        return NOT_MEASURED
    from twell.reproduction.results import legend, tables, where  # needs transformers, which takes seconds

    results = json.loads(RESULTS.read_text())
    parts = [legend(results)]
    for table in tables(results):
        parts += [f"**{table.title}**", table.markdown(), " ".join(table.notes)]
    return "\n\n".join([*parts, f"Measured on {where(results)}."])


TABLES: dict[str, Callable[[], str]] = {"reproduction-small": small}
