"""Plots speed-ups and training runs with matplotlib (the `plot` extra)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ._errors import missing_extra

INK = "#1f2933"
MUTED = "#7b8794"
_COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626")


def speedup_bars(
    speedups: Mapping[str, float],
    path: str | os.PathLike[str],
    *,
    title: str,
    subtitle: str,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Draw horizontal bars, one per case (label -> times faster than dense)."""
    figure, axes = new_figure(title, subtitle, height=1.6 + 0.5 * len(speedups))
    labels = list(speedups)[::-1]
    values = [speedups[label] for label in labels]
    bars = axes.barh(labels, values, color=_COLOURS[0], height=0.6)
    axes.bar_label(bars, [f"{value:.2f}x" for value in values], padding=4, color=INK)
    axes.axvline(1, color=MUTED, linewidth=1, linestyle="--")
    axes.set_xlim(0, max(*values, 1) * 1.15)
    axes.set_xlabel("times faster than dense PyTorch (dashed: dense)", color=MUTED)
    save_figure(figure, path, metadata)


def speedup_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    path: str | os.PathLike[str],
    *,
    title: str,
    subtitle: str,
    shares: bool = True,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Draw a line per name: (active neurons per token, times faster than dense).

    shares:  active neurons are given as shares of all neurons and shown in percent; False: as counts.
    """
    scale, suffix = (100, "%") if shares else (1, "")
    figure, axes = new_figure(title, subtitle, height=4.2)
    for colour, (name, points) in zip(_COLOURS, curves.items(), strict=False):
        active, values = zip(*sorted(points), strict=True)
        axes.plot(
            [scale * a for a in active],
            values,
            marker="o",
            markersize=5,
            linewidth=2,
            color=colour,
            label=name,
        )
    axes.axhline(1, color=MUTED, linewidth=1, linestyle="--")
    axes.set_xscale("log")
    plain_ticks(axes.xaxis, suffix)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("active neurons per token", color=MUTED)
    axes.set_ylabel("times faster than dense", color=MUTED)
    axes.legend(frameon=False, labelcolor=INK)
    save_figure(figure, path, metadata)


def training_curves(
    runs: Mapping[str, Sequence[Mapping[str, float]]],
    path: str | os.PathLike[str],
    *,
    title: str,
    subtitle: str,
    reference: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Draw cross-entropy above active neurons per token, over tokens, with one colour per run.

    runs:  name -> lines with "tokens", "ce_loss" and, for sparse models, "nnz".
    reference:  the run that others are held against, drawn in grey.
    """
    sparse = any("nnz" in line for lines in runs.values() for line in lines)
    figure = figure_class()(figsize=(7.6, 6.2 if sparse else 3.8), dpi=144, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    panels = figure.subplots(2 if sparse else 1, 1, sharex=True, squeeze=False)[:, 0]
    panels[0].set_title(subtitle, loc="left", fontsize=9, color=MUTED)
    most = max((line["tokens"] for lines in runs.values() for line in lines), default=0)
    unit, name_of_unit = (1e6, "million") if most >= 1e6 else (1e3, "thousand")
    for axes, value, label in zip(
        panels, ("ce_loss", "nnz"), ("cross-entropy", "active neurons per token"), strict=False
    ):
        for index, (name, lines) in enumerate(runs.items()):
            points = [(line["tokens"], line[value]) for line in lines if value in line]
            if points:
                tokens, values = zip(*points, strict=True)
                colour, style = _COLOURS[index % len(_COLOURS)], "-"
                if name == reference:
                    colour, style = MUTED, "--"
                axes.plot([t / unit for t in tokens], values, style, color=colour, linewidth=1.8, label=name)
        axes.set_ylabel(label, color=MUTED)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=9)
    if sparse:
        panels[1].set_yscale("log")
        plain_ticks(panels[1].yaxis)
    panels[-1].set_xlabel(f"{name_of_unit} tokens", color=MUTED)
    if len(runs) > 1:
        panels[0].legend(frameon=False, labelcolor=INK)
    save_figure(figure, path, metadata)


def new_figure(title: str, subtitle: str, *, height: float) -> tuple[Any, Any]:
    figure = figure_class()(figsize=(7.6, height), dpi=144, layout="constrained")
    axes = figure.add_subplot()
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    axes.set_title(subtitle, loc="left", fontsize=9, color=MUTED)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)
    return figure, axes


def plain_ticks(axis: Any, suffix: str = "") -> None:
    """Label a logarithmic axis 1, 2, 5, 10 and not with powers of ten; where that would be crowded, fewer."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    decades = math.log10(high / low) if low > 0 else 1.0
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades <= 3 else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}{suffix}"))
    axis.set_minor_formatter(NullFormatter())


def save_figure(figure: Any, path: str | os.PathLike[str], metadata: Mapping[str, str] | None) -> None:
    figure.savefig(path, metadata=dict(metadata or {}), facecolor="white")


def figure_class() -> type:
    """matplotlib's `Figure`, imported at first use; raises ImportError with the command that installs it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("plots need matplotlib", "plot") from error
    return Figure
