"""Our figures beside the paper's: a table for each experiment, from what results.json holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..evaluation import PAPER_TASKS
from .paper import NEURONS, NOTES, PAPER, Figures
from .recipes import BASE_MODEL, SCALES, experiments_of, short

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
    "Cells with a stroke: ours / the paper's, - where there is none. Cross-entropy is that of held-out text. "
    "Accuracy: mean over the paper's seven tasks, in percent. Active: neurons per token, and the share of a "
    "layer's. Dead: silent in the last {window:,} tokens of training (the paper: a batch of 1,048,576). "
    "Forward and training step: times faster than the same weights dense, eager, {tokens:,} tokens a call "
    "on this machine (the paper: H100); results.json has the bounds of 95%."
)


_COMPARED_WITH_THEMSELVES = ("sizes", "gate")


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


def legend(results: Mapping[str, Any]) -> str:
    """What the columns of all tables mean."""
    runs = results["runs"].values()
    tokens = next((run["speed"]["tokens"] for run in runs if run.get("speed")), 0)
    windows = (run.get("summary", {}).get("dead_window") for run in runs)
    return LEGEND.format(tokens=tokens, window=next((found for found in windows if found), 0))


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
                _title(name, key, run),
                run,
                PAPER.get(name, {}).get(key, Figures()),
                _reference(name, key, results) or base,
            )
            for key, run in there.items()
        ]
        kept = [place for place in range(len(COLUMNS)) if not place or any(row[place] != "-" for row in rows)]
        own = name in _COMPARED_WITH_THEMSELVES
        reference = "the same model with lambda 0" if own else base.get("title", "none")
        notes = [
            f"Difference: of cross-entropy, from {reference}.",
            *([NOTES[name]] if name in NOTES else []),
        ]
        notes += [
            f"No accuracy of {run['title']}: {task}: {why}."
            for run in there.values()
            for task, why in run.get("tasks_missing", {}).items()
        ]
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
    if experiment not in _COMPARED_WITH_THEMSELVES:
        return None
    return results["runs"].get(f"{key.rpartition('lambda-')[0]}lambda-0")


def _title(experiment: str, key: str, run: Mapping[str, Any]) -> str:
    """Runs that experiments share are told apart by something else in each."""
    if experiment != "sizes":
        return run["title"]
    layers = f"{run['layers']} layer{'s' if run['layers'] > 1 else ''}"
    model = key.rpartition("lambda-")[0].rstrip("-") or BASE_MODEL
    return f"{layers}, lambda {short(run['l1'])} (paper: {model.upper()})"


def _row(title: str, run: Mapping[str, Any], paper: Figures, reference: Mapping[str, Any]) -> tuple[str, ...]:
    summary, speed = run.get("summary", {}), run.get("speed", {})
    loss, base = (one.get("held_out_ce_loss") for one in (summary, reference.get("summary", {})))
    nnz, dead = summary.get("held_out_nnz"), summary.get("dead")
    less = "<" if paper.below else ""
    # Beside the paper's only where it is the same mean; results.json has every task.
    tasks = run["tasks"] if set(run.get("tasks", ())) == set(PAPER_TASKS) else {}
    return (
        title,
        "-" if run["l1"] is None else _both(short(run["l1"]), short(run["paper_l1"])),
        _number(loss, ".3f"),
        "-" if loss is None or base is None else f"{loss / base - 1:+.1%}".replace("-0.0%", "+0.0%"),
        _both(
            _number(sum(tasks.values()) / len(tasks) if tasks else None, ".1f"),
            _number(paper.accuracy, ".1f"),
        ),
        _both(
            "-" if nnz is None else f"{nnz:.1f} ({_share(nnz / run['neurons'])})",
            "-" if paper.nnz is None else f"{less}{paper.nnz:g} ({less}{_share(paper.nnz / NEURONS)})",
        ),
        _both("-" if dead is None else f"{dead:.1%}", "-" if paper.dead is None else f">{paper.dead:.0%}"),
        _both(_gain(speed, "forward"), _times(paper.forward, 3)),
        _both(_gain(speed, "step"), _times(paper.step, 3)),
    )


def _both(ours: str, paper: str) -> str:
    return "-" if ours == paper == "-" else f"{ours} / {paper}"


def _gain(speed: Mapping[str, Any], workload: str) -> str:
    return _times(speed.get(workload, {}).get("gain"))


def _share(value: float) -> str:
    """Two digits: shares are far apart."""
    return f"{100 * value:.2g}%"


def _times(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}x"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def where(results: Mapping[str, Any]) -> str:
    """One line: machines, versions, commits and the last day."""
    sources = [run["source"] for run in results["runs"].values() if "source" in run]
    if not sources:
        return "nothing measured"
    machines = dict.fromkeys(_machine(one["hardware"]) for one in sources)
    versions = dict.fromkeys(one["versions"]["torch"] for one in sources)
    commits = dict.fromkeys(one["commit"] for one in sources)
    day = max(one["date"] for one in sources)[:10]
    return f"{'; '.join(machines)}, torch {', '.join(versions)}, commit {', '.join(commits)}, {day}"


def _machine(hardware: Mapping[str, Any]) -> str:
    threads = hardware["torch_threads"]
    return hardware.get("gpu") or f"{hardware['cpu']}, {threads} thread{'s' if threads > 1 else ''}"


def markdown(results: Mapping[str, Any]) -> str:
    """A page with all tables."""
    scale = SCALES[results["scale"]]
    lines = [
        f"# The paper's experiments at scale {results['scale']}",
        "",
        f"Measured on {where(results)}. Text: {_text(results['text'])}. Lambda is {scale.l1_factor:g} times "
        "the paper's.",
        "",
        legend(results),
    ]
    if results.get("command"):
        lines += ["", "```sh", results["command"], "```"]
    for table in tables(results):
        lines += ["", f"## {table.title}", "", table.markdown(), "", " ".join(table.notes)]
    return "\n".join(lines) + "\n"


def _text(source: Any) -> str:
    return source if isinstance(source, str) else ", ".join(source)
