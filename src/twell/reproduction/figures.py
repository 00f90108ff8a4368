"""Figures of a reproduction: lambda against loss, sparsity and speed; training curves; speed-ups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..plots import INK, MUTED, figure_class, plain_ticks, save_figure, speedup_bars, training_curves
from .paper import NEURONS, PAPER, Figures
from .recipes import DENSE, SCALES, experiments_of, short
from .results import where

_BLUE, _AMBER, _GREEN = "#2563eb", "#d97706", "#059669"
_CURVES = 5  # as many as there are colours


def draw(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw what the results have data for; the files."""
    figures = {"sweep.png": _sweep, "training.png": _training, "speedup.png": _speedups}
    return [folder / name for name, figure in figures.items() if figure(results, folder / name)]


def _swept(results: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The runs of the sweep that have a loss."""
    names = experiments_of(SCALES[results["scale"]])["lambda"].runs
    runs = {name: results["runs"].get(name, {}) for name in names}
    return {
        name: run for name, run in runs.items() if run.get("summary", {}).get("held_out_ce_loss") is not None
    }


def _dots(axes: Any, values: Mapping[int, float], colour: str, label: str) -> None:
    """Figures of the paper: hollow, so that nobody takes them for ours."""
    if values:
        axes.plot(
            list(values),
            list(values.values()),
            marker="D",
            markersize=8,
            markerfacecolor="white",
            markeredgewidth=1.8,
            linestyle="none",
            color=colour,
            label=label,
        )


def _sweep(results: Mapping[str, Any], path: Path) -> bool:
    runs = _swept(results)
    if len(runs) < 3 or DENSE not in runs:
        return False
    figure = figure_class()(figsize=(7.6, 8.0), dpi=144, layout="constrained")
    figure.suptitle(
        "Lambda: loss, active neurons, speed", x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK
    )
    panels = figure.subplots(3, 1, sharex=True)
    panels[0].set_title(where(results), loc="left", fontsize=9, color=MUTED)
    paper = [PAPER["lambda"].get(name, Figures()) for name in runs]
    _losses(panels[0], runs)
    _active(panels[1], runs, paper)
    _speeds(panels[2], runs, paper)
    names = [f"{short(run['l1'])}\n({short(run['paper_l1'])})" for run in runs.values()]
    panels[2].set_xticks(range(len(names)), names)
    panels[2].set_xlabel("lambda (in brackets: the paper's)", color=MUTED)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=9)
    save_figure(figure, path, None)
    return True


def _losses(axes: Any, runs: Mapping[str, Mapping[str, Any]]) -> None:
    losses = [run["summary"]["held_out_ce_loss"] for run in runs.values()]
    base = runs[DENSE]["summary"]["held_out_ce_loss"]
    axes.plot([100 * (loss / base - 1) for loss in losses], marker="o", color=_BLUE, linewidth=2)
    axes.axhline(0, color=MUTED, linewidth=1, linestyle="--")
    axes.set_ylabel("cross-entropy over lambda 0, %", color=MUTED)


def _active(axes: Any, runs: Mapping[str, Mapping[str, Any]], paper: Sequence[Figures]) -> None:
    shares = [100 * run["summary"]["held_out_nnz"] / run["neurons"] for run in runs.values()]
    axes.plot(shares, marker="o", color=_BLUE, linewidth=2, label="ours")
    stated = {place: 100 * one.nnz / NEURONS for place, one in enumerate(paper) if one.nnz and not one.below}
    _dots(axes, stated, MUTED, "the paper's 1.5B")
    axes.set_yscale("log")
    plain_ticks(axes.yaxis)
    axes.set_ylabel("active neurons per token, %", color=MUTED)
    axes.legend(frameon=False, labelcolor=INK)


def _speeds(axes: Any, runs: Mapping[str, Mapping[str, Any]], paper: Sequence[Figures]) -> None:
    for workload, colour, label in (("forward", _AMBER, "forward"), ("step", _GREEN, "training step")):
        measured = {
            place: run["speed"][workload]
            for place, run in enumerate(runs.values())
            if "gain" in run.get("speed", {}).get(workload, {})
        }
        if measured:
            gains, low, high = ([one[name] for one in measured.values()] for name in ("gain", "low", "high"))
            axes.plot(list(measured), gains, marker="o", color=colour, linewidth=2, label=label)
            axes.fill_between(list(measured), low, high, color=colour, alpha=0.15, linewidth=0)
        stated = {place: getattr(one, workload) for place, one in enumerate(paper)}
        stated = {place: gain for place, gain in stated.items() if gain is not None}
        _dots(axes, stated, colour, f"{label}, the paper's 1.5B")
    axes.axhline(1, color=MUTED, linewidth=1, linestyle="--", label="dense")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("times faster than dense", color=MUTED)
    axes.legend(frameon=False, labelcolor=INK, ncols=2, fontsize=8, loc="lower right")


def _training(results: Mapping[str, Any], path: Path) -> bool:
    runs = list(_swept(results).values()) or [run for run in results["runs"].values() if run.get("curve")]
    if len(runs) > _CURVES:
        runs = [runs[round(place * (len(runs) - 1) / (_CURVES - 1))] for place in range(_CURVES)]
    shown = {run["title"]: run["curve"] for run in runs if run.get("curve")}
    if not shown:
        return False
    training_curves(shown, path, title="The loss falls, the activations go out", subtitle=where(results))
    return True


def _speedups(results: Mapping[str, Any], path: Path) -> bool:
    gains = {
        f"{run['title']}: {words}": run["speed"][workload]["gain"]
        for run in results["runs"].values()
        for workload, words in (("forward", "forward"), ("step", "training step"))
        if "gain" in run.get("speed", {}).get(workload, {})
    }
    if not gains:
        return False
    speedup_bars(gains, path, title="Trained models, sparse over dense", subtitle=where(results))
    return True
