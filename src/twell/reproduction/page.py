"""The report of a reproduction: every experiment with our figures beside the paper's, as a page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..report.chart import COLOURS, Bar, Bars, Chart, Reference, Series
from ..report.document import Block, Commands, Fact, Figure, Figures, Headline, Paragraph, Report, Section
from ..report.document import Table as PageTable
from ..report.wording import change, share, short, times
from . import paper
from .recipes import BASE_MODEL, DENSE, SCALES, SPARSE, experiments_of
from .recipes import short as short_l1
from .results import Table, legend, tables, where

_PAPER = "the paper's 1.5B"
# Where the title does not ask it.
_QUESTIONS = {
    "activation": "What does ReLU cost against SiLU?",
    "gate": "Do blocks without a gate gain as well?",
    "dead": "Does care for dead neurons pay?",
}
_WORKLOADS = (("forward", "forward pass"), ("step", "training step"))

Runs = Mapping[str, Mapping[str, Any]]


def make_page(results: Mapping[str, Any]) -> Report:
    """results: as in results.json."""
    sections = [
        Section(table.title, [*_experiment(table, results)]) for table in tables(results) if table.rows
    ]
    return Report(_headline(results), [*sections, *_all_runs(results), *_origin(results)])


def _headline(results: Mapping[str, Any]) -> Headline:
    scale = SCALES[results["scale"]]
    title = f"The paper's experiments at scale {results['scale']}"
    finished = {name: run for name, run in results["runs"].items() if run.get("summary")}
    notes = [
        f"{len(finished)} training runs of {_tokens(finished)} tokens, one seed each (the paper's 1.5B read "
        f"31.5 billion tokens). Lambda is {scale.l1_factor:g} times the paper's, since short runs give the "
        "penalty fewer steps to act in.",
        f"Measured on {where(results)}.",
    ]
    run, base = finished.get(SPARSE), finished.get(DENSE)
    if run is None:
        return Headline(title, "The run with the recommended penalty has not finished yet.", notes)
    said = paper.PAPER["lambda"][SPARSE]
    active = _active(run)
    facts = [
        Fact(
            times(gain["gain"]),
            f"{words}, over dense eager",
            f"the paper: {times(getattr(said, workload))}",
            gain["low"] > 1,
        )
        for workload, words in _WORKLOADS
        if (gain := _gain(run, workload)) is not None
    ]
    parts = []
    if active is not None:
        facts.append(
            Fact(
                share(active),
                "of the neurons active per token",
                f"the paper: {share(said.nnz / paper.NEURONS)}",
            )
        )
        parts.append(f"{share(active)} of the neurons are active")
    if base is not None and _loss(run) and _loss(base):
        ratio = _loss(run) / _loss(base)
        facts.append(Fact(change(ratio), "cross-entropy", "against lambda 0; the paper: less than +2%"))
        parts.append(f"cross-entropy is {change(ratio)}")
    gain = _gain(run, "forward")
    if gain is not None:
        sure = gain["low"] > 1 or gain["high"] < 1
        speed = f"a forward pass is {times(gain['gain'])} as fast as dense eager"
        parts.append(speed if sure else f"{speed}, which is no sure difference")
    claim = (
        f"With lambda {short_l1(run['l1'])}, {'; '.join(parts)}."
        if parts
        else f"Lambda {short_l1(run['l1'])}."
    )
    return Headline(title, claim, notes, facts)


def _tokens(finished: Runs) -> str:
    """How many tokens a run reads; 31.5B in the paper's 1.5B."""
    found = sorted({run["steps"] * run["tokens_per_step"] for run in finished.values() if "steps" in run})
    return (
        "no"
        if not found
        else short(found[0])
        if len(found) == 1
        else f"{short(found[0])} to {short(found[-1])}"
    )


