"""Draws a profile with matplotlib (the `plot` extra)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..plots import INK, MUTED, figure_class, new_figure, plain_ticks, save_figure
from .schema import LayerProfile, Profile

_MAP = "viridis"


def draw_profile(profile: Profile, folder: Path) -> list[Path]:
    """Write the figures of docs/profile.md into `folder`, as PNG; those without data are left out."""
    figures: dict[str, Callable[[Profile], Any | None]] = {
        "layers": _layers,
        "firing_rates": _firing_rates,
        "positions": _positions,
        "unions": _unions,
        "overflow": _overflow,
        "speed": _speed,
        "sample": _sample,
    }
    written = []
    for name, draw in figures.items():
        figure = draw(profile)
        if figure is not None:
            written.append(folder / f"{name}.png")
            save_figure(figure, written[-1], None)
    return written


def _subtitle(profile: Profile) -> str:
    return f"{profile.model or 'model'}, {profile.tokens:,} tokens"


def _colours(count: int) -> list[Any]:
    """From the first layer to the last."""
    figure_class()  # explains itself without matplotlib
    from matplotlib import colormaps

    return [colormaps[_MAP](0.9 * index / max(count - 1, 1)) for index in range(count)]


def _legend(axes: Any, layers: Sequence[LayerProfile]) -> None:
    """With many layers, naming the first and the last is enough: colours go from one to the other."""
    handles, labels = axes.get_legend_handles_labels()
    if len(layers) > 8:
        handles, labels = [handles[0], handles[-1]], [labels[0], labels[-1]]
    axes.legend(handles, labels, frameon=False, labelcolor=INK, fontsize=8)


def _lines(
    profile: Profile, title: str, points: Callable[[LayerProfile], tuple[Sequence[float], Sequence[float]]]
) -> tuple[Any, Any]:
    figure, axes = new_figure(title, _subtitle(profile), height=4.2)
    colours = _colours(len(profile.layers))
    for index, (layer, colour) in enumerate(zip(profile.layers, colours, strict=True)):
        xs, ys = points(layer)
        axes.plot(xs, ys, color=colour, linewidth=1.6, label=f"layer {index}")
    _legend(axes, profile.layers)
    return figure, axes


def _layers(profile: Profile) -> Any:
    figure, axes = new_figure("Active neurons per token, by layer", _subtitle(profile), height=3.8)
    places = range(len(profile.layers))
    for name, colour, marker in (("p99", "#d97706", "^"), ("mean", "#2563eb", "o"), ("p50", "#059669", "v")):
        values = [getattr(layer.nnz, name) for layer in profile.layers]
        axes.plot(places, values, color=colour, marker=marker, markersize=5, linewidth=1.6, label=name)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_xticks(list(places)[:: max(len(profile.layers) // 12, 1)])
    axes.set_xlabel("layer", color=MUTED)
    axes.set_ylabel("active neurons", color=MUTED)
    axes.legend(frameon=False, labelcolor=INK)
    return figure


def _firing_rates(profile: Profile) -> Any:
    figure, axes = _lines(
        profile,
        "How often each neuron fires",
        # What never fires has no place on a logarithmic scale.
        lambda layer: tuple(zip(*_fired(layer), strict=True)) if _fired(layer) else ((), ()),
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    plain_ticks(axes.xaxis)
    plain_ticks(axes.yaxis)
    axes.set_xlabel("neurons, from the busiest to the quietest", color=MUTED)
    axes.set_ylabel("share of tokens", color=MUTED)
    return figure


def _fired(layer: LayerProfile) -> list[tuple[int, float]]:
    return [(rank, rate) for rank, rate in zip(layer.firing.rank, layer.firing.rate, strict=True) if rate > 0]


def _positions(profile: Profile) -> Any | None:
    if any(layer.nnz_by_position is None for layer in profile.layers):
        return None
    starts = [start + 1 for start in profile.position_starts]
    title = "Active neurons by place in the sequence"
    figure, axes = _lines(profile, title, lambda layer: (starts, layer.nnz_by_position))
    axes.set_xscale("log")
    plain_ticks(axes.xaxis)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("token of the sequence", color=MUTED)
    axes.set_ylabel("active neurons", color=MUTED)
    return figure


def _unions(profile: Profile) -> Any | None:
    if all(size is None for layer in profile.layers for size in layer.union):
        return None

    def points(layer: LayerProfile) -> tuple[Sequence[float], Sequence[float]]:
        known = [
            (size, union / layer.neurons)
            for size, union in zip(profile.union_sizes, layer.union, strict=True)
            if union is not None
        ]
        return tuple(zip((1, layer.nnz.share), *known, strict=True))

    figure, axes = _lines(profile, "Neurons that consecutive tokens use together", points)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("consecutive tokens", color=MUTED)
    axes.set_ylabel("share of the layer's neurons", color=MUTED)
    return figure


def _overflow(profile: Profile) -> Any:
    figure, axes = new_figure(
        "Tokens that overflow the paper's format", f"{_subtitle(profile)}; tiles of 256 neurons", height=3.8
    )
    places = range(len(profile.layers))
    shares = zip(*(layer.overflow.by_compression for layer in profile.layers), strict=True)
    for colour, of_one in zip(("#059669", "#2563eb", "#dc2626"), shares, strict=False):
        label = f"{of_one[0].capacity} entries a tile (C = {of_one[0].compression})"
        rows = [100 * share.rows for share in of_one]
        axes.plot(places, rows, color=colour, marker="o", markersize=4, label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("layer", color=MUTED)
    axes.set_ylabel("% of tokens with an overflowing tile", color=MUTED)
    axes.legend(frameon=False, labelcolor=INK)
    return figure


def _speed(profile: Profile) -> Any | None:
    timed = [layer for layer in profile.layers if layer.speed is not None]
    if not timed:
        return None
    speed = timed[0].speed
    correlation = profile.correlation.sparse if profile.correlation is not None else None
    known = "" if correlation is None else f", correlation {correlation:.3f}"
    place = profile.hardware.get("gpu") or profile.hardware.get("cpu") or "this machine"
    figure, axes = new_figure(
        "Speed of each layer over dense PyTorch", f"{speed.tokens:,} tokens on {place}{known}", height=4.2
    )
    for name, colour, label in (
        ("sparse_speedup", "#2563eb", f"{speed.sparse_path} path"),
        ("auto_speedup", "#d97706", "automatic plan"),
    ):
        values = [getattr(layer.speed, name) for layer in timed]
        axes.scatter([layer.speed.nnz for layer in timed], values, color=colour, s=28, label=label)
    axes.axhline(1, color=MUTED, linewidth=1, linestyle="--")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("active neurons per token", color=MUTED)
    axes.set_ylabel("times faster than dense", color=MUTED)
    axes.legend(frameon=False, labelcolor=INK)
    return figure


def _sample(profile: Profile) -> Any | None:
    if profile.sample is None:
        return None
    figure, axes = new_figure(
        "Active neurons of the text's first tokens",
        _subtitle(profile),
        height=1.8 + 0.12 * len(profile.layers),
    )
    from matplotlib.colors import LogNorm

    values = [[max(nnz, 0.5) for nnz in layer] for layer in profile.sample.nnz]
    largest = max(max(layer) for layer in values)
    image = axes.imshow(values, aspect="auto", cmap="magma", norm=LogNorm(0.5, max(largest, 1)))
    figure.colorbar(image, label="active neurons")
    axes.set_xlabel("token", color=MUTED)
    axes.set_ylabel("layer", color=MUTED)
    return figure
