"""Measuring some records of a file again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from twell.measure import Record, read_records, write_records


def replace_records(path: Path, records: list[Record], replaced: Callable[[Record], bool]) -> int:
    """Write `records` where the first of those stands that are `replaced`, else at the end; keep the others.

    Returns how many records the file then has.
    """
    old = read_records(path) if path.exists() else []
    place = next((place for place, record in enumerate(old) if replaced(record)), len(old))
    before, after = ([r for r in part if not replaced(r)] for part in (old[:place], old[place:]))
    new = [*before, *records, *after]
    write_records(path, new)
    return len(new)
