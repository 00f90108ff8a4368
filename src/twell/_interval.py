"""How many times faster one thing is than another, from rounds that ran side by side, and how surely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

_RESAMPLED = 2000
# The median of fewer rounds cannot be bounded so surely: five hold it in 94% of cases, four in 88%.
_FEWEST = 6
_SURE = NormalDist().inv_cdf(0.975)
_WIDE = 1.5  # between the ends of an interval; on quiet machines it is 1.25


@dataclass(frozen=True)
class Interval:
    """A median of ratios, and bounds that hold it with 95% in this run; of fewer than six rounds, the least
    and the largest ratio. Another run on a machine that others use may lie outside."""

    low: float
    middle: float
    high: float

    @property
    def is_wide(self) -> bool:
        """Whether something else was busy meanwhile."""
        return self.high > _WIDE * self.low

    def __str__(self) -> str:
        return f"{self.middle:.2f}x ({self.low:.2f}-{self.high:.2f})"


def paired_gain(baseline: Sequence[Sequence[float]], seconds: Sequence[Sequence[float]]) -> Interval:
    """How many times faster `seconds` is than `baseline`: the median ratio of rounds, which ran side by side.

    Both by process and by round; in one process at least both have some. The interval resamples processes,
    and rounds inside of them.
    """
    ratios = [
        [theirs / ours for theirs, ours in zip(*rounds, strict=False)]
        for rounds in zip(baseline, seconds, strict=False)
    ]
    rounds = min(len(some) for some in ratios if some)  # one that was interrupted has fewer
    table = np.array([some[:rounds] for some in ratios if some])
    middle = float(np.median(table))
    if table.size < _FEWEST:
        return Interval(float(table.min()), middle, float(table.max()))
    generator = np.random.default_rng(0)
    processes = generator.integers(len(table), size=(_RESAMPLED, len(table), 1))
    places = generator.integers(rounds, size=(_RESAMPLED, len(table), rounds))
    drawn = np.median(table[processes, places].reshape(_RESAMPLED, -1), axis=1)
    outside = _outside(table.size)
    low, high = np.quantile(drawn, (outside, 1 - outside))
    return Interval(float(low), middle, float(high))


def _outside(rounds: int) -> float:
    """The share of resampled medians to leave out on either side, so that 95% of intervals hold the truth.

    Resampling a few values shows less spread than they have, and 2.5% would hold it in 88 to 92% of cases:
    the percentile is the normal one of Student's quantile (by its expansion, exact to 1% from five on).
    """
    free = rounds - 1
    student = _SURE + (_SURE**3 + _SURE) / (4 * free)
    student += (5 * _SURE**5 + 16 * _SURE**3 + 3 * _SURE) / (96 * free**2)
    return NormalDist().cdf(-student * (rounds / free) ** 0.5)
