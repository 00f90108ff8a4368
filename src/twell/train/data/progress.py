"""A progress bar on the error stream, so that output stays clean."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Report = Callable[[int, str], None]
"""Takes how much is done, in the unit of the total, and what to say about it."""


@contextlib.contextmanager
def progress(description: str, *, total: int | None, quiet: bool) -> Iterator[Report]:
    """Show a bar while the block runs; `total` None means unknown, `quiet` shows nothing."""
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=quiet,
    )
    with bar:
        task = bar.add_task(description, total=total, note="")

        def report(done: int, note: str) -> None:
            bar.update(task, completed=done, note=note)

        yield report
        bar.update(task, total=1, completed=1)
