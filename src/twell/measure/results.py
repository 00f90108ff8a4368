"""What contenders of a comparison took, from one process or several, and records of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from .._interval import Interval, paired_gain
from .records import Record, central
from .timing import Timing

BASELINE = "dense-eager"
_DENSE = ("dense", "best-dense")
_LARGEST = ("largest_difference", "peak_bytes", "block_error", "hidden_error", "doubtful")
_SMALLEST = ("sequences", "against_float32")  # what holds in every process
_AND = " and "
_COUNTED = ("noisy_rounds",)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One contender of one workload, in one process.

    workload, contender:  words of a record's name.
    process:   the number of the process.
    meaning:   the contender in plain words.
    shape:     what was run; equal for all contenders of a workload.
    tokens:    of one call.
    seconds:   of one call, by round. Rounds of all contenders belong together: they ran in turn.
    joules:    of one call, by window of energy.
    power:     entries for the record's hardware: clocks, power and temperature of the rounds, and those of
               the windows of energy under names with "energy_" before them.
    details:   numbers of this contender: peak_bytes, same_tokens, largest_difference...
    dense_reason:  why most of its dense calls ran dense, where that is known.
    error:     relative difference of the logits.
    failure:   why there is nothing, where it could not run.
    """

    workload: str
    contender: str
    meaning: str
    shape: dict[str, int | str | bool]
    tokens: int
    process: int = 0
    seconds: tuple[float, ...] = ()
    joules: tuple[float, ...] = ()
    power: dict[str, Any] = field(default_factory=dict)
    sparsity: dict[str, float] = field(default_factory=dict)
    details: dict[str, float] = field(default_factory=dict)
    dense_reason: str = ""
    error: float | None = None
    failure: str | None = None

    @property
    def group(self) -> tuple:
        """Equal for contenders that were compared with each other."""
        return self.workload, *sorted(self.shape.items())

    @property
    def key(self) -> tuple:
        return *self.group, self.contender

    def plus(self, **changes: Any) -> Measured:
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Merged:
    """A contender over all processes.

    baseline:  the contender that it is compared with first: dense eager, or the first that ran.
    gains:     by dense contender, how many times faster this one is.
    """

    processes: tuple[Measured, ...]
    baseline: str | None
    gains: dict[str, Interval]

    @property
    def gain(self) -> Interval | None:
        return self.gains.get(self.baseline)

    @property
    def first(self) -> Measured:
        """Of the first process in which it ran, if it ran in any."""
        return next((one for one in self.processes if one.seconds), self.processes[0])

    @property
    def meaning(self) -> str:
        """In plain words; by process where they differ, as best dense's do if another way won."""
        ran = [one for one in self.processes if one.seconds] or self.processes[:1]
        if len({one.meaning for one in ran}) == 1:
            return ran[0].meaning
        return "; ".join(f"process {one.process + 1}: {one.meaning}" for one in ran)

    @property
    def dense_reason(self) -> str:
        return next((one.dense_reason for one in self.processes if one.dense_reason), "")

    @property
    def failure(self) -> str | None:
        return None if self.seconds else next((m.failure for m in self.processes if m.failure), None)

    @property
    def seconds(self) -> list[float]:
        return [sample for measured in self.processes for sample in measured.seconds]

    @property
    def value(self) -> Timing | float | None:
        """What a record holds: seconds of a call, or how many sequences fit."""
        return Timing(tuple(self.seconds)) if self.seconds else self.detail("sequences")

    @property
    def tokens_per_ms(self) -> float | None:
        return self.first.tokens / (median(self.seconds) * 1e3) if self.seconds else None

    @property
    def joules(self) -> float | None:
        """Of one call."""
        found = [joules for measured in self.processes for joules in measured.joules]
        return median(found) if found else None

    @property
    def millijoules_per_token(self) -> float | None:
        return None if self.joules is None else self.joules / self.first.tokens * 1e3

    @property
    def power(self) -> dict[str, Any]:
        return overall_power([one.power for one in self.processes])

    @property
    def error(self) -> float | None:
        return max((m.error for m in self.processes if m.error is not None), default=None)

    @property
    def difference(self) -> float | None:
        """The largest difference of a logit, relative to the largest logit; else the error."""
        largest = self.detail("largest_difference")
        return self.error if largest is None else largest

    def detail(self, name: str) -> float | None:
        """The mean over processes; the largest of what must not be large, the smallest of what has to hold in
        all of them; the sum of what is counted."""
        found = [m.details[name] for m in self.processes if name in m.details]
        if not found:
            return None
        if name in _COUNTED:
            return sum(found)
        if name in _SMALLEST:
            return min(found)
        return max(found) if name in _LARGEST else fmean(found)


