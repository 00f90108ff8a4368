"""Plots speed-ups, layers and training runs with matplotlib (the `plot` extra)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from ._errors import missing_extra, reject
from ._numbers import digits

INK = "#1f2933"
MUTED = "#7b8794"
_COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626")
_LONGEST_LINE = 95  # characters of a subtitle
# Of figures by layer
_MOST_TICKS = 20
_MOST_TEXTS = 12  # beyond, the numbers above bars would touch
_FEWEST_WIDE = 6


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


def bar_panels(
    panels: Mapping[str, Mapping[str, float]],
    path: str | os.PathLike[str],
    *,
    title: str,
    subtitle: str,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Draw panels side by side, each with a bar per name (panel -> name -> value); the last name stands out.

    All panels have the same names, at most four; there is at least one panel.
    """
    names = list(next(iter(panels.values()), ()))
    if not 1 <= len(names) <= 4:
        reject("panels", f"{len(panels)} panels of {len(names)} names", "a panel or more, of 1 to 4 names")
    colours = [*("#c3cad3", "#8d99a8", "#5f6b7a")[: len(names) - 1], _COLOURS[0]]
    figure = figure_class()(figsize=(max(2.6 * len(panels), 7.6), 3.4), dpi=144, layout="constrained")
    heading = {"x": 0.012, "ha": "left", "va": "top", "parse_math": False}
    figure.suptitle(title, y=0.98, fontsize=13, fontweight="bold", color=INK, **heading)
    figure.text(y=0.9, s=subtitle, fontsize=9, color=MUTED, **heading)
    figure.get_layout_engine().set(rect=(0, 0, 1, 0.82))
    every = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (panel, values) in zip(every, panels.items(), strict=True):
        bars = axes.bar(names, [values[name] for name in names], color=colours, width=0.72)
        axes.bar_label(bars, [digits(values[name]) for name in names], padding=3, fontsize=9)
        axes.set_title(panel, fontsize=9, color=INK)
        axes.set_ylim(0, 1.15 * max(values.values()))
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_yticks([])
        axes.set_xticks([])
    figure.legend(bars, names, loc="outside lower left", frameon=False, labelcolor=INK, ncols=len(names))
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
    figure, panels = _new_panels(title, subtitle, 6.2 if sparse else 3.8, 2 if sparse else 1)
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
    if sparse:
        panels[1].set_yscale("log")
        plain_ticks(panels[1].yaxis)
    panels[-1].set_xlabel(f"{name_of_unit} tokens", color=MUTED)
    if len(runs) > 1:
        panels[0].legend(frameon=False, labelcolor=INK)
    save_figure(figure, path, metadata)


def new_figure(title: str, subtitle: str, *, height: float) -> tuple[Any, Any]:
    figure, (axes,) = _new_panels(title, subtitle, height, 1)
    return figure, axes


def plain_ticks(axis: Any, suffix: str = "") -> None:
    """Label a logarithmic axis 1, 2, 5, 10 and not with powers of ten; where that would be crowded, fewer."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    decades = math.log10(high / low) if low > 0 else 1.0
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades <= 3 else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}{suffix}"))
    axis.set_minor_formatter(NullFormatter())


def _new_panels(title: str, subtitle: str, height: float, count: int) -> tuple[Any, Sequence[Any]]:
    """Axes below one another, that share x."""
    figure = figure_class()(figsize=(7.6, height), dpi=144, layout="constrained")
    panels = figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0]
    # A model's name may have dollar signs, which are no mathematics.
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK, parse_math=False)
    below = fill(subtitle, _LONGEST_LINE)
    panels[0].set_title(below, loc="left", fontsize=9, color=MUTED, parse_math=False)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=9)
    return figure, panels


def save_figure(figure: Any, path: str | os.PathLike[str], metadata: Mapping[str, str] | None) -> None:
    figure.savefig(path, metadata=dict(metadata or {}), facecolor="white")


def figure_class() -> type:
    """matplotlib's `Figure`, imported at first use; raises ImportError with the command that installs it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("plots need matplotlib", "plot") from error
    return Figure


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    try:
        figure_class()
    except ImportError:
        return False
    return True


# By layer


def layer_activity(
    active: Sequence[float],
    neurons: Sequence[int],
    dead: Sequence[float],
    path: str | os.PathLike[str],
    *,
    title: str,
    subtitle: str,
) -> None:
    """Draw active neurons per token above the share of dead neurons, by layer.

    neurons:  how many each layer has.
    dead:     shares of them.
    """
    figure, (above, below) = _layer_panels(title, subtitle, len(active))
    shares = [f"{count:.3g}\n({count / of:.1%})" for count, of in zip(active, neurons, strict=True)]
    _bars(above, active, shares)
    mean = sum(active) / len(active)
    above.axhline(mean, color=MUTED, linewidth=1, linestyle="--")
    above.set_ylabel(f"active per token\n(dashed: mean, {mean:.3g})", color=MUTED)
    _bars(below, [100 * share for share in dead], [f"{share:.1%}" for share in dead], _COLOURS[1])
    _percent(below.yaxis)
    below.set_ylabel("dead neurons", color=MUTED)
    save_figure(figure, path, None)


def layer_gains(
    active: Sequence[float | None],
    gains: Sequence[float | None],
    path: str | os.PathLike[str],
    *,
    title: str,
    subtitle: str,
) -> None:
    """Draw the share of active neurons above the gain over dense, by layer; None where it is not known."""
    figure, (above, below) = _layer_panels(title, subtitle, len(active))
    texts = ["-" if share is None else f"{share:.1%}" for share in active]
    _bars(above, [100 * (share or 0) for share in active], texts)
    _percent(above.yaxis)
    above.set_ylabel("active neurons", color=MUTED)
    texts = ["-" if gain is None else f"{gain:.2f}x" for gain in gains]
    _bars(below, [gain or 0 for gain in gains], texts, _COLOURS[2])
    below.axhline(1, color=MUTED, linewidth=1, linestyle="--")
    below.set_ylim(top=max(1.3, below.get_ylim()[1]))
    below.set_ylabel("times faster than dense\n(dashed: dense PyTorch)", color=MUTED)
    save_figure(figure, path, None)


