"""Finds out what the inputs of a report are, and reads them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from .._errors import reject
from .._files import read_json_object
from ..measure.records import Record, RunRecord, read_records
from ..profiling.schema import Profile, read_profile
from .record_names import broken, comparison, is_bench, rounds_of, says_as_much, workload

if TYPE_CHECKING:
    from ..train.config import RunConfig

ACCEPTED = (
    "a run's folder (of `twell train`), a profile.json or its folder (of `twell profile`), "
    "a .jsonl file of records (of `twell bench`), or a reproduction's folder alone (of `twell reproduce`)"
)
PROFILE = "profile.json"
_HELD_OUT, _TRAINING = "held-out text", "training text"


@dataclass(frozen=True)
class Run:
    """A training run, from its folder or from a record.

    name:         unique in a report.
    source:       what the reader gave.
    logs:         lines with "tokens", "ce_loss" and, of sparse models, "nnz"...
    evaluations:  lines with "tokens" and "eval_loss".
    summary:      empty of a run that is not finished.
    place:        hardware, versions, commit and date; empty where nobody noted them.
    recorded:     whether it comes from a record, which does not say if runs shared the machine.
    """

    name: str
    source: str
    config: RunConfig
    logs: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    summary: dict[str, Any]
    command: str
    place: dict[str, Any] = field(default_factory=dict)
    recorded: bool = False

    @property
    def dense(self) -> bool:
        return self.config.model.dense

    @property
    def l1(self) -> float | None:
        """Lambda; None of a dense model."""
        return None if self.dense else self.config.recipe.l1

    @property
    def held_out(self) -> float | None:
        """Held-out cross-entropy."""
        found = self.summary.get("held_out_ce_loss")
        if found is None and self.evaluations:
            found = self.evaluations[-1]["eval_loss"]
        return found

    @property
    def loss(self) -> float | None:
        """Held-out cross-entropy, or training's if no text was held out."""
        return self.held_out if self.held_out is not None else self.last("ce_loss")

    @property
    def nnz(self) -> float | None:
        """Held-out if there is such text."""
        return self._figure("nnz")[0]

    @property
    def nnz_text(self) -> str:
        """What `nnz` was counted on."""
        return self._figure("nnz")[1]

    @property
    def dead(self) -> float | None:
        return self._figure("dead")[0]

    @property
    def dead_text(self) -> str:
        """What `dead` was counted on: the more tokens, the fewer neurons stay silent."""
        window, text = self._figure("dead_window")
        return text if window is None else f"{window:,} tokens of {text}"

    @property
    def tokens(self) -> int:
        return self.logs[-1]["tokens"]

    def last(self, name: str) -> float | None:
        return self.logs[-1].get(name)

    def late(self, name: str) -> float | None:
        """The median over the second half of the logs, after which layers have switched."""
        values = [line[name] for line in self.logs[len(self.logs) // 2 :] if line.get(name) is not None]
        return median(values) if values else None

    def by_layer(self, name: str) -> list[float]:
        """The last figures of each layer: held-out ones if there are any."""
        return self._layers(name)[0]

    def by_layer_text(self, name: str) -> str:
        """What `by_layer` was counted on."""
        return self._layers(name)[1]

    def _figure(self, name: str) -> tuple[float | None, str]:
        """The last figure, held-out if there is such text, and the text."""
        found = self.summary.get(f"held_out_{name}")
        if found is None and self.evaluations:
            found = self.evaluations[-1].get(f"eval_{name}")
        return (self.last(name), _TRAINING) if found is None else (found, _HELD_OUT)

    def _layers(self, name: str) -> tuple[list[float], str]:
        lines = [*self.logs[-1:], *self.evaluations[-1:]]
        for prefix, text in (("eval_", _HELD_OUT), ("", _TRAINING)):
            for line in reversed(lines):
                found = [line.get(f"{prefix}{name}_layer_{i}") for i in range(self.config.model.layers)]
                if found and all(value is not None for value in found):
                    return found, text
        return [], ""


@dataclass(frozen=True)
class Profiled:
    """A profile, and the path that it was read from."""

    name: str
    source: str
    profile: Profile


@dataclass(frozen=True)
class Inputs:
    """sources: paths as the reader gave them."""

    sources: tuple[str, ...]
    runs: tuple[Run, ...]
    profiles: tuple[Profiled, ...]
    records: tuple[Record, ...]


def read_inputs(paths: Sequence[str | Path]) -> Inputs:
    """Everything that the files and folders hold. ValueError names a path that is nothing we know."""
    runs: list[Run] = []
    profiles: list[Profiled] = []
    records: list[Record] = []
    for path in map(Path, paths):
        for found in _read(path):
            kind = {Run: runs, Profiled: profiles}.get(type(found), records)
            kind.append(found)
    if not paths:
        reject("input", "nothing", ACCEPTED)
    return Inputs(tuple(map(str, paths)), _named(runs), _named(profiles), tuple(_latest(records)))


def _read(path: Path) -> Sequence[Run | Profiled | Record]:
    if path.is_dir():
        if (path / PROFILE).is_file():
            return [_profiled(path / PROFILE, path.resolve().name, path)]
        if (path / "config.yaml").is_file():
            return [_run(path)]
        inside = path.parent if (path.parent / "config.yaml").is_file() else None
        hint = f"; did you mean {inside}?" if inside else ""
        reject("input", f"{path}, a folder without config.yaml or {PROFILE}", ACCEPTED + hint)
    if not path.is_file():
        reject("input", f"{path}, which does not exist", ACCEPTED)
    if path.suffix == ".json":
        return [_profiled(path, path.resolve().parent.name if path.name == PROFILE else path.stem, path)]
    if path.suffix != ".jsonl":
        reject("input", str(path), ACCEPTED)
    return _records(path)


def _profiled(file: Path, name: str, given: Path) -> Profiled:
    return Profiled(name, str(given), read_profile(file))


def _records(path: Path) -> Sequence[Run | Record]:
    first = next((line for line in path.read_bytes().split(b"\n") if line.strip()), b"")
    try:
        keys = set(json.loads(first)) if first else set()
    except (ValueError, TypeError):
        reject("input", f"{path}, which is no JSON Lines file", ACCEPTED)
    if not first:
        reject("input", f"{path}, which is empty", ACCEPTED)
    if {"step", "tokens"} <= keys:
        reject("input", f"{path}, the log of a run", f"the run's folder: {path.parent}")
    if {"preset", "curve"} <= keys:
        latest = {record.what: record for record in read_records(path, RunRecord)}
        return [_recorded_run(record, path) for record in latest.values()]
    if not {"what", "unit"} <= keys:
        reject("input", f"{path}, whose lines are no records", ACCEPTED)
    records = read_records(path)
    for record in records:
        if entries := broken(record):
            found = f"{path}, where {record.what} has no usable {', '.join(entries)}"
            reject("input", found, "records as `twell bench` writes them")
    return records


def _run(folder: Path) -> Run:
    from ..train.log_lines import read_metrics
    from ..train.run_folder import CONFIG, ENVIRONMENT, METRICS, SUMMARY
    from ..train.settings import read_settings, run_config

    config = run_config(read_settings(folder / CONFIG))
    lines = read_metrics(folder / METRICS)
    logs = [line for line in lines if "ce_loss" in line and "tokens" in line]
    if not logs:
        reject("input", f"{folder}, a run that has logged nothing yet", "a run after its first log")
    return Run(
        name=folder.resolve().name,
        source=str(folder),
        config=config,
        logs=logs,
        evaluations=[line for line in lines if "eval_loss" in line and "tokens" in line],
        summary=read_json_object(folder / SUMMARY) or {},
        command=shlex.join(["twell", "train", "--config", str(folder / CONFIG), "--out", "NEW_FOLDER"]),
        place=_place(read_json_object(folder / ENVIRONMENT)),
    )


def _place(noted: dict[str, Any] | None) -> dict[str, Any]:
    """Empty for a run that has not finished, and for a damaged file."""
    kinds = {"hardware": dict, "versions": dict, "commit": str, "date": str}
    whole = noted is not None and all(isinstance(noted.get(name), kind) for name, kind in kinds.items())
    return noted if whole else {}


def _recorded_run(record: RunRecord, path: Path) -> Run:
    from ..train.presets import preset
    from ..train.settings import run_config, with_overrides

    columns = record.curve
    rows = zip(*columns.values(), strict=True)
    logs = [
        {name: value for name, value in zip(columns, row, strict=True) if value is not None} for row in rows
    ]
    return Run(
        name=record.what.partition("/")[2] or record.what,
        source=str(path),
        config=run_config(with_overrides(preset(record.preset), record.settings)),
        logs=[*logs[:-1], {**logs[-1], **record.last}] if logs else [record.last],
        evaluations=[],
        summary=record.summary,
        command=shlex.join(["twell", "train", "--preset", record.preset, *record.settings]),
        place={name: getattr(record, name) for name in ("hardware", "versions", "commit", "date")},
        recorded=True,
    )


def _named(found: list[Any]) -> tuple[Any, ...]:
    """With names that tell them apart: the path where two have the same."""
    names = [one.name for one in found]
    return tuple(
        one if names.count(one.name) == 1 else type(one)(**{**vars(one), "name": one.source}) for one in found
    )


def _latest(records: list[Record]) -> list[Record]:
    """The last record of whatever was measured again on the same device."""
    found: dict[tuple, Record] = {}
    kept = _latest_comparisons([record for record in records if is_bench(record)])
    for record in records:
        if is_bench(record):
            if comparison(record) in kept:
                found[(record.what, *comparison(record))] = record
            continue
        shape = sorted((name, value) for name, value in record.shape.items() if name not in _RESULTS)
        wanted = record.sparsity.get("wanted_nnz", record.sparsity.get("nnz"))
        place = record.hardware.get("gpu") or record.hardware.get("cpu")
        key = (record.what, record.baseline, str(shape), wanted, place, record.hardware.get("torch_threads"))
        found.pop(key, None)
        found[key] = record
    return list(found.values())


def _latest_comparisons(records: list[Record]) -> set[tuple]:
    """Without those whose contenders have all run together again: what ran apart is no comparison.

    A run that somebody interrupted after few rounds gives way to a whole one, older or newer.
    """
    members: dict[tuple, list[Record]] = {}
    runs: dict[tuple, list[tuple]] = {}  # workload -> comparisons
    for record in records:
        run = comparison(record)
        if run not in members:
            runs.setdefault(workload(record), []).append(run)
        members.setdefault(run, []).append(record)

    def stands_in(other: tuple, run: tuple) -> bool:
        if not {r.what for r in members[other]} >= {r.what for r in members[run]}:
            return False
        count, others = (max((rounds_of(r) or 0 for r in members[one]), default=0) for one in (run, other))
        newer = members[other][0].date > members[run][0].date
        return says_as_much(others, count) and (newer or not says_as_much(count, others))

    return {run for same in runs.values() for run in same if not any(stands_in(one, run) for one in same)}


# Entries of a shape that say what came out, not what was run.
_RESULTS = ("meaning", "union", "paths", "sparse_calls", "same_tokens", "kept", "cross_entropy")
