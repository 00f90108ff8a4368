"""Numbers as a reader wants them."""

from __future__ import annotations

import math

RESAMPLED = "95% of resampled medians"  # the intervals of records without rounds
_WIDE = 4  # H over D of usual blocks that are not gated; gated ones have about 8/3


def short(value: float) -> str:
    """Three digits and a unit: 1,234,000 is 1.23M, 0.00012 is 1.2e-4."""
    if value == 0:
        return "0"
    size = abs(value)
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if size >= unit:
            return f"{value / (1e3 if name == 'k' else unit):.3g}{name}"
    if size >= 1000:
        return f"{value:,.0f}"
    if size < 1e-3:
        return exponent(value)
    return f"{value:.3g}"


def exponent(value: float) -> str:
    """2e-05 as 2e-5."""
    if value == 0:
        return "0"
    mantissa, _, power = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(power)}"


def share(value: float) -> str:
    """A share in percent, with the digits that small ones need."""
    percent = 100 * value
    return f"{percent:.0f}%" if percent >= 9.95 else f"{percent:.2g}%"


def times(value: float) -> str:
    return f"{value:.2f}x"


def change(value: float) -> str:
    """A ratio as a change: 0.83 is -17.0%."""
    return f"{100 * (value - 1):+.1f}%".replace("-", "\N{MINUS SIGN}")


def seconds(value: float) -> str:
    for unit, name in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value / 1e-9:.3g} ns"


def gigabytes(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def width_note(hidden: int | None, neurons: int | None) -> str:
    """Says that blocks are wider than usual ones, and so gain more; empty for others."""
    if not hidden or not neurons or neurons <= _WIDE * hidden:
        return ""
    return (
        f"Its blocks are wide: D {hidden:,}, H {neurons:,}, which is {neurons / hidden:.3g} x D. The paper's "
        "models have 2.75 x D; token by token, wider blocks gain more."
    )


def amount(value: float, unit: str) -> str:
    """A value of a record in its unit."""
    if unit == "s":
        return seconds(value)
    if unit in ("bytes", "B"):
        return gigabytes(value) if value >= 2**20 else f"{value / 2**10:.0f} KiB"
    return f"{short(value)} {unit}"


def optional(value: float | None, form: str) -> str:
    return "" if value is None or not math.isfinite(value) else format(value, form)


def listed(words: list[str], most: int = 3) -> str:
    """a, b and 4 more."""
    if len(words) <= most:
        return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"{', '.join(words[: most - 1])} and {len(words) - most + 1} more"