def layer_sizes(
    before: Sequence[int],
    after: Sequence[int],
    path: str | os.PathLike[str],
    *,
    title: str,
    subtitle: str,
) -> None:
    """Draw neurons before and after pruning, by layer."""
    figure, (axes,) = _layer_panels(title, subtitle, len(before), count=1)
    shares = [f"{kept:,}\n({kept / of:.0%})" for kept, of in zip(after, before, strict=True)]
    _bars(axes, before, shares, "#d5dae1", label="before")
    room = axes.get_ylim()
    _bars(axes, after, (), label="after")
    axes.set_ylim(room)
    axes.set_ylabel("neurons", color=MUTED)
    figure.legend(loc="outside lower right", frameon=False, labelcolor=INK, fontsize=8, ncols=2)
    save_figure(figure, path, None)


def _layer_panels(title: str, subtitle: str, layers: int, count: int = 2) -> tuple[Any, Sequence[Any]]:
    figure, panels = _new_panels(title, subtitle, 1.4 + 2.2 * count, count)
    panels[-1].set_xlim(-0.5, layers - 0.5)
    panels[-1].set_xticks(range(0, layers, -(-layers // _MOST_TICKS)))
    panels[-1].set_xlabel("layer", color=MUTED)
    return figure, panels


def _bars(
    axes: Any, values: Sequence[float], texts: Sequence[str], colour: str = _COLOURS[0], label: str = ""
) -> None:
    """One per layer. texts: above the bars, where there is room."""
    layers = len(values)
    width = 0.7 * min(layers / _FEWEST_WIDE, 1)  # one layer's bar does not fill the figure
    drawn = axes.bar(range(layers), values, width, color=colour, label=label or None)
    if texts and layers <= _MOST_TEXTS:
        around = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # lines may cross the numbers
        axes.bar_label(drawn, texts, padding=3, color=INK, fontsize=8, bbox=around)
    axes.set_ylim(0, (1.3 if layers <= _MOST_TEXTS else 1.1) * max(*values, 0) or 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")


def _percent(axis: Any) -> None:
    axis.set_major_formatter(lambda value, _: f"{value:g}%")


# By share of active neurons or number of tokens


def tuned_gains(
    gains: Mapping[int, Mapping[float, float]],
    path: str | os.PathLike[str],
    *,
    title: str,
    subtitle: str,
) -> None:
    """Draw a line per number of tokens: share of active neurons -> times faster than dense."""
    figure, axes = new_figure(title, subtitle, height=4.6)
    for colour, (tokens, points) in zip(_shades(len(gains)), gains.items(), strict=True):
        shares, values = zip(*sorted(points.items()), strict=True)
        label = f"{tokens:,} token{'s' if tokens > 1 else ''}"
        axes.plot([100 * s for s in shares], values, color=colour, marker="o", markersize=4, label=label)
    axes.axhline(1, color=MUTED, linewidth=1, linestyle="--")
    axes.set_xscale("log")
    measured = sorted({100 * share for points in gains.values() for share in points})
    _ticks(axes.xaxis, measured, "%")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("share of active neurons", color=MUTED)
    axes.set_ylabel("times faster than dense (dashed: dense)", color=MUTED)
    figure.legend(loc="outside right", frameon=False, labelcolor=INK, fontsize=8)
    save_figure(figure, path, None)


def tuned_limits(
    limits: Mapping[str, Mapping[int, float]],
    path: str | os.PathLike[str],
    *,
    title: str,
    subtitle: str,
) -> None:
    """Draw a line per name: number of tokens -> the share of active neurons up to which sparse pays.

    Names that are equal up to a comma share a colour.
    """
    figure, axes = new_figure(title, subtitle, height=4.2)
    kinds = list(dict.fromkeys(name.partition(",")[0] for name in limits))
    for place, (name, points) in enumerate(limits.items()):
        kind = name.partition(",")[0]
        first = all(other.partition(",")[0] != kind for other in list(limits)[:place])
        tokens, shares = zip(*sorted(points.items()), strict=True)
        axes.plot(
            tokens,
            [100 * share for share in shares],
            color=_COLOURS[kinds.index(kind) % len(_COLOURS)],
            linestyle="-" if first else ":",
            marker="o",
            markersize=4,
            label=name,
        )
    axes.set_xscale("log", base=2)
    _ticks(axes.xaxis, sorted({tokens for points in limits.values() for tokens in points}))
    axes.set_ylim(bottom=0)
    _percent(axes.yaxis)
    axes.set_xlabel("tokens of a call, from", color=MUTED)
    axes.set_ylabel("sparse up to this share of active neurons", color=MUTED)
    figure.legend(loc="outside right", frameon=False, labelcolor=INK, fontsize=8)
    save_figure(figure, path, None)


def _ticks(axis: Any, places: Sequence[float], suffix: str = "") -> None:
    """Ticks of a logarithmic axis at these places only, with plain numbers."""
    axis.set_ticks(places, [f"{place:,g}{suffix}" for place in places])
    axis.set_ticks([], minor=True)


def _shades(count: int) -> list[Any]:
    """From the first to the last."""
    from matplotlib import colormaps

    return [colormaps["viridis"](0.9 * index / max(count - 1, 1)) for index in range(count)]
