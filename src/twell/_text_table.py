"""Tables as plain text, which fit a terminal."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence


def terminal_width() -> int | None:
    """Columns of the terminal that is printed on; None where the output is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None


def aligned(columns: Mapping[str, Sequence[str]]) -> list[str]:
    """The lines of a table with a title above each column."""
    padded = []
    for title, cells in columns.items():
        width = max(map(len, (title, *cells)))
        padded.append([cell.ljust(width) for cell in (title, *cells)])
    return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]


def together(names: Sequence[str]) -> str:
    """`names` in few words: "h.0-3,7.mlp" where they differ in one number, as layers of a model do."""
    parts = [re.split(r"(\d+)", name) for name in names]
    template = parts[0]
    differ = {
        place
        for other in parts
        for place in range(max(len(template), len(other)))
        if template[place : place + 1] != other[place : place + 1]
    }
    if len(differ) != 1 or (place := differ.pop()) % 2 == 0:  # numbers are at odd places
        return ", ".join(names)
    spans: list[list[int]] = []
    for number in sorted(int(part[place]) for part in parts):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    numbers = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return "".join([*template[:place], numbers, *template[place + 1 :]])


def wrapped(line: str, width: int | None, indent: str = "") -> str:
    """indent: before every line; lines after the first get two columns more."""
    if width is None:
        return f"{indent}{line}"
    return textwrap.fill(
        line,
        width,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
