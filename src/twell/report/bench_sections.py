"""Sections of `twell bench`: contenders side by side, in speed, memory and energy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .._interval import DENSE_GAINS, MEANING
from .._numbers import digits
from ..measure.records import Record
from .chart import Bar, Bars
from .document import Block, Figure, Figures, Paragraph, Section, Table
from .record_names import (
    comparison,
    contender,
    counted_on,
    gain_over_fastest,
    has_resampled_bounds,
    is_bench,
    model_name,
    ran_dense,
    rounds_of,
    size_of,
)
from .wording import RESAMPLED, gigabytes, optional, seconds, share, short, times

_TITLES = {
    "forward": "Forward pass",
    "generation": "Generation",
    "step": "Training step",
    "checkpointed": "Training step, with checkpointing",
    "micro-batch": "Largest micro-batch",
}


def bench_sections(records: Sequence[Record]) -> Iterator[Section]:
    groups: dict[tuple, list[Record]] = {}
    for record in filter(is_bench, records):
        groups.setdefault(comparison(record), []).append(record)
    ordered = sorted(groups.values(), key=lambda group: _place(group[0]))
    titles = _titles([group[0] for group in ordered])
    for number, (title, group) in enumerate(zip(titles, ordered, strict=True)):
        first = group[0]
        if first.unit == "s":
            yield Section(title, [*_timed(group, f"bench-{number}")])
        else:
            rows = [(contender(r), f"{r.value:.0f}", str(r.shape.get("meaning", ""))) for r in group]
            said = Paragraph(f"{_setting(first)}.")
            yield Section(title, [said, Table(("", first.unit, "what it is"), rows, left=(0, 2))])


def _place(record: Record) -> tuple[int, bool, int]:
    """By workload; GPUs before CPUs, deep models before shallow ones."""
    name = record.what.split("/")[1]
    place = list(_TITLES).index(name) if name in _TITLES else len(_TITLES)
    return place, not record.hardware.get("gpu"), -int(record.shape.get("layers", 0))


def _titles(firsts: Sequence[Record]) -> list[str]:
    """One for each comparison; where some are equal, what else tells them apart is added."""
    titles = [f"{_TITLES.get(r.what.split('/')[1], r.what)}: {_told_apart(r)}" for r in firsts]
    for distinction in (
        lambda r: str(r.shape.get("precision", r.shape.get("dtype", ""))),
        lambda r: str(r.hardware.get("gpu") or r.hardware.get("cpu")),
        lambda r: str(r.shape.get("text", "")),
        lambda r: r.date[:10],
        lambda r: r.date[11:16],
        lambda r: f"commit {r.commit}",
    ):
        words: dict[str, set[str]] = {}
        for title, record in zip(titles, firsts, strict=True):
            words.setdefault(title, set()).add(distinction(record))
        titles = [
            f"{title}, {distinction(record)}" if len(words[title]) > 1 else title
            for title, record in zip(titles, firsts, strict=True)
        ]
    return titles


def _told_apart(record: Record) -> str:
    """What tells its comparison from others of the same kind."""
    shape, nnz = record.shape, record.sparsity.get("nnz")
    layers = f"{shape['layers']} layers" if "layers" in shape else ""
    active = "" if nnz is None else f"{short(nnz) if nnz < 10 else round(nnz)} neurons active"
    checkpoints = "with checkpointing" if record.unit != "s" and shape.get("checkpointing") else ""
    parts = model_name(record), layers, size_of(record), active, checkpoints
    return ", ".join(part for part in parts if part)


def _timed(group: list[Record], name: str) -> Iterator[Block]:
    yield Paragraph(_conditions(group))
    yield Figures(_figures(group, name))
    baseline = next((r.baseline for r in group if r.baseline), "")
    columns = {
        "": contender,
        "tokens/ms": lambda r: "" if _rate(r) is None else digits(_rate(r), 4),
        "time": lambda r: seconds(r.value),
        f"over {baseline.replace('-', ' ')}": _gain,
        "mJ/token": _energy,
        "peak memory": lambda r: gigabytes(r.details["peak_bytes"]) if "peak_bytes" in r.details else "",
        "difference": lambda r: optional(r.details.get("largest_difference"), ".1e"),
        "loss": lambda r: optional(r.details.get("loss"), ".5f"),
        "hidden states": lambda r: optional(r.details.get("hidden_error"), ".1e"),
        "error of blocks": lambda r: optional(r.details.get("block_error"), ".1e"),
        "same tokens": lambda r: optional(r.details.get("same_tokens_as_dense"), ".1%"),
        "what it is": lambda r: str(r.shape.get("meaning", "")),
    }
    cells = {title: [make(record) for record in group] for title, make in columns.items()}
    shown = [title for title, column in cells.items() if any(column)]
    rows = list(zip(*(cells[title] for title in shown), strict=True))
    strong = [place for place, record in enumerate(group) if _ours(record)]
    yield Table(shown, rows, left=(0, len(shown) - 1), strong=strong, caption=_legend(group))


def _figures(group: list[Record], name: str) -> list[Figure]:
    bars = [Bar(contender(r), _rate(r), digits(_rate(r), 4), _ours(r)) for r in group if _rate(r)]
    figures = []
    if bars:
        figures.append(Figure(f"{name}-speed", Bars("Speed", "tokens per millisecond; more is better", bars)))
    for key, title, unit, form in (
        ("peak_bytes", "Peak memory", "weights, optimiser and what a call takes; less is better", gigabytes),
        (
            "millijoules_per_token",
            "Energy",
            "millijoules per token; less is better",
            lambda v: f"{digits(v)} mJ",
        ),
    ):
        bars = [
            Bar(contender(r), r.details[key], form(r.details[key]), _ours(r))
            for r in group
            if key in r.details
        ]
        if len(bars) > 1:
            figures.append(Figure(f"{name}-{key.split('_')[0]}", Bars(title, unit, bars)))
    return figures


def _ours(record: Record) -> bool:
    return contender(record).startswith("ours")


def _rate(record: Record) -> float | None:
    """Tokens per millisecond."""
    tokens = record.details.get("tokens")
    return None if tokens is None else tokens / record.value / 1e3


def _energy(record: Record) -> str:
    value = record.details.get("millijoules_per_token")
    return "" if value is None else digits(value)


def _gain(record: Record) -> str:
    name = f"over/{record.baseline}"
    if name not in record.details:
        return ""
    low, high = (record.details.get(f"{name}/{end}") for end in ("low", "high"))
    # A line break, which only narrow screens show: they would hide the interval.
    interval = "" if low is None or high is None else f"\n({low:.2f}-{high:.2f})"
    return times(record.details[name]) + interval


def _over_fastest(group: list[Record]) -> str:
    """A sentence; empty where the fastest dense contender is the baseline, over which the table has gains."""
    doubtful = {r.what.rsplit("/", 1)[-1] for r in group if r.details.get("doubtful")}
    gains = []
    for record in group:
        name, value, low, high = gain_over_fastest(record, doubtful)
        if _ours(record) and value is not None and name != record.baseline:
            gains.append(f"{contender(record)} {times(value)} ({low:.2f}-{high:.2f})")
    return f" Over the fastest dense contender: {', '.join(gains)}." if gains else ""


def _conditions(group: list[Record]) -> str:
    record = group[-1]
    shape, sparsity = record.shape, record.sparsity
    parts = [_setting(record)]
    if "nnz" in sparsity:
        span = ""
        if "nnz_least" in sparsity:
            span = f" ({short(sparsity['nnz_least'])} to {short(sparsity['nnz_most'])} by layer)"
        parts.append(f"{short(sparsity['nnz'])} active neurons per token {counted_on(record)}{span}")
    text = shape.get("text")
    if text == "random tokens" or "text" not in shape:
        parts.append("weights built to be this sparse, random tokens")
    else:
        parts.append(f"real {text}")
    rounds = rounds_of(record)
    timed = f" Medians of {rounds} interleaved rounds." if rounds else ""
    return f"{', '.join(parts)}.{timed}{_over_fastest(group)}"


def _setting(record: Record) -> str:
    """The machine, the model's sizes and the precision."""
    shape, where = record.shape, record.hardware
    parts = [str(where.get("gpu") or where.get("cpu"))]
    parts += [f"{shape['layers']} layers" if "layers" in shape else ""]
    parts += [f"{name} {shape[name]:,}" for name in ("D", "H", "vocabulary") if name in shape]
    parts.append(str(shape.get("precision", shape.get("dtype", ""))))
    parts.append(f"in {shape['memory_gib']} GiB" if "memory_gib" in shape else "")
    return ", ".join(part for part in parts if part)


