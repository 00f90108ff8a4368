"""A line that says what takes so long."""

from __future__ import annotations

from rich.console import Console
from rich.status import Status
from rich.text import Text


class Progress:
    """On a terminal only. Whoever prints text clears it before."""

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
