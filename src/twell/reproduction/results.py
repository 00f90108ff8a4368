"""Our figures beside the paper's: a table for each experiment, from what results.json holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .paper import NEURONS, NOTES, PAPER, Figures
from .recipes import SCALES, experiments_of, short

COLUMNS = (
    "",
    "lambda",
    "cross-entropy",
    "difference",
    "accuracy",
    "active",
    "dead",
    "forward",
    "training step",
)
LEGEND = (
    "Cells with a stroke: ours / the paper's; - where there is none. Cross-entropy on held-out text, and its "
    "difference from {reference}. Accuracy: mean over the paper's tasks, in percent. Active: neurons per "
    "token, and in percent of a layer's. Dead: silent in the last {window:,} tokens of training. Forward and "
    "training step: times faster than the same weights dense, on this machine, {tokens:,} tokens a call."
)


@dataclass(frozen=True)
class Table:
    """Cells as text, the first of a row its title. notes: below it."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: list[str]

    def markdown(self) -> str:
        lines = [
            "| " + " | ".join(self.columns) + " |",
            "|---|" + "---:|" * (len(self.columns) - 1),
            *("| " + " | ".join(row) + " |" for row in self.rows),
        ]
        return "\n".join(lines)


def tables(results: Mapping[str, Any]) -> list[Table]:
    """One for each experiment, with the runs that are there."""
    found = []
    known = experiments_of(SCALES[results["scale"]])
    for name, runs in results["experiments"].items():
        there = {run: results["runs"][run] for run in runs if run in results["runs"]}
        experiment = known[name]
        base = results["runs"].get(experiment.reference, {})
        rows = [
            _row(
                _title(name, run),
                run,
                PAPER.get(name, {}).get(key, Figures()),
                _reference(name, key, results) or base,
            )
            for key, run in there.items()
        ]
        kept = [
            place for place in range(len(COLUMNS)) if place == 0 or any(row[place] != "-" for row in rows)
        ]
        reference = "the same model with lambda 0" if name in ("sizes", "gate") else base.get("title", "none")
        tokens = next((r["speed"]["tokens"] for r in there.values() if r.get("speed")), 0)
        windows = (run.get("summary", {}).get("dead_window") for run in there.values())
        window = next((found for found in windows if found), 0)
        notes = [LEGEND.format(reference=reference, tokens=tokens, window=window)]
        notes += [NOTES[name]] if name in NOTES else []
        notes += [f"{run['title']} failed: {run['failure']}." for run in there.values() if run.get("failure")]
        found.append(
            Table(
                name,
                experiment.title,
                tuple(COLUMNS[place] for place in kept),
                [tuple(row[place] for place in kept) for row in rows],
                notes,
            )
        )
    return found


def _reference(experiment: str, key: str, results: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Models of another size or kind are compared with themselves at lambda 0."""
    if experiment not in ("sizes", "gate"):
        return None
    return results["runs"].get(f"{key.rpartition('lambda-')[0]}lambda-0")


def _title(experiment: str, run: Mapping[str, Any]) -> str:
    """Runs that experiments share are told apart by something else in each."""
    layers = f"{run['layers']} layer{'s' if run['layers'] > 1 else ''}"
    return f"{layers}, lambda {short(run['l1'])}" if experiment == "sizes" else run["title"]


def _row(title: str, run: Mapping[str, Any], paper: Figures, reference: Mapping[str, Any]) -> tuple[str, ...]:
    summary, speed = run.get("summary", {}), run.get("speed", {})
    loss, base = (one.get("held_out_ce_loss") for one in (summary, reference.get("summary", {})))
    nnz, dead = summary.get("held_out_nnz"), summary.get("dead")
    less = "<" if paper.below else ""
    tasks = run.get("tasks") or {}
    return (
        title,
        "-" if run["l1"] is None else _both(short(run["l1"]), short(run["paper_l1"])),
        _number(loss, ".3f"),
        "-" if loss is None or base is None else f"{loss / base - 1:+.1%}",
        _both(
            _number(sum(tasks.values()) / len(tasks) if tasks else None, ".1f"),
            _number(paper.accuracy, ".1f"),
        ),
        _both(
            "-" if nnz is None else f"{nnz:.1f} ({nnz / run['neurons']:.1%})",
            "-" if paper.nnz is None else f"{less}{paper.nnz:g} ({less}{paper.nnz / NEURONS:.1%})",
        ),
        _both("-" if dead is None else f"{dead:.1%}", "-" if paper.dead is None else f">{paper.dead:.0%}"),
        _both(_gain(speed, "forward"), _times(paper.forward)),
        _both(_gain(speed, "step"), _times(paper.step)),
    )


def _both(ours: str, paper: str) -> str:
    return "-" if ours == paper == "-" else f"{ours} / {paper}"


def _gain(speed: Mapping[str, Any], workload: str) -> str:
    return _times(speed.get(workload, {}).get("gain"))


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def where(results: Mapping[str, Any]) -> str:
    """One line: machine, versions, commit."""
    hardware = results["hardware"]
    machine = hardware.get("gpu") or f"{hardware['cpu']}, {hardware['torch_threads']} threads"
    return (
        f"{machine}, torch {results['versions']['torch']}, commit {results['commit']}, {results['date'][:10]}"
    )


def markdown(results: Mapping[str, Any]) -> str:
    """A page with all tables."""
    scale = SCALES[results["scale"]]
    lines = [
        f"# The paper's experiments at scale {results['scale']}",
        "",
        f"Measured on {where(results)}. Text: {_text(results['text'])}. Lambda is {scale.l1_factor:g} times "
        "the paper's.",
    ]
    if results.get("command"):
        lines += ["", "```sh", results["command"], "```"]
    for table in tables(results):
        lines += ["", f"## {table.title}", "", table.markdown(), "", " ".join(table.notes)]
    return "\n".join(lines) + "\n"


def _text(source: Any) -> str:
    return source if isinstance(source, str) else ", ".join(source)