def _experiment(table: Table, results: Mapping[str, Any]) -> Iterator[Block]:
    if table.name in _QUESTIONS:
        yield Paragraph(_QUESTIONS[table.name])
    names = experiments_of(SCALES[results["scale"]])[table.name].runs
    runs = {name: results["runs"][name] for name in names if results["runs"].get(name, {}).get("summary")}
    draw = {"lambda": _sweep, "sizes": _sizes, "dead": _dead}.get(table.name, _compared)
    figures = [figure for figure in draw(table.name, runs) if figure is not None]
    if figures:
        yield Figures(figures)
    strong = [
        place
        for place, row in enumerate(table.rows)
        if row[0] == results["runs"].get(SPARSE, {}).get("title")
    ]
    caption = " ".join([*table.notes, "Cells with a stroke: ours / the paper's."])
    yield PageTable(table.columns, table.rows, strong=strong, caption=caption)


def _sweep(name: str, runs: Runs) -> Iterator[Figure | None]:
    labels = [(place, short_l1(run["l1"])) for place, run in enumerate(runs.values())]
    said = [paper.PAPER["lambda"].get(key, paper.Figures()) for key in runs]
    losses = [(place, _loss(run)) for place, run in enumerate(runs.values())]
    base = _loss(runs[DENSE]) if DENSE in runs else None
    yield _chart(
        f"{name}-loss",
        "Cross-entropy",
        "held-out, nats",
        [_line("ours", losses)],
        labels,
        references=[] if base is None else [Reference(1.02 * base, "lambda 0 + 2%")],
    )
    active = [(place, 100 * _active(run)) for place, run in enumerate(runs.values()) if _active(run)]
    stated = [
        (place, 100 * one.nnz / paper.NEURONS) for place, one in enumerate(said) if one.nnz and not one.below
    ]
    yield _chart(
        f"{name}-active",
        "Active neurons",
        "% of a layer's, per token",
        [_line("ours", active), _points(_PAPER, stated)],
        labels,
        y_scale="log",
    )
    yield _gains(name, runs, said, labels, _PAPER)
    yield _by_layer(name, runs)


def _sizes(name: str, runs: Runs) -> Iterator[Figure | None]:
    sparse = {key: run for key, run in runs.items() if run["l1"]}
    labels = [
        (place, f"{run['layers']} ({(key.rpartition('lambda-')[0].rstrip('-') or BASE_MODEL).upper()})")
        for place, (key, run) in enumerate(sparse.items())
    ]
    said = [paper.PAPER["sizes"].get(key, paper.Figures()) for key in sparse]
    yield _gains(name, sparse, said, labels, "the paper's", x_label="layers (in brackets: the paper's model)")
    titles = {key: {**run, "title": f"{run['layers']} layers"} for key, run in sparse.items()}
    yield _by_layer(name, titles)


def _dead(name: str, runs: Runs) -> Iterator[Figure | None]:
    dead = {run["title"]: run["summary"].get("dead") for run in runs.values()}
    bars = [Bar(title, found, share(found)) for title, found in dead.items() if found is not None]
    if bars:
        drawing = Bars("Dead neurons", "share of the neurons, at the end of training; less is better", bars)
        yield Figure(f"{name}-dead", drawing)
    yield _curves(f"{name}-curves", runs)


def _compared(name: str, runs: Runs) -> Iterator[Figure | None]:
    yield _curves(f"{name}-curves", runs)
    bars = [
        Bar(
            f"{run['title']}: {words}",
            gain["gain"],
            times(gain["gain"]),
            bool(run["l1"]),
            (gain["low"], gain["high"]),
        )
        for run in runs.values()
        for workload, words in _WORKLOADS
        if run["l1"] and (gain := _gain(run, workload)) is not None
    ]
    if bars:
        yield Figure(f"{name}-gains", Bars("Speed", "times as fast as dense", bars, reference=1))


def _gains(
    name: str,
    runs: Runs,
    said: Sequence[paper.Figures],
    labels: list[tuple[float, str]],
    whose: str,
    x_label: str = "lambda",
) -> Figure | None:
    """Measured gains as lines, the paper's as points."""
    series = []
    for tone, (workload, words) in enumerate(_WORKLOADS):
        ours = [(place, _gain(run, workload)) for place, run in enumerate(runs.values())]
        series.append(_line(words, [(place, gain["gain"]) for place, gain in ours if gain is not None], tone))
        stated = [(place, getattr(one, workload)) for place, one in enumerate(said)]
        known = [point for point in stated if point[1] is not None]
        series.append(_points(f"{words}, {whose}", known, tone + len(_WORKLOADS)))
    return _chart(
        f"{name}-speed",
        "Speed",
        "times as fast as dense",
        series,
        labels,
        x_label=x_label,
        references=[Reference(1, "dense")],
        y_text=times,
    )


