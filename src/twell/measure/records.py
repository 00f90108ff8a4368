"""One figure with all that is needed to trust it, and JSON Lines files of them."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch

from .._checks import reject
from .._files import write_atomically
from . import environment
from .timing import Timing

QUANTILES = ("p10", "p50", "p90")
POSITIVE_UNITS = frozenset({"s", "ms", "us", "ns", "bytes", "KiB", "MiB", "GiB"})
"""Units of time and memory: a value of 0 or less is a mistake."""

_WORD = r"[a-z0-9]+(?:[_.-][a-z0-9]+)*"
_WHAT = re.compile(rf"{_WORD}(?:/{_WORD})*")
_NONE = type(None)


@dataclass(frozen=True, kw_only=True)
class Record:
    """A measured value beside its baseline, from one run.

    what:            slash-separated lowercase words, as "ffn_cpu/prefill/auto".
    baseline:        what it is compared with, as "dense eager"; None without a comparison.
    baseline_value:  the baseline's value, same unit, same run.
    quantiles:       p10, p50 and p90, or empty for a value that is not a distribution.
    shape:           sizes and settings: M, D, H, dtype, gated...
    sparsity:        nnz, density...
    error:           relative error against the oracle, same run.
    date:            ISO 8601, UTC.
    """

    what: str
    baseline: str | None
    baseline_value: float | None
    value: float
    unit: str
    quantiles: dict[str, float]
    shape: dict[str, int | str | bool]
    sparsity: dict[str, float | int]
    error: float | None
    hardware: dict[str, str | int | float | bool | None]
    versions: dict[str, str | None]
    commit: str
    seed: int | None
    date: str

    def __post_init__(self) -> None:
        if not isinstance(self.what, str) or not _WHAT.fullmatch(self.what):
            reject("what", repr(self.what), "slash-separated words of a-z and 0-9, joined by '_', '-' or '.'")
        _require_text("unit", self.unit)
        _require_text("commit", self.commit)
        if self.baseline is not None:
            _require_text("baseline", self.baseline)
        if (self.baseline is None) != (self.baseline_value is None):
            given = f"{self.baseline_value!r} with baseline {self.baseline!r}"
            reject("baseline_value", given, "both or neither")

        self._set("value", _measured("value", self.value, self.unit))
        if self.baseline_value is not None:
            self._set("baseline_value", _measured("baseline_value", self.baseline_value, self.unit))
        if self.error is not None:
            if not _is_number(self.error) or self.error < 0:
                reject("error", repr(self.error), "None or a finite number >= 0")
            self._set("error", float(self.error))

        self._set("quantiles", self._checked_quantiles())
        self._set("shape", _checked_entries("shape", self.shape, (int, str, bool)))
        self._set("sparsity", _checked_entries("sparsity", self.sparsity, (int, float)))
        self._set("hardware", _checked_entries("hardware", self.hardware, (str, int, float, bool, _NONE)))
        self._set("versions", _checked_entries("versions", self.versions, (str, _NONE)))

        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            reject("seed", repr(self.seed), "None or an integer")
        if not _is_utc(self.date):
            reject("date", repr(self.date), "ISO 8601 in UTC, as '2026-01-31T12:00:00+00:00'")

    @property
    def ratio(self) -> float | None:
        """`baseline_value / value`: above 1, this took less than the baseline. None where undefined."""
        return None if self.baseline_value is None or self.value == 0 else self.baseline_value / self.value

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False, ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """The inverse of `to_json`; every field must be there and no other."""
        try:
            entries = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"record: got invalid JSON ({error}); accepted: one JSON object") from None
        if not isinstance(entries, dict):
            reject("record", f"a JSON {type(entries).__name__}", "one JSON object")
        fields = [field.name for field in dataclasses.fields(cls)]
        unknown = [name for name in entries if name not in fields]
        missing = [name for name in fields if name not in entries]
        if unknown:
            reject("record", f"unknown fields {unknown}", ", ".join(fields))
        if missing:
            reject("record", f"no fields {missing}", ", ".join(fields))
        return cls(**entries)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _checked_quantiles(self) -> dict[str, float]:
        given = _checked_entries("quantiles", self.quantiles, (int, float))
        if given and set(given) != set(QUANTILES):
            reject("quantiles", f"keys {sorted(given)}", f"empty, or exactly {', '.join(QUANTILES)}")
        names = QUANTILES if given else ()
        ordered = {name: _measured(f"quantiles[{name!r}]", given[name], self.unit) for name in names}
        if list(ordered.values()) != sorted(ordered.values()):
            reject("quantiles", ordered, "p10 <= p50 <= p90")
        return ordered


def make_record(
    what: str,
    measured: Timing | float,
    *,
    unit: str,
    baseline: str | None = None,
    baseline_timing: Timing | float | None = None,
    shape: Mapping[str, int | str | bool] | None = None,
    sparsity: Mapping[str, float | int] | None = None,
    error: float | None = None,
    device: torch.device | str = "cpu",
    seed: int | None = None,
    repository: str | os.PathLike[str] | None = None,
) -> Record:
    """A record of `measured`, with quantiles, hardware, versions, commit and date filled in.

    A `Timing` gives its median and needs unit "s"; `repository` is the path given to `commit`.
    """
    for name, given in (("measured", measured), ("baseline_timing", baseline_timing)):
        if isinstance(given, Timing) and unit != "s":
            reject("unit", repr(unit), f"'s', since {name} is a Timing")
    return Record(
        what=what,
        baseline=baseline,
        baseline_value=_central(baseline_timing),
        value=_central(measured),
        unit=unit,
        quantiles=measured.quantiles() if isinstance(measured, Timing) else {},
        shape=dict(shape or {}),
        sparsity=dict(sparsity or {}),
        error=error,
        hardware=environment.hardware(device),
        versions=environment.versions(),
        commit=environment.commit(repository),
        seed=seed,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def write_records(path: str | os.PathLike[str], records: Iterable[Record], *, append: bool = False) -> None:
    """Write `records` as JSON Lines, all or nothing: a failure leaves the old file as it was.

    append:  keep the existing lines before the new ones; an invalid one raises and nothing is written.
    One writer at a time: of two that append together, the later one wins.
    """
    path = Path(path)
    new = list(records)
    for record in new:
        if not isinstance(record, Record):
            reject("records", f"a {type(record).__name__}", "Record objects")
    kept = read_records(path) if append and path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(record.to_json() + "\n" for record in (*kept, *new)))


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """The records of a JSON Lines file; an error names the file and the line."""
    records = []
    for number, line in _numbered_lines(Path(path)):
        try:
            records.append(Record.from_json(line.decode()))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return records


def _numbered_lines(path: Path) -> list[tuple[int, bytes]]:
    """The lines that are not blank, counted from 1."""
    lines = path.read_bytes().split(b"\n")
    return [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]


def _central(measured: Timing | float | None) -> float | None:
    return measured.median if isinstance(measured, Timing) else measured


def _is_number(value: Any) -> bool:
    """A finite int or float, no bool."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max