def _legend(group: list[Record]) -> str:
    parts = []
    if any("over" in name for r in group for name in r.details):
        resampled = any(map(has_resampled_bounds, group))
        parts.append(
            f"In brackets: {f'{RESAMPLED}, as earlier versions had them' if resampled else MEANING}."
        )
    if any("against_float32" in r.details for r in group):
        wider = "float64" if group[0].shape.get("dtype") == "float32" else "float32"
        against = f"the same model in {wider}" if group[0].details.get("against_float32") else "dense eager"
        parts.append(f"Difference: largest of a logit from {against}, over the largest logit.")
    if any("same_tokens_as_dense" in r.details for r in group):
        parts.append("Same tokens: positions whose next token is dense eager's.")
    if any("block_error" in r.details for r in group):
        parts.append(
            "Hidden states and blocks: relative errors against a wider dtype; of blocks the largest."
        )
    for record in group:
        if record.details.get("doubtful"):
            parts.append(f"{contender(record)} computes something else: its speed means nothing.")
        sparse = record.details.get("sparse_share")
        if ran_dense(record):
            parts.append(f"No call of {contender(record)} ran sparse. {DENSE_GAINS}")
        elif sparse is not None and sparse < 1:
            parts.append(
                f"Dense calls of {contender(record)}: {share(1 - sparse)}, where sparsity does not pay."
            )
    return " ".join(parts)
