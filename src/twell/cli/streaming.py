"""Text as a model makes it, with the time of every token."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from typing import Any

from torch import Tensor
from transformers import TextStreamer

from .progress import Progress


class Stream(TextStreamer):
    """Prints a single text as it comes, after the progress line has vanished. Of several it counts tokens.

    times:  when the prompt and each token came.
    first:  how many tokens come before a steady pace. Text waits for them.
    """

    def __init__(self, tokenizer: Any, texts: int, first: int, progress: Progress, preparing: str) -> None:
        """preparing:  what goes on between the first token and the last of the first."""
        super().__init__(tokenizer, skip_special_tokens=True)
        self.times: list[float] = []
        self._prints, self.first = texts == 1, first
        self._progress, self._preparing = progress, preparing
        self._held: str | None = ""

    @property
    def made(self) -> int:
        return max(len(self.times) - 1, 0)

    def put(self, value: Tensor) -> None:
        self.times.append(perf_counter())
        if self.made == 1 < self.first:
            self._progress.show(self._preparing)
        if self._prints:
            super().put(value)

    def end(self) -> None:
        if self._prints:
            super().end()

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self._held is not None:
            self._held += text
            if self.made < self.first and not stream_end:
                return
            text, self._held = self._held, None
            self._progress.clear()
        print(text, flush=True, end="\n" if stream_end else "")

    def show(self, texts: Iterable[str]) -> None:
        """Print several, once they are there."""
        self._progress.clear()
        for number, text in enumerate(texts, 1):
            print(f"--- {number}\n{text}", flush=True)
