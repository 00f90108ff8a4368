"""Integer arithmetic of the launchers (Triton's own helpers take microseconds each on the host)."""

from __future__ import annotations


def cdiv(number: int, divisor: int) -> int:
    """Division rounded up."""
    return -(-number // divisor)


def power_of_two(number: int) -> int:
    """The smallest power of two at or above `number` (>= 1)."""
    return 1 << (number - 1).bit_length()
