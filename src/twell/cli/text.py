"""The `--text` of commands that read some."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..train.data import DataConfig

_PIECE_BYTES = 1 << 16  # of a file, to see whether it has text


def text_source(text: Sequence[str]) -> DataConfig:
    """Where the text comes from. What is missing or empty is named before anything is loaded."""
    from ..train.data import DataConfig
    from ..train.data.sources import documents

    names = tuple(text)
    try:
        source = DataConfig(source=names)
        found = documents(source, longest=_PIECE_BYTES)
        if all(map(_reads_again, names)):
            next(found)
    except ValueError as error:  # names the setting of `twell train`, and its value
        said = str(error).replace(repr(names), ", ".join(map(repr, names)), 1)
        raise ValueError(said.replace("data.source:", "--text:", 1)) from error
    return source


def expected_tokens(source: DataConfig, tokenizer: Any, most: int | None = None) -> int | None:
    """About how many tokens the text has, up to `most`, from how many its beginning has; None: unknown."""
    from ..evaluation import text_tokens
    from ..train.data.sources import documents, text_bytes

    size = text_bytes(source)
    if size is None:
        return most
    beginning = next(documents(source, longest=_PIECE_BYTES))[:_PIECE_BYTES]
    tokens = sum(1 for _ in text_tokens(tokenizer, [beginning]))
    found = max(round(size * tokens / len(beginning.encode())), 1)
    return found if most is None else min(found, most)


def _reads_again(name: str) -> bool:
    """Whether a first look is cheap and takes nothing away, unlike datasets on the Hub and pipes."""
    from ..train.data.sources import BUILT_IN

    path = Path(name).expanduser()
    return name == BUILT_IN or path.is_file() or path.is_dir()
