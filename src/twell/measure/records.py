"""Figures and training runs with everything needed to trust them, and JSON Lines files of them."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from .._errors import reject, require_text
from .._files import locked, write_atomically
from . import environment
from .timing import Timing

QUANTILES = ("p10", "p50", "p90")
POSITIVE_UNITS = frozenset({"s", "ms", "us", "ns", "bytes", "KiB", "MiB", "GiB"})
"""Units of time and memory: a value of 0 or less is a mistake."""

_WORD = r"[a-z0-9]+(?:[_.-][a-z0-9]+)*"
_WHAT = re.compile(rf"{_WORD}(?:/{_WORD})*")
_NONE = type(None)
_LOCK_SECONDS = 30.0  # others hold a file for as long as it takes to write

# Fields of text, and fields that map strings to values of these types; a record has some of them.
_TEXTS = ("commit", "unit", "preset")
_ENTRIES = {
    "hardware": (str, int, float, bool, _NONE),
    "versions": (str, _NONE),
    "shape": (int, str, bool),
    "sparsity": (int, float),
    "details": (int, float),
    "summary": (int, float, _NONE),
    "last": (int, float),
    "curve": (list,),
}


class _Sourced:
    """The fields of every record: its name, and where, when and from which code it was measured.

    what:      slash-separated lowercase words, as "ffn_cpu/prefill/auto".
    hardware, versions, commit:  see `twell.measure.environment`.
    date:      ISO 8601, UTC.
    """

    what: str
    hardware: dict[str, str | int | float | bool | None]
    versions: dict[str, str | None]
    commit: str
    date: str

    def __post_init__(self) -> None:
        if not isinstance(self.what, str) or not _WHAT.fullmatch(self.what):
            reject("what", repr(self.what), "slash-separated words of a-z and 0-9, joined by '_', '-' or '.'")
        fields = {field.name for field in dataclasses.fields(self)}
        for name in _TEXTS:
            if name in fields:
                require_text(name, getattr(self, name))
        for name, kinds in _ENTRIES.items():
            if name in fields:
                self._set(name, _checked_entries(name, getattr(self, name), kinds))
        if not _is_utc(self.date):
            reject("date", repr(self.date), "ISO 8601 in UTC, as '2026-01-31T12:00:00+00:00'")

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False, ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> Self:
        """The inverse of `to_json`. Every field without a default must be there, and no other."""
        try:
            entries = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"record: got invalid JSON ({error}); accepted: one JSON object") from None
        if not isinstance(entries, dict):
            reject("record", f"a JSON {type(entries).__name__}", "one JSON object")
        fields = {field.name: field for field in dataclasses.fields(cls)}
        unknown = [name for name in entries if name not in fields]
        missing = [name for name in fields if name not in entries and not _has_default(fields[name])]
        if unknown:
            reject("record", f"unknown fields {unknown}", ", ".join(fields))
        if missing:
            reject("record", f"no fields {missing}", ", ".join(fields))
        return cls(**entries)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True)
class Record(_Sourced):
    """A measured value and its baseline, from one run.

    baseline:        what the value is compared with, as "dense eager"; None without a comparison.
    baseline_value:  the baseline's value, same unit, same run.
    quantiles:       p10, p50 and p90, or empty for a value that is not a distribution.
    shape:           sizes and settings: M, D, H, dtype, gated...
    sparsity:        nnz, density...
    error:           relative error against the oracle, same run.
    details:         what else the run measured beside the value: memory, energy, intervals...
    rounds:          every sample in `unit`, by process and round, where contenders took turns: those of two
                     contenders in one round of one process belong together.
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
    details: dict[str, float | int] = field(default_factory=dict)  # early records have neither
    rounds: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.baseline is not None:
            require_text("baseline", self.baseline)
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
        self._set("rounds", self._checked_rounds())
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            reject("seed", repr(self.seed), "None or an integer")

    @property
    def ratio(self) -> float | None:
        """`baseline_value / value`: above 1, this took less than the baseline. None if undefined."""
        return None if self.baseline_value is None or self.value == 0 else self.baseline_value / self.value

    def _checked_rounds(self) -> list[list[float]]:
        processes = enumerate(_checked_list("rounds", self.rounds, (list, tuple)))
        return [
            [_measured(f"rounds[{n}]", sample, self.unit) for sample in samples] for n, samples in processes
        ]

    def _checked_quantiles(self) -> dict[str, float]:
        given = _checked_entries("quantiles", self.quantiles, (int, float))
        if given and set(given) != set(QUANTILES):
            reject("quantiles", f"keys {sorted(given)}", f"empty, or exactly {', '.join(QUANTILES)}")
        names = QUANTILES if given else ()
        ordered = {name: _measured(f"quantiles[{name!r}]", given[name], self.unit) for name in names}
        if list(ordered.values()) != sorted(ordered.values()):
            reject("quantiles", ordered, "p10 <= p50 <= p90")
        return ordered


