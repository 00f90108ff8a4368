"""Which text a run learns from, and how it becomes tokens: the section `data` of a run's settings."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..._checks import reject

BYTE_TOKENS = 257
"""The least a byte-level vocabulary holds: every byte, and the end of a document."""

_PREPARED = "prepared:"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The corpus, the tokenizer and the cut into sequences.

    source:           "python" (Python's standard library, built in), a file or folder (text of any name,
                      .jsonl, also as .gz or .xz, and .parquet), "hf:NAME[:CONFIG[:SPLIT]]", or a list of
                      these; or "prepared:FOLDER": tokens and tokenizer that were prepared before, perhaps
                      elsewhere.
    text_field:       the field of a .jsonl, .parquet or Hugging Face record that holds the text.
    tokenizer:        "train": a byte-level BPE learnt from the corpus; else a Hugging Face name or folder.
    vocab_size:       of a trained tokenizer, the end-of-document token included.
    tokenizer_bytes:  text a tokenizer is trained on, at most.
    sequence_length:  tokens per training example.
    held_out:         share of the documents that is never trained on, or of the end of the only one; 0 keeps
                      none.
    held_out_tokens:  size of the evaluation set, at most.
    max_tokens:       training tokens, at most; None takes the whole source.
    seed:             decides, with a document's text alone, whether it is held out.
    cache:            folder for tokens and tokenizers; None: `twell/data` in the user's cache folder.
    """

    source: str | tuple[str, ...] = "python"
    text_field: str = "text"
    tokenizer: str = "train"
    vocab_size: int = 4096
    tokenizer_bytes: int = 20_000_000
    sequence_length: int = 256
    held_out: float = 0.02
    held_out_tokens: int = 1_000_000
    max_tokens: int | None = None
    seed: int = 0
    cache: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.source, list):
            object.__setattr__(self, "source", tuple(self.source))
        names = self.source if isinstance(self.source, tuple) else (self.source,)
        if not names or not all(_is_text(name) for name in names):
            reject("data.source", repr(self.source), "'python', a path, 'hf:NAME', or a list of these")
        for name in ("text_field", "tokenizer"):
            if not _is_text(getattr(self, name)):
                reject(f"data.{name}", repr(getattr(self, name)), "a non-empty string")
        if self.cache is not None and not _is_text(self.cache):
            reject("data.cache", repr(self.cache), "None or a folder")
        if not _is_int(self.vocab_size) or self.vocab_size < BYTE_TOKENS:
            reject(
                "data.vocab_size",
                repr(self.vocab_size),
                f"an integer >= {BYTE_TOKENS}: one per byte, one end",
            )
        for name in ("tokenizer_bytes", "sequence_length", "held_out_tokens"):
            if not _is_int(getattr(self, name)) or getattr(self, name) < 1:
                reject(f"data.{name}", repr(getattr(self, name)), "an integer >= 1")
        if type(self.held_out) not in (int, float) or not 0 <= self.held_out < 1:
            reject("data.held_out", repr(self.held_out), "a number from 0 to 1, without 1")
        if self.max_tokens is not None and not (
            _is_int(self.max_tokens) and self.max_tokens >= self.sequence_length
        ):
            accepted = f"None or an integer >= sequence_length = {self.sequence_length}"
            reject("data.max_tokens", repr(self.max_tokens), accepted)
        if not _is_int(self.seed) or self.seed < 0:
            reject("data.seed", repr(self.seed), "an integer >= 0")

    @property
    def prepared(self) -> Path | None:
        """The folder that `source` names as prepared; what else is said about text does not count then."""
        if isinstance(self.source, str) and self.source.startswith(_PREPARED):
            return Path(self.source.removeprefix(_PREPARED)).expanduser()
        return None

    @property
    def sources(self) -> tuple[str, ...]:
        """`source` as a tuple."""
        return self.source if isinstance(self.source, tuple) else (self.source,)

    @property
    def cache_folder(self) -> Path:
        """Where tokens and tokenizers are kept; need not exist yet."""
        if self.cache is not None:
            return Path(self.cache).expanduser()
        base = os.environ.get("XDG_CACHE_HOME", "")
        # The XDG specification has relative paths ignored.
        root = Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()
        return root / "twell" / "data"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
