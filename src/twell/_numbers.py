"""Measured numbers in tables, plots and pages, and how long something still takes."""

from __future__ import annotations


def digits(value: float, count: int = 3) -> str:
    """A finite number with `count` significant digits, zeros among them, and all digits before the point."""
    power = int(f"{value:.{count - 1}e}".partition("e")[2])
    return f"{value:,.{max(count - 1 - power, 0)}f}"


def time_left(seconds: float) -> str:
    """An estimate in words, no more exact than it is."""
    if seconds < 10:
        return "a few seconds left"
    if seconds < 90:
        return f"about {10 * round(seconds / 10)} s left"
    return f"about {seconds / 60:.0f} min left"


def counted(number: int, word: str) -> str:
    """1 record, 2 records."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"
