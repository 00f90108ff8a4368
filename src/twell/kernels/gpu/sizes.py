"""Sizes that are known without a GPU, or Triton."""

from __future__ import annotations

DEFAULT_ROWS = 128  # tokens per block
READ_AHEAD = 256  # entries that kernels read past the end of a list


def list_sizes(tokens: int, neurons: int, rows: int) -> tuple[int, int]:
    """Integers in the lists of active neurons (and what is read past their end), and in the counts."""
    blocks = -(-tokens // (rows or DEFAULT_ROWS))
    return blocks * neurons + READ_AHEAD, blocks
