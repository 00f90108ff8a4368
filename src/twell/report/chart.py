"""Charts as SVG. Colours are classes of the style sheet, so that one drawing is right on light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files

from .._html import escaped
from .scales import Kind, Labelled, Scale, drawable, make_scale, plain, ticks

WIDTH = 420
HEIGHT = 250
_FONT = 12
_CHARACTER = 6.3  # mean width of a character of that size
COLOURS = 8


@dataclass(frozen=True)
class Series:
    """A line, or points.

    tone:    number of a colour; or a share from 0 to 1, for lines that have an order, such as layers.
    notes:   what a point says when it is pointed at, instead of its values.
    """

    name: str
    points: Sequence[tuple[float, float]]
    tone: int | float = 0
    line: bool = True
    marks: bool = False
    dashed: bool = False
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Reference:
    """A dashed line across."""

    value: float
    label: str = ""


@dataclass(frozen=True)
class Chart:
    """Lines and points over two axes.

    x_labels:   (value, label) of the ticks; default: round numbers.
    legend:     series to name; default: all. Of layers, the first and the last are enough.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_scale: Kind = "linear"
    y_scale: Kind = "linear"
    y_from_zero: bool = False
    x_labels: Sequence[tuple[float, str]] = ()
    y_text: Labelled = plain
    x_text: Labelled = plain
    references: Sequence[Reference] = field(default_factory=tuple)
    legend: Sequence[str] | None = None

    def svg(self, *, standalone: bool = False) -> str:
        drawn = [(one, self._drawable(one)) for one in self.series]
        legend, top = self._legend()
        bottom = top + HEIGHT - 46
        ys = [y for _, points in drawn for _, y in points]
        ys += [ref.value for ref in self.references]
        y_axis = make_scale(ys, self.y_scale, bottom, top, from_zero=self.y_from_zero)
        y_ticks = ticks(y_axis)
        left = 14 + _CHARACTER * max(len(self.y_text(value)) for value in y_ticks)
        xs = [x for _, points in drawn for x, _ in points] + [value for value, _ in self.x_labels]
        x_axis = self._x_axis(xs, left + 4, WIDTH - 12)
        parts = [legend, self._grid(y_axis, y_ticks, left), self._x_ticks(x_axis, bottom)]
        parts += [self._reference(ref, y_axis, left) for ref in self.references]
        parts += [_drawn(one, points, x_axis, y_axis, self) for one, points in drawn]
        parts.append(
            f'<text class="label" x="{(left + WIDTH) / 2:.0f}" y="{bottom + 36:.0f}" text-anchor="middle">'
            f"{escaped(self.x_label)}</text>"
        )
        return _svg(self.title, self._described(), top + HEIGHT - 4, "".join(parts), standalone)

    def _drawable(self, one: Series) -> list[tuple[float, float]]:
        return [(x, y) for x, y in one.points if drawable(x, self.x_scale) and drawable(y, self.y_scale)]

    def _x_axis(self, xs: list[float], begin: float, end: float) -> Scale:
        if self.x_labels:  # ordinal: a little room at both ends
            low, high = min(xs), max(xs)
            return Scale("linear", low - 0.3, high + 0.3, begin, end)
        if self.x_scale == "log":
            return make_scale(xs, "log", begin, end)
        low, high = min(xs), max(xs)
        high = high if high > low else low + 1
        # Lines begin at the axis; points need room around them.
        margin = 0 if all(one.line for one in self.series if one.name) else 0.05 * (high - low)
        return Scale("linear", low - margin, high + margin, begin, end)

    def _grid(self, axis: Scale, values: list[float], left: float) -> str:
        parts = [f'<text class="label" x="2" y="{axis.end - 12:.0f}">{escaped(self.y_label)}</text>']
        for value in values:
            y = axis.place(value)
            parts.append(f'<line class="grid" x1="{left:.1f}" x2="{WIDTH - 6}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(
                f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">'
                f"{escaped(self.y_text(value))}</text>"
            )
        return "".join(parts)

    def _x_ticks(self, axis: Scale, bottom: float) -> str:
        labelled = list(self.x_labels) or [(value, self.x_text(value)) for value in ticks(axis)]
        widest = max(len(label) for _, label in labelled) * _CHARACTER + 8
        every = max(round(len(labelled) * widest / (WIDTH - 50) + 0.49), 1)
        parts = []
        for place, (value, label) in enumerate(labelled):
            x = axis.place(value)
            parts.append(f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
            if place % every == 0:
                half = len(label) * _CHARACTER / 2
                parts.append(
                    f'<text x="{min(x, WIDTH - half):.1f}" y="{bottom + 17}" text-anchor="middle">'
                    f"{escaped(label)}</text>"
                )
        return "".join(parts)

    def _reference(self, ref: Reference, axis: Scale, left: float) -> str:
        y = axis.place(ref.value)
        line = f'<line class="reference" x1="{left:.1f}" x2="{WIDTH - 6}" y1="{y:.1f}" y2="{y:.1f}"/>'
        if not ref.label:
            return line
        above = y - 4 if y > axis.end + 16 else y + 13
        return (
            f'{line}<text class="label" x="{WIDTH - 8}" y="{above:.1f}" text-anchor="end">'
            f"{escaped(ref.label)}</text>"
        )

    def _legend(self) -> tuple[str, float]:
        """Names of the series, in as many lines as they need; and where the plot begins."""
        named = [one for one in self.series if one.name and (self.legend is None or one.name in self.legend)]
        if len(named) < 2 and self.legend is None:
            return "", 24
        parts, x, y = [], 4.0, 13.0
        for one in named:
            width = 26 + len(one.name) * _CHARACTER + 18
            if x > 4 and x + width > WIDTH:
                x, y = 4.0, y + 18
            mark = (
                f'<line {_stroke(one, 3)} x1="{x}" x2="{x + 18}" y1="{y - 4}" y2="{y - 4}"/>'
                if one.line
                else f'<circle {_fill(one)} cx="{x + 9}" cy="{y - 4}" r="4.5"/>'
            )
            parts.append(f'{mark}<text x="{x + 23}" y="{y}">{escaped(one.name)}</text>')
            x += width
        return "".join(parts), y + 32

    def _described(self) -> str:
        """For readers who do not see it."""
        parts = []
        for one in self.series:
            points = self._drawable(one)
            if points:
                (x0, y0), (x1, y1) = points[0], points[-1]
                parts.append(
                    f"{one.name or self.y_label}: from {self.y_text(y0)} at {self._x_words(x0)} "
                    f"to {self.y_text(y1)} at {self._x_words(x1)}"
                )
        return f"{self.y_label} over {self.x_label}. {'; '.join(parts)}."

    def _x_words(self, value: float) -> str:
        return dict(self.x_labels).get(value, self.x_text(value))

    def note(self, x: float, y: float) -> str:
        return f"{self.x_label} {self._x_words(x)}: {self.y_text(y)}"


@dataclass(frozen=True)
class Bar:
    """ours: drawn in the accent colour. span: the interval that its value lies in."""

    label: str
    value: float
    shown: str
    ours: bool = False
    span: tuple[float, float] | None = None


@dataclass(frozen=True)
class Bars:
    """Horizontal bars, each under its label; a dashed line at `reference`."""

    title: str
    x_label: str
    bars: Sequence[Bar]
    reference: float | None = None

    def svg(self, *, standalone: bool = False) -> str:
        widest = max(len(bar.shown) for bar in self.bars) * 1.2 * _CHARACTER + 14  # bold
        most = max(max(bar.value, bar.span[1] if bar.span else 0) for bar in self.bars) or 1
        unit = (WIDTH - widest - 2) / most
        parts, y = [], 4
        for bar in self.bars:
            length = max(bar.value * unit, 1)
            middle = y + 27
            parts.append(
                f'<text x="2" y="{y + 12}">{escaped(bar.label)}</text>'
                f'<rect class="{"ours" if bar.ours else "other"}" x="2" y="{y + 18}" width="{length:.1f}" '
                f'height="18" rx="2"><title>{escaped(f"{bar.label}: {bar.shown}")}</title></rect>'
            )
            if bar.span:
                low, high = (2 + end * unit for end in bar.span)
                parts.append(
                    f'<path class="span" d="M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - 4}v8'
                    f'M{high:.1f} {middle - 4}v8"/>'
                )
                length = max(length, high)
            parts.append(f'<text class="value" x="{length + 8:.1f}" y="{y + 32}">{escaped(bar.shown)}</text>')
            y += 46
        if self.reference is not None:
            x = 2 + self.reference * unit
            parts.insert(0, f'<line class="reference" x1="{x:.1f}" x2="{x:.1f}" y1="18" y2="{y - 6}"/>')
        parts.append(f'<text class="label" x="2" y="{y + 10}">{escaped(self.x_label)}</text>')
        described = "; ".join(f"{bar.label}: {bar.shown}" for bar in self.bars)
        return _svg(self.title, f"{self.x_label}. {described}.", y + 18, "".join(parts), standalone)


def _drawn(one: Series, points: list[tuple[float, float]], x_axis: Scale, y_axis: Scale, chart: Chart) -> str:
    places = [(x_axis.place(x), y_axis.place(y)) for x, y in points]
    parts = []
    if one.line and len(places) > 1:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(f'<path {_stroke(one, 2)} d="M{path}"/>')
    shown = one.marks or not one.line or len(places) == 1
    notes = one.notes or [chart.note(x, y) for x, y in points]
    for (x, y), note in zip(places, notes, strict=True):
        # Lines have points too, which cannot be seen, for what they say.
        look = _fill(one) if shown else 'class="hit"'
        words = f"{one.name}, {note}" if one.name else note
        parts.append(
            f'<circle {look} cx="{x:.1f}" cy="{y:.1f}" r="{4 if shown else 6}">'
            f"<title>{escaped(words)}</title></circle>"
        )
    return f"<g>{''.join(parts)}</g>"


def _tone(one: Series) -> str:
    if isinstance(one.tone, float):
        names = ("first", "middle") if one.tone < 0.5 else ("middle", "last")
        ends = ",".join(f"var(--ramp-{name})" for name in names)
        return f"color-mix(in oklab,{ends} {200 * (one.tone % 0.5 if one.tone < 1 else 0.5):.0f}%)"
    return f"var(--s{one.tone % COLOURS})"


def _stroke(one: Series, width: float) -> str:
    dashes = ' stroke-dasharray="5 4"' if one.dashed else ""
    return f'class="line" style="stroke:{_tone(one)}" stroke-width="{width}"{dashes}'


def _fill(one: Series) -> str:
    return f'class="mark" style="fill:{_tone(one)}"'


def _svg(title: str, described: str, height: float, body: str, standalone: bool) -> str:
    style = namespace = ""
    if standalone:
        style = f"<style>{style_sheet('colours.css')}{style_sheet('chart.css')}</style>"
        namespace = ' xmlns="http://www.w3.org/2000/svg"'
    return (
        f'<svg{namespace} class="chart" role="img" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'aria-label="{escaped(f"{title}. {described}")}">{style}{body}</svg>'
    )


def style_sheet(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
