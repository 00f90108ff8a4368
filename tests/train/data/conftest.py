"""A small corpus to prepare."""

from __future__ import annotations

import pytest


@pytest.fixture
def config(tmp_path):
    """`DataConfig` of a corpus and a cache of its own."""
    from .corpora import small, write_corpus

    write_corpus(tmp_path / "text")
    return small(tmp_path / "text", tmp_path / "cache")