def _by_layer(name: str, runs: Runs) -> Figure | None:
    series = [
        Series(run["title"], list(enumerate(found)), number % COLOURS, marks=True)
        for number, run in enumerate(runs.values())
        if len(found := run.get("nnz_by_layer", ())) > 1
    ]
    if not series:
        return None
    labels = [(place, str(place)) for place in range(max(len(one.points) for one in series))]
    chart = Chart("Active neurons by layer", "layer", "neurons", series, y_scale="log", x_labels=labels)
    return Figure(f"{name}-layers", chart)


def _curves(name: str, runs: Runs) -> Figure | None:
    series = []
    for number, run in enumerate(runs.values()):
        points = [(line["tokens"], line["ce_loss"]) for line in run.get("curve", ())]
        if len(points) > 1:
            series.append(Series(run["title"], points, number % COLOURS, dashed=number >= COLOURS))
    if not series:
        return None
    chart = Chart("Training", "training tokens", "cross-entropy, nats", series, x_text=short, y_text=short)
    return Figure(name, chart)


def _chart(
    name: str,
    title: str,
    y_label: str,
    series: Sequence[Series],
    labels: list[tuple[float, str]],
    *,
    x_label: str = "lambda",
    **options: Any,
) -> Figure | None:
    drawn = [one for one in series if one.points]
    if not any(one.line and len(one.points) > 1 for one in drawn):
        return None
    options.setdefault("y_text", short)
    return Figure(name, Chart(title, x_label, y_label, drawn, x_labels=labels, **options))


def _line(name: str, points: Sequence[tuple[float, float | None]], tone: int = 0) -> Series:
    return Series(name, [(x, y) for x, y in points if y is not None], tone, marks=True)


def _points(name: str, points: Sequence[tuple[float, float]], tone: int = 1) -> Series:
    return Series(name, points, tone, line=False)


def _all_runs(results: Mapping[str, Any]) -> Iterator[Section]:
    """The sweep's training curves, and what the columns mean."""
    names = experiments_of(SCALES[results["scale"]])["lambda"].runs
    figure = _curves(
        "training-sweep", {name: results["runs"][name] for name in names if name in results["runs"]}
    )
    if figure is not None:
        yield Section("Training curves of the sweep", [Figures([figure])])


def _origin(results: Mapping[str, Any]) -> Iterator[Section]:
    text = results["text"] if isinstance(results["text"], str) else ", ".join(results["text"])
    yield Section("What the columns mean", [Paragraph(legend(results))])
    rows = {}
    for run in results["runs"].values():
        if "source" in run:
            one = run["source"]
            machine = one["hardware"].get("gpu") or one["hardware"]["cpu"]
            versions = ", ".join(
                f"{name} {one['versions'][name]}"
                for name in ("twell", "torch", "triton", "transformers", "python")
                if one["versions"].get(name)
            )
            rows[machine, versions, one["commit"]] = one["date"][:10]
    table = PageTable(
        ("machine", "versions", "commit", "text", "date"),
        [(*key, text, date) for key, date in rows.items()],
        left=range(5),
    )
    command = results.get("command") or f"twell reproduce --scale {results['scale']}"
    yield Section("Environment", [table])
    yield Section("Commands", [Paragraph("What makes these figures again."), Commands([command])])


def _loss(run: Mapping[str, Any]) -> float | None:
    found = run.get("summary", {}).get("held_out_ce_loss")
    return found if found is not None and math.isfinite(found) else None


def _active(run: Mapping[str, Any]) -> float | None:
    found = run.get("summary", {}).get("held_out_nnz")
    return None if found is None else found / run["neurons"]


def _gain(run: Mapping[str, Any], workload: str) -> Mapping[str, Any] | None:
    found = run.get("speed", {}).get(workload, {})
    return found if "gain" in found else None
