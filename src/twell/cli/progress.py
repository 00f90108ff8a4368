"""What a command shows while it works: a line or a bar, on a terminal only: piped output stays clean.

Both vanish before results are printed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as Bars
from rich.status import Status
from rich.table import Column
from rich.text import Text

from .._interval import DENSE_GAINS as DENSE_GAINS  # for commands that import it from here

READING_TASKS = "reading lm-eval's tasks"
NOISY = "These times vary a lot: other programs are busy. Measure again on a quiet machine."
_TOKENS = "tokens"
_WIDTH = 12  # characters of a bar: with its numbers it fits 80


class Progress:
    """A line that says what takes so long. Whoever prints text clears it before."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None

    def show(self, what: str) -> None:
        line = Text(what)  # brackets are no markup
        if self._status is not None:
            self._status.update(line)
        elif self._console.is_terminal:
            self._status = self._console.status(line)
            self._status.start()

    def clear(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


@contextmanager
def showing(console: Console, what: str) -> Iterator[None]:
    """A line around what takes seconds, such as imports."""
    progress = Progress(console)
    progress.show(what)
    try:
        yield
    finally:
        progress.clear()


def announce_tasks(console: Console, names: Sequence[str]) -> None:
    """Say which tasks lm-eval begins: its own bars do not."""
    if console.is_terminal:
        console.print(f"lm-eval: {', '.join(names)}", highlight=False, markup=False, soft_wrap=True)


class Bar:
    """A bar with counts and the time that is left; where no total is known, the time that has passed.

        with Bar(console, "evaluating", total) as bar:
            bar.advance(512)

    unit:  what is counted; tokens have a pace, too.
    """

    def __init__(self, console: Console, what: str, total: int | None = None, unit: str = _TOKENS) -> None:
        pace = [_Pace()] if unit == _TOKENS else []
        description = TextColumn("{task.description}", markup=False)
        columns = (description, BarColumn(bar_width=_WIDTH), _Count(unit), *pace, _Time())
        self._bars = Bars(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bars.add_task(what, total=total)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def advance(self, amount: int = 1) -> None:
        self._bars.advance(self._task, amount)

    def reach(self, done: float, total: float) -> None:
        self._bars.update(self._task, completed=done, total=total)

    def show(self, what: str) -> None:
        """What it does now."""
        self._bars.update(self._task, description=what)

    def clear(self) -> None:
        """Before others print."""
        self._bars.stop()


class Steps:
    """Bars that follow each other, each begun by its first word.

    with Steps(console) as steps:
        steps.reach("timing", 1, 8, "blocks")
        steps.advance("counting", 512, total)
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._doing = ""
        self._bar: Bar | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.clear()

    def reach(self, what: str, done: float, total: float, unit: str = _TOKENS) -> None:
        self._begun(what, int(total), unit).reach(done, total)

    def advance(self, what: str, amount: int, total: int | None, unit: str = _TOKENS) -> None:
        self._begun(what, total, unit).advance(amount)

    def _begun(self, what: str, total: int | None, unit: str) -> Bar:
        if self._bar is None or what != self._doing:
            if self._bar is not None:
                self._bar.clear()
            self._doing, self._bar = what, Bar(self._console, what, total, unit).__enter__()
        return self._bar


class _Words(ProgressColumn):
    """Stays on its line, however narrow the terminal is."""

    def __init__(self) -> None:
        super().__init__(table_column=Column(no_wrap=True))


class _Count(_Words):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        # Totals of text are estimates: one that was too small is left out.
        too_small = task.total is None or task.completed > task.total
        total = "" if too_small else f"/{task.total:,.0f}"
        return Text(f"{int(task.completed):,}{total} {self._unit}")


class _Pace(_Words):
    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:,.0f} tokens/s")


class _Time(_Words):
    def render(self, task: Task) -> Text:
        left = None if task.finished else task.time_remaining
        seconds, word = (task.elapsed or 0, "") if left is None else (left, " left")
        return Text(f"{timedelta(seconds=int(seconds))}{word}")
