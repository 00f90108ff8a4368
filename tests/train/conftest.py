"""A corpus to train on."""

from __future__ import annotations

import pytest


@pytest.fixture
def corpus(tmp_path):
    """One that the test may change."""
    from .runs import write_corpus

    return write_corpus(tmp_path / "corpus")