def _measured(field: str, value: Any, unit: str) -> float:
    """`value` as a float that makes sense in `unit`."""
    if not _is_number(value):
        reject(field, repr(value), "a finite number")
    if unit in POSITIVE_UNITS and value <= 0:
        reject(field, repr(value), f"a number > 0 for unit {unit!r}")
    return float(value)


def _require_text(field: str, value: Any) -> None:
    if not isinstance(value, str) or not value.strip():
        reject(field, repr(value), "a non-empty string")


def _checked_entries(field: str, entries: Any, kinds: tuple[type, ...]) -> dict[str, Any]:
    """A copy of `entries`: string keys, values exactly of one of `kinds`, numbers finite."""
    accepted = ", ".join("None" if kind is _NONE else kind.__name__ for kind in kinds)
    if not isinstance(entries, dict):
        reject(field, f"a {type(entries).__name__}", f"a dict of string to {accepted}")
    for key, value in entries.items():
        if not isinstance(key, str):
            reject(f"{field} key", repr(key), "a string")
        if type(value) not in kinds or (type(value) is float and not math.isfinite(value)):
            reject(f"{field}[{key!r}]", repr(value), f"{accepted} (numbers finite)")
    return dict(entries)


def _is_utc(date: Any) -> bool:
    try:
        return datetime.fromisoformat(date).utcoffset() == timedelta(0)
    except (TypeError, ValueError):
        return False
