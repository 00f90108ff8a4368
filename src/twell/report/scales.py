"""Axes: where values go, and which get a label."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from .wording import short

Kind = Literal["linear", "log"]
_DECADES = 4  # high over low of a logarithmic axis that powers of ten say enough about


@dataclass(frozen=True)
class Scale:
    """low, high: values at the ends. begin, end: where these are drawn."""

    kind: Kind
    low: float
    high: float
    begin: float
    end: float

    def place(self, value: float) -> float:
        if self.kind == "log":
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.begin + part * (self.end - self.begin)


def drawable(value: float | None, kind: Kind) -> bool:
    """Whether a scale has a place for it."""
    return value is not None and math.isfinite(value) and (kind == "linear" or value > 0)


def make_scale(
    values: Sequence[float], kind: Kind, begin: float, end: float, *, from_zero: bool = False
) -> Scale:
    """Wide enough for `values`, from one round number to another on linear axes."""
    low, high = min(values), max(values)
    if kind == "log":
        if high / low < 1.5:
            low, high = low / 1.5, high * 1.5
        margin = (high / low) ** 0.04
        return Scale(kind, low / margin, high * margin, begin, end)
    if from_zero:
        low, high = min(low, 0), max(high, 0)
    if low == high:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    step = _step(high - low, 5)
    return Scale(kind, math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, begin, end)


def ticks(scale: Scale, count: int = 5) -> list[float]:
    if scale.kind == "linear" or scale.high / scale.low < _DECADES:
        step = _step(scale.high - scale.low, count)
        first = math.ceil(scale.low / step - 1e-9)
        return [round(place * step, 12) for place in range(first, math.floor(scale.high / step + 1e-9) + 1)]
    decades = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
    for mantissas in ((1,), (1, 3), (1, 2, 5)):
        found = [m * 10.0**d for d in decades for m in mantissas]
        found = [value for value in found if scale.low * 0.999 <= value <= scale.high * 1.001]
        if len(found) >= 3:
            break
    every = max(math.ceil(len(found) / (count + 2)), 1)
    return found[::every]


def _step(span: float, count: int) -> float:
    """1, 2 or 5 times a power of ten."""
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    return next(power * digit for digit in (1, 2, 5, 10) if raw <= power * digit * 1.0001)


Labelled = Callable[[float], str]


def plain(value: float) -> str:
    return short(round(value, 10))
