"""The L1 schedule; whole runs are in test_run.py."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from twell.train.recipe import L1Schedule


def test_l1_schedule():
    schedule = L1Schedule(weight=2.0, start=10, end=20)
    assert [schedule(step) for step in (0, 10, 15, 20, 1000)] == [0.0, 0.0, 1.0, 2.0, 2.0]
    assert L1Schedule(weight=2.0)(0) == 2.0
