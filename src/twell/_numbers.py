"""Measured numbers in tables, plots and pages."""

from __future__ import annotations


def digits(value: float, count: int = 3) -> str:
    """A finite number with `count` significant digits, zeros among them, and all digits before the point."""
    power = int(f"{value:.{count - 1}e}".partition("e")[2])
    return f"{value:,.{max(count - 1 - power, 0)}f}"