def overall_power(several: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Entries of several processes or windows as one: means, the highest temperature, every method."""
    overall: dict[str, Any] = {}
    for name in dict.fromkeys(name for entries in several for name in entries):
        found = [entries[name] for entries in several if entries.get(name) is not None]
        if not found:
            overall[name] = None
        elif name.endswith("temperature_c"):
            overall[name] = max(found)
        elif isinstance(found[0], str):
            methods = dict.fromkeys(method for one in found for method in one.split(_AND))
            overall[name] = _AND.join(methods)
        else:
            whole = all(isinstance(one, int) for one in found)
            overall[name] = round(fmean(found), None if whole else 1)
    return overall


def merge(measured: Iterable[Measured]) -> list[Merged]:
    """Contenders over all processes, in the order in which they came."""
    by_key: dict[tuple, list[Measured]] = {}
    for one in measured:
        by_key.setdefault(one.key, []).append(one)
    baselines = _baselines(by_key)
    merged = []
    for processes in by_key.values():
        group, name = processes[0].group, processes[0].contender
        theirs = baselines.get(group)
        gains = {}
        for others in by_key.values():
            other = others[0].contender
            rival = other.startswith(_DENSE) or others is theirs
            if others[0].group == group and other != name and rival:
                pairs = _side_by_side(others, processes)
                if pairs:
                    gains[other] = paired_gain(*zip(*pairs, strict=True))
        merged.append(Merged(tuple(processes), theirs[0].contender if theirs else None, gains))
    return merged


def _side_by_side(
    others: Sequence[Measured], processes: Sequence[Measured]
) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """Seconds of both, of each process in which both ran."""
    theirs = {measured.process: measured.seconds for measured in others}
    pairs = [(theirs.get(measured.process, ()), measured.seconds) for measured in processes]
    return [(some, same) for some, same in pairs if some and same]


def _ran(measured: Measured) -> bool:
    return bool(measured.seconds) or "sequences" in measured.details


def _share_a_process(one: Merged, other: Merged) -> bool:
    """Whether both ran in one, so that they may be compared."""
    mine, theirs = ({m.process for m in some.processes if _ran(m)} for some in (one, other))
    return not mine.isdisjoint(theirs)


def _baselines(by_key: Mapping[tuple, list[Measured]]) -> dict[tuple, list[Measured]]:
    """By group: dense eager, or the first that ran."""
    found: dict[tuple, list[Measured]] = {}
    for processes in by_key.values():
        group = processes[0].group
        if any(map(_ran, processes)) and (group not in found or processes[0].contender == BASELINE):
            found[group] = processes
    return found


def records_of(
    what: str, measured: Iterable[Measured], *, source: Mapping[str, Any], seed: int
) -> list[Record]:
    """A record for each contender that ran: its value, and everything else as details.

    what:    the first word of their names.
    source:  hardware, versions, commit and date (`records.source`).
    """
    merged = merge(measured)
    sparsities = _sparsities(merged)
    count = 1 + max((m.process for one in merged for m in one.processes), default=0)
    records = []
    for one in merged:
        if one.value is None:
            continue
        group = [other for other in merged if other.first.group == one.first.group and other is not one]
        theirs = next((other for other in group if other.first.contender == one.baseline), None)
        if theirs is not None and not _share_a_process(one, theirs):
            theirs = None
        value = one.value
        records.append(
            Record(
                what=f"{what}/{one.first.workload}/{one.first.contender}",
                baseline=None if theirs is None else theirs.first.contender,
                baseline_value=None if theirs is None else central(theirs.value),
                value=central(value),
                unit="s" if one.seconds else "sequences",
                quantiles=value.quantiles() if isinstance(value, Timing) else {},
                shape={**one.first.shape, "meaning": one.meaning},
                sparsity=sparsities[one.first.group],
                error=one.error,
                details=_details(one),
                rounds=_rounds(one, count),
                seed=seed,
                **{**source, "hardware": {**source["hardware"], **one.power}},
            )
        )
    return records


def _sparsities(merged: Iterable[Merged]) -> dict[tuple, dict[str, float]]:
    """By group, so that all its contenders have the same: the mean over processes."""
    found: dict[tuple, dict[int, dict[str, float]]] = {}
    for measured in (measured for one in merged for measured in one.processes):
        found.setdefault(measured.group, {}).setdefault(measured.process, measured.sparsity)
    return {
        group: {
            name: fmean(one[name] for one in by_process.values()) for name in next(iter(by_process.values()))
        }
        for group, by_process in found.items()
    }


def _rounds(one: Merged, processes: int) -> list[list[float]]:
    """By process, also by those in which it did not run."""
    if not one.seconds:
        return []
    seconds = {measured.process: list(measured.seconds) for measured in one.processes}
    return [seconds.get(process, []) for process in range(processes)]


def _details(one: Merged) -> dict[str, float]:
    names = {name: None for measured in one.processes for name in measured.details}
    details = {
        "tokens": one.first.tokens,
        "processes": sum(bool(m.seconds) for m in one.processes) or len(one.processes),
        "rounds": len(one.first.seconds),
        **{name: one.detail(name) for name in names},
    }
    for other, gain in one.gains.items():
        details |= {
            f"over/{other}": gain.middle,
            f"over/{other}/low": gain.low,
            f"over/{other}/high": gain.high,
        }
    if one.joules is not None:
        details |= {
            "millijoules_per_token": one.millijoules_per_token,
            "energy_windows": sum(len(m.joules) for m in one.processes),
        }
    return details
