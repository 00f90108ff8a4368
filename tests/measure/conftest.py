"""Keeps the collections that every measurement begins with short."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _imported_objects_left_alone() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
