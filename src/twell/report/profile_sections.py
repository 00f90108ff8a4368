"""Sections of a profile: layers, neurons, positions, tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from .._html import visible
from ..profiling.schema import KnownToken, LayerProfile, Profile
from .chart import Chart, Reference, Series
from .document import Block, Figure, Figures, HeatMap, Paragraph, Section, Table
from .inputs import Profiled
from .wording import listed, share, short, times


def profile_sections(profiles: Sequence[Profiled]) -> Iterator[Section]:
    for number, one in enumerate(profiles):
        profile, name = one.profile, f"profile-{number}"
        of = f": {one.name}" if len(profiles) > 1 else ""
        if profile.sample is not None and profile.sample.tokens:
            yield Section(f"What each token wakes{of}", [*_sample(profile)])
        yield Section(f"Layer by layer{of}", [*_layers(profile, name)])
        yield Section(f"How neurons fire{of}", [*_firing(profile, name)])


def counted_on(profile: Profile) -> str:
    text = f" (text: {listed(profile.text)})" if profile.text else ""
    return f"the first {profile.tokens:,} tokens of the profiled text{text}"


def _sample(profile: Profile) -> Iterator[Block]:
    yield Paragraph(
        f"The first {len(profile.sample.tokens)} tokens of the text. Under each token a stripe per layer, "
        "the first layer on top: the stronger its colour, the more neurons the token woke there. Point at a "
        "token, tap it, or use the arrow keys; do the same with a neuron to see which other tokens wake it."
    )
    yield HeatMap(profile.sample, [layer.neurons for layer in profile.layers])


def _layers(profile: Profile, name: str) -> Iterator[Block]:
    places = range(len(profile.layers))
    labels = [(place, str(place)) for place in places]
    nnz = [
        Series(
            word, [(i, getattr(layer.nnz, key)) for i, layer in enumerate(profile.layers)], tone, marks=True
        )
        for key, word, tone in (
            ("mean", "mean", 0),
            ("p50", "median", 2),
            ("p99", "99th percentile", 1),
        )
    ]
    figures = [
        Figure(
            f"{name}-layers",
            Chart(
                "Active neurons by layer", "layer", "neurons per token", nnz, y_scale="log", x_labels=labels
            ),
        )
    ]
    timed = [(i, layer.speed) for i, layer in enumerate(profile.layers) if layer.speed is not None]
    if timed:
        kinds = (
            ("sparse_speedup", f"{timed[0][1].sparse_path} path", 0),
            ("auto_speedup", "automatic plan", 1),
        )
        speeds = [
            Series(word, [(i, getattr(speed, key)) for i, speed in timed], tone, marks=True)
            for key, word, tone in kinds
        ]
        by_nnz = [
            Series(
                word,
                [(speed.nnz, getattr(speed, key)) for _, speed in timed],
                tone,
                line=False,
                notes=[f"layer {i}: {short(s.nnz)} active, {times(getattr(s, key))}" for i, s in timed],
            )
            for key, word, tone in kinds
        ]
        place = profile.hardware.get("gpu") or profile.hardware.get("cpu") or "this machine"
        dense = [Reference(1, "dense")]
        figures += [
            Figure(
                f"{name}-speed",
                Chart("Speed by layer", "layer", "times as fast as dense", speeds, y_from_zero=True,
                      x_labels=labels, references=dense),
                f"{timed[0][1].tokens:,} tokens of this text on {place}; medians of interleaved calls.",
            ),
            Figure(
                f"{name}-speed-nnz",
                Chart("Speed by active neurons", "active neurons per token", "times as fast as dense", by_nnz,
                      y_from_zero=True, references=dense),
                _correlation(profile),
            ),
        ]  # fmt: skip
    yield Paragraph(f"Counted on {counted_on(profile)}. Dead: silent in all of them.")
    yield Figures(figures)
    yield _table(profile)
    for block, why in profile.skipped.items():
        yield Paragraph(f"Not counted: {block}: {why}")


def _correlation(profile: Profile) -> str:
    found = profile.correlation
    if found is None or found.sparse is None:
        return "A point per layer."
    return (
        f"A point per layer. Correlation {found.sparse:.3f}; the paper reports {found.paper} for its "
        "kernels, whose work is proportional to active neurons."
    )


def _table(profile: Profile) -> Table:
    sizes = [size for size in profile.union_sizes if size in (8, 128)]

    def union(layer: LayerProfile, size: int) -> str:
        found = layer.union[profile.union_sizes.index(size)]
        return "" if found is None else f"{found:,.0f}"

    columns: dict[str, Callable[[LayerProfile], str]] = {
        "active": lambda layer: f"{layer.nnz.mean:.1f}",
        "of": lambda layer: f"{layer.neurons:,}",
        "share": lambda layer: share(layer.nnz.share),
        "p50": lambda layer: f"{layer.nnz.p50:,}",
        "p99": lambda layer: f"{layer.nnz.p99:,}",
        "max": lambda layer: f"{layer.nnz.max:,}",
        "dead": lambda layer: share(layer.firing.dead / layer.neurons),
        "first token": lambda layer: f"{layer.nnz_by_position[0]:,.0f}" if layer.nnz_by_position else "",
        **{f"union of {size}": lambda layer, size=size: union(layer, size) for size in sizes},
        "shared": lambda layer: share(layer.overlap.kept) if layer.overlap else "",
        "overflow": lambda layer: share(layer.overflow.by_compression[-1].rows),
        "sparse": lambda layer: times(layer.speed.sparse_speedup) if layer.speed else "",
        "auto": lambda layer: times(layer.speed.auto_speedup) if layer.speed else "",
        "ran": lambda layer: layer.speed.auto_path if layer.speed else "",
    }
    cells = {title: [make(layer) for layer in profile.layers] for title, make in columns.items()}
    shown = [title for title, column in cells.items() if any(column)]
    rows = zip(map(str, range(len(profile.layers))), *(cells[title] for title in shown), strict=True)
    caption = (
        "Union: neurons that at least one of so many neighbouring tokens activates. Shared: with the token "
        "before. Overflow: tokens that the paper's format cannot hold; ours has no such limit."
    )
    return Table(["layer", *shown], list(rows), caption=caption)


def _firing(profile: Profile, name: str) -> Iterator[Block]:
    starts = [start + 1 for start in profile.position_starts]
    figures = []
    if all(layer.nnz_by_position is not None for layer in profile.layers):
        figures.append(
            _by_layer(
                profile,
                f"{name}-positions",
                "Active neurons by position",
                "token of the sequence",
                "neurons per token",
                lambda layer: list(zip(starts, layer.nnz_by_position, strict=True)),
                x_scale="log",
                y_from_zero=True,
            )
        )
    figures.append(
        _by_layer(
            profile,
            f"{name}-firing",
            "How often each neuron fires",
            "neurons, from the busiest to the quietest",
            "share of tokens",
            lambda layer: list(zip(layer.firing.rank, layer.firing.rate, strict=True)),
            x_scale="log",
            y_scale="log",
            y_text=share,
        )
    )
    if any(size is not None for layer in profile.layers for size in layer.union):
        figures.append(
            _by_layer(
                profile,
                f"{name}-unions",
                "Neurons that neighbouring tokens use together",
                "consecutive tokens",
                "share of the layer's neurons",
                lambda layer: [
                    (1, layer.nnz.share),
                    *(
                        (size, union / layer.neurons)
                        for size, union in zip(profile.union_sizes, layer.union, strict=True)
                        if union is not None
                    ),
                ],
                x_scale="log",
                y_from_zero=True,
                y_text=share,
            )
        )
    yield Paragraph(f"Counted on {counted_on(profile)}.")
    yield Figures(figures)
    if profile.most or profile.fewest:
        yield _words(profile.most, profile.fewest)


def _by_layer(
    profile: Profile,
    name: str,
    title: str,
    x_label: str,
    y_label: str,
    points: Callable[[LayerProfile], list[tuple[float, float]]],
    **options,
) -> Figure:
    last = max(len(profile.layers) - 1, 1)
    series = [Series(f"layer {i}", points(layer), i / last) for i, layer in enumerate(profile.layers)]
    names = [one.name for one in series]
    # Of many layers, the first, the middle and the last are enough: colours go from one to the other.
    legend = names if len(names) <= 6 else [names[0], names[len(names) // 2], names[-1]]
    return Figure(name, Chart(title, x_label, y_label, series, legend=legend, **options))


def _words(most: Sequence[KnownToken], fewest: Sequence[KnownToken]) -> Table:
    rows = []
    for place in range(max(len(most), len(fewest))):
        row: list[str] = []
        for words in (most, fewest):
            one = words[place] if place < len(words) else None
            row += ["", ""] if one is None else [f"“{visible(one.text)}”", f"{one.nnz:.1f}"]
        rows.append(row)
    return Table(
        ("most active token", "active", "fewest", "active"),
        rows,
        left=(0, 2),
        caption="Tokens of the vocabulary that occurred at least five times, beyond the first of a sequence; "
        "mean active neurons per layer.",
    )
