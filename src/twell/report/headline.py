"""The largest gain that the records honestly show, with its baseline and its conditions.

Trained models come before those that were built to be sparse, and whole models before blocks. A gain counts
over the fastest dense contender that ran beside it, and with the lower end of its interval. A gain without a
sparse call comes after all others, and is said to be one. Where nothing was faster, the headline says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._interval import DENSE_GAINS, ENOUGH_ROUNDS
from .._numbers import counted
from ..measure.records import Record
from .document import Fact, Headline
from .inputs import Inputs, Profiled, Run
from .record_names import (
    comparison,
    contender,
    counted_on,
    described,
    gain_over_fastest,
    has_resampled_bounds,
    is_bench,
    is_block,
    is_real,
    is_whole_model,
    ran_dense,
    rivals,
    rounds_of,
    rounds_together,
    says_as_much,
    workload,
)
from .sweep import base_run, sparsest_good
from .wording import RESAMPLED, change, exponent, gigabytes, listed, share, short, times, width_note

_NO_GAIN = 1.005  # beside rounding
_FEWEST_ROUNDS = 4  # the lowest of so many is below their median with 94%
# Whole models that were trained, on text; built to be sparse; blocks of a model, on text; one block.
_RANKS = _REAL, _BUILT, _BLOCKS, _BLOCK = range(4)


@dataclass(frozen=True)
class Gain:
    """low: the end of its interval that counts. rank: 0 is what says most, see `_RANKS`.

    rounds:  behind it, None where nobody noted them.
    resampled:  whether its interval is one of resampled medians.
    width:   a note on blocks that are wider than usual.
    ran_dense:  whether no call ran sparse.
    """

    value: float
    low: float
    high: float
    rank: int
    what: str
    baseline: str
    conditions: str
    rounds: int | None = None
    resampled: bool = False
    width: str = ""
    ran_dense: bool = False
    facts: tuple[Fact, ...] = ()

    @property
    def is_sure(self) -> bool:
        return self.low > _NO_GAIN and (self.rounds is None or self.rounds >= _FEWEST_ROUNDS)

    @property
    def bounds(self) -> str:
        if self.rounds == 1:
            return " One round only."
        if self.low == self.high:
            return ""
        if self.resampled:
            name = RESAMPLED
        elif self.rounds is not None and self.rounds < ENOUGH_ROUNDS:
            name = f"The {self.rounds} rounds"
        else:
            name = "95% interval"
        return f" {name}: {times(self.low)} to {times(self.high)}."


def make_headline(inputs: Inputs) -> Headline:
    title = f"TwELL report: {listed([_short_name(source) for source in inputs.sources])}"
    gains = [*_of_records(inputs.records), *_of_profiles(inputs.profiles)]
    facts: list[Fact] = []
    claim = conditions = width = ""
    if gains:
        # Where a kind shows no gain, the next may.
        best = max(gains, key=lambda gain: (gain.is_sure, not gain.ran_dense, -gain.rank, gain.low))
        claim, note, tone = f"{best.what}: {times(best.value)} as fast as {best.baseline}.", best.what, True
        if best.ran_dense and best.value > 1:
            claim = f"{claim[:-1]}, though no call ran sparse. {DENSE_GAINS}"
            note += (
                "; no call ran sparse: the gain comes from how dense products are computed, not from zeros"
            )
            tone = None
        if not best.is_sure:
            found = (
                f"The nearest: {claim}" if best.value > 1 else f"{best.what}: {times(best.value)} its speed."
            )
            claim = f"Nothing measured here is surely faster than dense. {found}"
        conditions, width = best.conditions + best.bounds, best.width
        good = tone if best.is_sure else False if best.high < 1 else None  # None: nobody can tell
        if best.is_sure:
            conditions += _without_gain(gains, best)
        facts.append(Fact(times(best.value), f"the speed of {best.baseline}", note, good))
        facts += best.facts
    sparse, cost = _of_runs(inputs.runs)
    facts += _active(inputs) + cost
    if not claim:
        claim, sparse = sparse, ""
    return Headline(
        title, claim, [text for text in (sparse, conditions, width, _measured(inputs)) if text], facts[:5]
    )


def _without_gain(gains: Sequence[Gain], best: Gain) -> str:
    """What says as much as the claim or more, and is no gain of ours, whichever contender ran."""
    found: dict[str, Gain] = {}
    for gain in sorted(gains, key=lambda gain: gain.low):
        if gain.rank <= best.rank:
            found[gain.what] = gain  # the best of ours comes last
    others = [gain for gain in found.values() if gain is not best]
    lost = [gain for gain in others if not gain.is_sure]
    dense = [gain for gain in others if gain.is_sure and gain.ran_dense]
    return _named_gains("No sure gain", lost) + _named_gains("Without a sparse call", dense)


def _named_gains(said: str, gains: Sequence[Gain]) -> str:
    words = [f"{gain.what}, {times(gain.value)} as fast as {gain.baseline}" for gain in gains]
    return f" {said}: {'; '.join(words)}." if words else ""


def _short_name(source: str) -> str:
    parts = [part for part in source.rstrip("/").split("/") if part not in ("", ".")] or [source]
    return "/".join(parts[-2:]) if len(parts) > 1 and len(parts[-1]) < 24 else parts[-1]


def _measured(inputs: Inputs) -> str:
    """What went into the report."""
    parts = []
    if inputs.runs:
        tokens = sum(run.tokens for run in inputs.runs)
        parts.append(f"{counted(len(inputs.runs), 'training run')} ({short(tokens)} tokens)")
    if inputs.profiles:
        tokens = sum(one.profile.tokens for one in inputs.profiles)
        models = listed([_short_name(one.profile.model) for one in inputs.profiles])
        parts.append(f"the neurons of {models} on {tokens:,} tokens of text")
    if inputs.records:
        places = {str(r.hardware.get("gpu") or r.hardware.get("cpu")) for r in inputs.records}
        parts.append(f"{' and '.join(_counts(inputs.records))} on {listed(sorted(places))}")
    return f"Measured: {'; '.join(parts)}."


def _counts(records: Sequence[Record]) -> Iterable[str]:
    """Comparisons of `twell bench` have a record per contender; other records stand by themselves."""
    benched = [record for record in records if is_bench(record)]
    others = len(records) - len(benched)
    if benched:
        comparisons = len({comparison(record) for record in benched})
        yield f"{counted(comparisons, 'comparison')} ({counted(len(benched), 'contender')})"
    if others:
        yield counted(others, "other record" if benched else "record")


def _of_records(records: Sequence[Record]) -> Iterable[Gain]:
    weaker = _with_fewer_rivals(records)
    contenders = {(*comparison(record), contender(record)): record for record in records if is_bench(record)}
    for record in records:
        if is_bench(record) and comparison(record) in weaker:
            continue
        if record.unit != "s" or not (is_whole_model(record) or is_block(record)):
            continue
        if record.details.get("doubtful"):  # it computes something else
            continue
        beside = {
            name: other
            for name in rivals(record)
            if (other := contenders.get((*comparison(record), name.replace("-", " ")))) is not None
        }
        doubtful = {name for name, other in beside.items() if other.details.get("doubtful")}
        name, value, low, high = gain_over_fastest(record, doubtful)
        if value is None:
            continue
        yield Gain(
            value,
            low,
            high,
            _REAL
            if is_whole_model(record) and is_real(record)
            else _BUILT
            if is_whole_model(record)
            else _BLOCK,
            described(record),
            name.replace("-", " ") if "/" not in name else name,
            _conditions(record),
            rounds_together(record, beside.get(name, record)),
            has_resampled_bounds(record),
            width_note(record.shape.get("D"), record.shape.get("H")),
            ran_dense(record),
            tuple(_beside(record, records, name)),
        )


def _with_fewer_rivals(records: Sequence[Record]) -> set[tuple]:
    """Comparisons that say less than another one of the same workload, which had more dense contenders.

    A contender counts there only if it computed the same and ran for enough rounds to stand in for these.
    """
    found: dict[tuple, dict[tuple, list[Record]]] = {}  # workload -> comparison -> its contenders
    for record in filter(is_bench, records):
        found.setdefault(workload(record), {}).setdefault(comparison(record), []).append(record)

    def dense(group: list[Record], rounds: int) -> set[str]:
        return {
            contender(record)
            for record in group
            if not is_whole_model(record)
            and not record.details.get("doubtful")
            and says_as_much(rounds_of(record), rounds)
        }

    def is_weaker(group: list[Record], other: list[Record]) -> bool:
        rounds = max(rounds_of(record) or 0 for record in group)
        return dense(group, 0) < dense(other, rounds)

    return {
        some
        for same in found.values()
        for some, group in same.items()
        if any(is_weaker(group, other) for other in same.values())
    }


def _conditions(record: Record) -> str:
    shape, where = record.shape, record.hardware
    parts = [str(where.get("gpu") or where.get("cpu"))]
    if is_bench(record):
        parts.insert(0, contender(record))
    if not where.get("gpu"):
        parts[-1] += f", {_threads(where)}"
    for name, form in (
        ("dtype", "{}"),
        ("layers", "{} layers"),
        ("D", "hidden size {:,}"),
        ("H", "{:,} neurons"),
    ):
        if name in shape:
            parts.append(form.format(shape[name]))
    nnz = record.sparsity.get("nnz", record.sparsity.get("wanted_nnz"))
    if nnz is not None:
        parts.append(f"{short(nnz)} of them active per token {counted_on(record)}".rstrip())
    if shape.get("text") == "random tokens" or record.what.startswith("bench_training"):
        parts.append("a model built to be this sparse, on random tokens")
    return f"Conditions: {', '.join(parts)}; commit {record.commit}."


def _threads(hardware: Mapping[str, Any]) -> str:
    threads = hardware.get("torch_threads")
    return "1 thread" if threads == 1 else f"{threads} threads"


def _beside(record: Record, records: Sequence[Record], name: str) -> Iterable[Fact]:
    """Energy and memory against the same contender."""
    other = next(
        (r for r in records if comparison(r) == comparison(record) and r.what.rsplit("/", 1)[-1] == name),
        None,
    )
    if other is None:
        return
    for key, label in (("millijoules_per_token", "energy per token"), ("peak_bytes", "peak memory")):
        ours, theirs = record.details.get(key), other.details.get(key)
        if ours and theirs:
            good = None if abs(ours / theirs - 1) < _NO_GAIN - 1 else ours < theirs
            shown = (
                f"{gigabytes(theirs)} to {gigabytes(ours)}"
                if key == "peak_bytes"
                else f"{short(theirs)} to {short(ours)} mJ"
            )
            yield Fact(change(ours / theirs), label, f"{shown}, against {name.replace('-', ' ')}", good)


def _of_profiles(profiles: Sequence[Profiled]) -> Iterable[Gain]:
    for one in profiles:
        timed = [layer.speed for layer in one.profile.layers if layer.speed is not None]
        if not timed:
            continue
        value = sum(speed.dense_ms for speed in timed) / sum(speed.auto_ms for speed in timed)
        where = one.profile.hardware
        place = where.get("gpu") or f"{where.get('cpu')}, {_threads(where)}"
        low, high = (
            sum(speed.dense_ms for speed in timed)
            / sum(speed.dense_ms / getattr(speed.interval, end) for speed in timed)
            for end in ("low", "high")
        )
        yield Gain(
            value,
            low,
            high,
            _BLOCKS,
            f"{_blocks(len(timed))} of {_short_name(one.profile.model)}",
            "dense PyTorch",
            f"Conditions: automatic plan, {place}, {one.profile.dtype}, {timed[0].tokens:,} tokens of the "
            "profiled text at once; blocks alone, without attention; medians of interleaved calls.",
            width=width_note(one.profile.layers[0].hidden, one.profile.layers[0].neurons),
            ran_dense=all(speed.auto_path == "dense" for speed in timed),
        )


def _blocks(count: int) -> str:
    return "The feed-forward block" if count == 1 else f"All {count} feed-forward blocks"


def _of_runs(runs: Sequence[Run]) -> tuple[str, list[Fact]]:
    """What sparsity costs: the sparsest run whose loss stays near that of lambda 0."""
    run = sparsest_good(runs)
    if run is None or run.nnz is None:
        return "", []
    neurons = run.config.model.intermediate_size
    text = (
        f"With lambda {exponent(run.l1)}, a token activates {short(run.nnz)} of {neurons:,} neurons per "
        f"layer ({share(run.nnz / neurons)}) on {run.nnz_text}"
    )
    base = base_run(run, runs)
    if base is None or base is run or base.loss is None or run.loss is None:
        return f"{text}.", []
    side = "above" if run.loss >= base.loss else "below"
    text += f", at a cross-entropy {abs(run.loss / base.loss - 1):.1%} {side} that of lambda 0"
    note = f"{base.loss:.3f} to {run.loss:.3f}, lambda {exponent(run.l1)} against 0"
    return f"{text}.", [Fact(change(run.loss / base.loss), "cross-entropy", note, None)]


def _active(inputs: Inputs) -> list[Fact]:
    """How sparse the model is: of a profile, else of a run."""
    if inputs.profiles:
        profile = inputs.profiles[0].profile
        return [
            Fact(
                share(profile.mean_share),
                "of the neurons active per token",
                f"{short(profile.mean_nnz)} of {profile.layers[0].neurons:,} in each layer, on average over "
                f"the {profile.tokens:,} profiled tokens",
            )
        ]
    run = sparsest_good(inputs.runs)
    if run is None or run.nnz is None:
        return []
    neurons = run.config.model.intermediate_size
    return [
        Fact(
            share(run.nnz / neurons),
            "of the neurons active per token",
            f"{short(run.nnz)} of {neurons:,}, on {run.nnz_text}",
        )
    ]