@dataclass(frozen=True, kw_only=True)
class RunRecord(_Sourced):
    """A training run: its settings, its result and its curve.

    preset, settings:  `twell train --preset PRESET SETTINGS`.
    seconds:           wall time of the run.
    summary:           the figures of its summary.json; None where a dense model has none.
    last:              the figures of its last log line.
    curve:             columns of its log, all of one length.
    layers:            [trains sparse, share of active neurons, switches] of each automatically planned layer.
    """

    what: str
    preset: str
    settings: list[str]
    seconds: float
    summary: dict[str, int | float | None]
    last: dict[str, int | float]
    curve: dict[str, list[int | float | None]]
    layers: list[list[bool | int | float | None]]
    hardware: dict[str, str | int | float | bool | None]
    versions: dict[str, str | None]
    commit: str
    date: str

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("settings", _checked_list("settings", self.settings, (str,)))
        self._set("seconds", _measured("seconds", self.seconds, "s"))
        columns = {
            name: _checked_list(f"curve[{name!r}]", column, (int, float, _NONE))
            for name, column in self.curve.items()
        }
        if len({len(column) for column in columns.values()}) > 1:
            lengths = {name: len(column) for name, column in columns.items()}
            reject("curve", f"columns of lengths {lengths}", "columns of one length")
        self._set("curve", columns)
        layers = [
            _checked_list("layers", layer, (bool, int, float, _NONE))
            for layer in _checked_list("layers", self.layers, (list, tuple))
        ]
        self._set("layers", layers)


Stored = TypeVar("Stored", Record, RunRecord)


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
    details: Mapping[str, float | int] | None = None,
    device: torch.device | str = "cpu",
    seed: int | None = None,
    repository: str | os.PathLike[str] | None = None,
) -> Record:
    """A record of `measured`, with quantiles, hardware, versions, commit and date filled in.

    A `Timing` counts with its median and needs unit "s"; `repository` is the path given to `commit`.
    """
    for name, given in (("measured", measured), ("baseline_timing", baseline_timing)):
        if isinstance(given, Timing) and unit != "s":
            reject("unit", repr(unit), f"'s', since {name} is a Timing")
    return Record(
        what=what,
        baseline=baseline,
        baseline_value=central(baseline_timing),
        value=central(measured),
        unit=unit,
        quantiles=measured.quantiles() if isinstance(measured, Timing) else {},
        shape=dict(shape or {}),
        sparsity=dict(sparsity or {}),
        error=error,
        details=dict(details or {}),
        seed=seed,
        **source(device, repository),
    )


def source(device: torch.device | str, repository: str | os.PathLike[str] | None) -> dict[str, Any]:
    """hardware, versions, commit and date of a record made now; repository: a path for `commit`."""
    return {
        "hardware": environment.hardware(device),
        "versions": environment.versions(),
        "commit": environment.commit(repository),
        "date": datetime.now(UTC).isoformat(timespec="microseconds"),  # of no two runs the same
    }


def write_records(path: str | os.PathLike[str], records: Iterable[Stored], *, append: bool = False) -> None:
    """Write `records`, all of one class, as JSON Lines. A failure leaves the old file as it was.

    append:  keep the existing lines before the new ones; an invalid line raises and nothing is written.
    Only one process may append at a time.
    """
    path = Path(path)
    new = list(records)
    kind = RunRecord if new and isinstance(new[0], RunRecord) else Record
    for record in new:
        if not isinstance(record, kind):
            reject("records", f"a {type(record).__name__}", f"{kind.__name__} objects")
    kept = read_records(path, kind) if append and path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(f"{record.to_json()}\n" for record in (*kept, *new)))


def write_run(path: str | os.PathLike[str], records: Sequence[Record]) -> None:
    """Write the records of one run to a JSON Lines file, in place of those that it wrote there before.

    records:  all of one date, which tells runs apart: those of others stay, and other processes may write
              theirs at the same time. A failure leaves the file as it was; TimeoutError where another process
              does not let go of it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f".{path.name}.lock"), wait=_LOCK_SECONDS) as state:
        if state == "busy":
            raise TimeoutError(f"another process has held {path} for {_LOCK_SECONDS:.0f} s")
        kept = read_records(path) if path.exists() else []
        dates = {record.date for record in records}
        write_records(path, [*(record for record in kept if record.date not in dates), *records])


def read_records(path: str | os.PathLike[str], kind: type[Stored] = Record) -> list[Stored]:
    """The records of a JSON Lines file; an error names the file and the line."""
    records = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        try:
            if line.strip():
                records.append(kind.from_json(line.decode()))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return records


def central(measured: Timing | float | None) -> float | None:
    """What a record holds of it: a timing's median."""
    return measured.median if isinstance(measured, Timing) else measured


def _has_default(entry: dataclasses.Field) -> bool:
    return entry.default_factory is not dataclasses.MISSING


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


def _checked_entries(field: str, entries: Any, kinds: tuple[type, ...]) -> dict[str, Any]:
    """A copy of `entries`: string keys, values exactly of one of `kinds`, numbers finite."""
    if not isinstance(entries, dict):
        reject(field, f"a {type(entries).__name__}", f"a dict of string to {_names(kinds)}")
    for key, value in entries.items():
        if not isinstance(key, str):
            reject(f"{field} key", repr(key), "a string")
        _require_kind(f"{field}[{key!r}]", value, kinds)
    return dict(entries)


def _checked_list(field: str, values: Any, kinds: tuple[type, ...]) -> list[Any]:
    """A copy of `values`, each exactly of one of `kinds`, numbers finite."""
    if not isinstance(values, list | tuple):
        reject(field, f"a {type(values).__name__}", f"a list of {_names(kinds)}")
    for place, value in enumerate(values):
        _require_kind(f"{field}[{place}]", value, kinds)
    return list(values)


def _require_kind(field: str, value: Any, kinds: tuple[type, ...]) -> None:
    if type(value) not in kinds or (type(value) is float and not math.isfinite(value)):
        reject(field, repr(value), f"{_names(kinds)} (numbers finite)")


def _names(kinds: tuple[type, ...]) -> str:
    return ", ".join("None" if kind is _NONE else kind.__name__ for kind in kinds)


def _is_utc(date: Any) -> bool:
    try:
        return datetime.fromisoformat(date).utcoffset() == timedelta(0)
    except (TypeError, ValueError):
        return False
