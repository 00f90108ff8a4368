"""The weight of the L1 penalty over a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class L1Schedule:
    """0 until step `start`, a linear ramp, `weight` from step `end` on."""

    weight: float
    start: int = 0
    end: int = 0

    def __call__(self, step: int) -> float:
        if step >= self.end:
            return self.weight
        if step <= self.start:
            return 0.0
        return self.weight * (step - self.start) / (self.end - self.start)
