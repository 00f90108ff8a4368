"""The tables of `twell reproduce --scale small`, for tables.py; without its results they say so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from twell.reproduction.results import tables, where

RESULTS = Path(__file__).resolve().parent / "results" / "reproduction_small.json"
NOT_MEASURED = "Not measured yet."


def small() -> str:
    """One table for each experiment; what all of them say of their columns stands below the last."""
    if not RESULTS.exists():
        return NOT_MEASURED
    results = json.loads(RESULTS.read_text())
    parts = []
    for table in tables(results):
        parts += [f"**{table.title}**", table.markdown(), " ".join(table.notes)]
    return "\n\n".join(filter(None, [*parts, f"Measured on {where(results)}."]))


TABLES: dict[str, Callable[[], str]] = {"reproduction-small": small}
