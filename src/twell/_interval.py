"""How many times faster one thing is than another, from rounds that ran side by side, and how surely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import comb
from statistics import median

ENOUGH_ROUNDS = 6
"""The fewest whose extremes hold their median with 95%; those of five do with 94%, of four with 88%."""

MEANING = f"95% interval; with fewer than {ENOUGH_ROUNDS} rounds, lowest and highest round"
DENSE_GAINS = "What blocks gain that ran dense comes from how they compute, not from their zeros."
_MISSED = 0.05
_WIDE = 1.5  # between the ends of an interval; on quiet machines it is 1.25


@dataclass(frozen=True)
class Interval:
    """A median of ratios and its bounds, see `paired_gain`. Another run may lie outside, on a machine that
    others use."""

    low: float
    middle: float
    high: float

    @property
    def is_wide(self) -> bool:
        """Whether something else was busy meanwhile."""
        return self.high > _WIDE * self.low

    def __str__(self) -> str:
        if self.low == self.high:  # of one round
            return f"{self.middle:.2f}x"
        return f"{self.middle:.2f}x ({self.low:.2f}-{self.high:.2f})"


def paired_gain(baseline: Sequence[Sequence[float]], seconds: Sequence[Sequence[float]]) -> Interval:
    """How many times faster `seconds` is than `baseline`: the median ratio of rounds, which ran side by side.

    Both by process and by round; in one process at least both have some.

    The bounds of a process are its k-th lowest and k-th highest ratio. They hold the median with at least 95%
    whatever the distribution, if rounds are independent; fewer than six rounds have only their extremes, see
    `ENOUGH_ROUNDS`. Several processes: from their lowest bound to their highest, so that it shows how they
    differ; two or three cannot tell how another one would.
    """
    ratios = [
        [theirs / ours for theirs, ours in zip(*rounds, strict=False)]
        for rounds in zip(baseline, seconds, strict=True)
    ]
    bounds = [_bounds(some) for some in ratios if some]
    middle = median(ratio for some in ratios for ratio in some)
    return Interval(min(low for low, _ in bounds), middle, max(high for _, high in bounds))


def _bounds(ratios: list[float]) -> tuple[float, float]:
    ordered, count = sorted(ratios), len(ratios)
    # Fewer than k of them are below their median with the chance of fewer than k heads in as many throws.
    fewer = (heads / 2**count for heads in accumulate(comb(count, k) for k in range(count)))
    place = max(sum(2 * chance <= _MISSED for chance in fewer) - 1, 0)
    return ordered[place], ordered[-1 - place]
