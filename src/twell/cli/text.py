"""The `--text` of commands that read some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..train.data import DataConfig


def text_source(text: Sequence[str]) -> DataConfig:
    """Where the text comes from. What is missing is named before anything is loaded."""
    from ..train.data import DataConfig
    from ..train.data.sources import documents

    try:
        source = DataConfig(source=tuple(text))
        documents(source)
    except ValueError as error:  # names the setting of `twell train`
        raise ValueError(str(error).replace("data.source:", "--text:", 1)) from error
    return source
