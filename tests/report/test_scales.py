"""Axes: every value inside, labels few and round; numbers as readers want them."""

from __future__ import annotations

import math

import pytest

from twell.report.chart import Chart, Series
from twell.report.scales import make_scale, ticks
from twell.report.wording import amount, change, exponent, listed, share, short

SPANS = [(0, 1), (5.44, 5.7), (0, 0), (3, 3), (-2, 7), (1e-6, 3e-6), (12, 98_000), (0, 4e9)]


@pytest.mark.parametrize(("low", "high"), SPANS)
@pytest.mark.parametrize("kind", ["linear", "log"])
def test_values_are_inside_and_ticks_are_few(low, high, kind):
    if kind == "log":
        low, high = max(low, 0.01), max(high, 0.01)
    scale = make_scale([low, high], kind, 200, 20)
    assert 20 <= scale.place(high) <= scale.place(low) <= 200
    found = ticks(scale)
    assert 2 <= len(found) <= 8
    assert all(20 - 1e-6 <= scale.place(value) <= 200 + 1e-6 for value in found)
    assert found == sorted(found)


def test_what_has_no_place_is_left_out():
    points = [(1, 0.0), (2, 5.0), (3, math.nan), (4, 20.0)]
    drawn = Chart("t", "x", "y", [Series("a", points), Series("b", [(1, 3.0)])], y_scale="log").svg()
    assert drawn.count("<circle") == 3
    assert "nan" not in drawn


def test_numbers_are_short():
    assert [short(value) for value in (0, 0.5, 12.34, 1234, 45_678, 2.5e6, 3e9, 2e-5)] == [
        "0", "0.5", "12.3", "1,234", "45.7k", "2.5M", "3B", "2e-5",
    ]  # fmt: skip
    assert [share(value) for value in (0, 0.0054, 0.05, 0.123, 1)] == ["0%", "0.54%", "5%", "12%", "100%"]
    assert exponent(2e-05) == "2e-5"
    assert change(0.83) == "−17.0%"  # noqa: RUF001 - a minus sign
    assert [amount(0.0021, "s"), amount(3 * 2**30, "bytes"), amount(7, "mJ")] == [
        "2.1 ms",
        "3.00 GiB",
        "7 mJ",
    ]
    assert listed(["a", "b", "c", "d"]) == "a, b and 2 more"
