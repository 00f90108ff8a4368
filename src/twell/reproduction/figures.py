"""Figures of a reproduction: lambda against loss, sparsity and speed; training curves; speed-ups."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..plots import INK, MUTED, figure_class, save_figure, speedup_bars, training_curves
from .recipes import SCALES, experiments_of, short
from .results import where

_BLUE, _AMBER, _GREEN = "#2563eb", "#d97706", "#059669"
_CURVES = 5  # as many as there are colours


def draw(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw what the results have data for; the files."""
    figures = {"sweep.png": _sweep, "training.png": _training, "speedup.png": _speedups}
    return [folder / name for name, figure in figures.items() if figure(results, folder / name)]


def _swept(results: Mapping[str, Any]) -> dict[float, Mapping[str, Any]]:
    """lambda -> run, of the sweep, with its losses."""
    names = experiments_of(SCALES[results["scale"]])["lambda"].runs
    runs = (results["runs"].get(name, {}) for name in names)
    return {run["l1"]: run for run in runs if run.get("summary", {}).get("held_out_ce_loss") is not None}


def _sweep(results: Mapping[str, Any], path: Path) -> bool:
    runs = _swept(results)
    if len(runs) < 3 or 0.0 not in runs:
        return False
    base = runs[0.0]["summary"]["held_out_ce_loss"]
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
    panels[1].plot(places, active, marker="o", color=_BLUE, linewidth=2)
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
    panels[2].axhline(1, color=MUTED, linewidth=1, linestyle="--", label="dense")
    panels[2].set_ylim(bottom=0)
    panels[2].set_ylabel("times faster than dense", color=MUTED)
    panels[2].legend(frameon=False, labelcolor=INK)
    panels[2].set_xticks(list(places), [short(l1) for l1 in runs])
    panels[2].set_xlabel("lambda", color=MUTED)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=9)
    save_figure(figure, path, None)
    return True


def _has(run: Mapping[str, Any]) -> bool:
    return bool(run.get("speed"))


def _training(results: Mapping[str, Any], path: Path) -> bool:
    runs = list(_swept(results).values()) or [run for run in results["runs"].values() if run.get("curve")]
    step = max(1, -(-len(runs) // _CURVES))
    shown = {run["title"]: run["curve"] for run in runs[::step] if run.get("curve")}
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
