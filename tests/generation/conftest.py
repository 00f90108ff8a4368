"""Static steps on the CPU."""

from __future__ import annotations

import pytest


@pytest.fixture
def static(monkeypatch):
    """Static steps on the CPU; counts them."""
    pytest.importorskip("transformers")
    from twell.generation import generate
    from twell.generation.step import Step

    monkeypatch.setattr(generate, "DEVICES", ("cpu",))
    ran = []
    run = Step.run
    monkeypatch.setattr(Step, "run", lambda self: (ran.append(self), run(self))[1])
    return ran
