"""Figures of a reproduction: lambda against loss, sparsity and speed; training curves; speed-ups."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..plots import INK, MUTED, figure_class, save_figure, speedup_bars, training_curves
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
    runs_by_name = _swept(results)
    if len(runs_by_name) < 3 or DENSE not in runs_by_name:
        return False
    runs = {run["l1"]: run for run in runs_by_name.values()}
    base = runs_by_name[DENSE]["summary"]["held_out_ce_loss"]
    places = range(len(runs))
    figure = figure_class()(figsize=(7.6, 8.0), dpi=144, layout="constrained")
    figure.suptitle(
        "Lambda: loss, active neurons, speed", x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK
    )
    panels = figure.subplots(3, 1, sharex=True)
    panels[0].set_title(where(results), loc="left", fontsize=9, color=MUTED)
    losses = [100 * (run["summary"]["held_out_ce_loss"] / base - 1) for run in runs.values()]
    panels[0].plot(places, losses, marker="o", color=_BLUE, linewidth=2)
    panels[0].axhline(0, color=MUTED, linewidth=1, linestyle="--")
    panels[0].set_ylabel("cross-entropy over lambda 0, %", color=MUTED)
    active = [100 * run["summary"]["held_out_nnz"] / run["neurons"] for run in runs.values()]
    panels[1].plot(places, active, marker="o", color=_BLUE, linewidth=2, label="ours")
    paper = {place: PAPER["lambda"].get(name, Figures()) for place, name in enumerate(runs_by_name)}
    stated = {place: 100 * one.nnz / NEURONS for place, one in paper.items() if one.nnz and not one.below}
    _dots(panels[1], stated, MUTED, "the paper's 1.5B")
    panels[1].legend(frameon=False, labelcolor=INK)
    panels[1].set_yscale("log")
    panels[1].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panels[1].set_ylabel("active neurons per token, %", color=MUTED)
    for workload, colour, label in (("forward", _AMBER, "forward"), ("step", _GREEN, "training step")):
        gains = [
            (p, run["speed"][workload]) for p, run in zip(places, runs.values(), strict=True) if _has(run)
        ]
        gains = [(place, one) for place, one in gains if "gain" in one]
        if gains:
            at = [place for place, _ in gains]
            middle = [one["gain"] for _, one in gains]
            panels[2].plot(at, middle, marker="o", color=colour, linewidth=2, label=label)
            bounds = [one["low"] for _, one in gains], [one["high"] for _, one in gains]
            panels[2].fill_between(at, *bounds, color=colour, alpha=0.15, linewidth=0)
        stated = {place: getattr(one, workload) for place, one in paper.items() if getattr(one, workload)}
        _dots(panels[2], stated, colour, f"{label}, the paper's 1.5B")
    panels[2].axhline(1, color=MUTED, linewidth=1, linestyle="--", label="dense")
    panels[2].set_ylim(bottom=0)
    panels[2].set_ylabel("times faster than dense", color=MUTED)
    panels[2].legend(frameon=False, labelcolor=INK, ncols=2, fontsize=8, loc="lower right")
    panels[2].set_xticks(
        list(places), [f"{short(l1)}\n({short(run['paper_l1'])})" for l1, run in runs.items()]
    )
    panels[2].set_xlabel("lambda (in brackets: the paper's)", color=MUTED)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=9)
    save_figure(figure, path, None)
    return True


def _has(run: Mapping[str, Any]) -> bool:
    return bool(run.get("speed"))


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
        if _has(run)
        for workload, words in (("forward", "forward"), ("step", "training step"))
        if "gain" in run["speed"].get(workload, {})
    }
    if not gains:
        return False
    speedup_bars(gains, path, title="Trained models, sparse over dense", subtitle=where(results))
    return True
