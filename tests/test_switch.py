"""Dense or sparse training, by what is known of a layer."""

from __future__ import annotations

import pytest

from twell import training_states
from twell.kernels import switch


@pytest.fixture(autouse=True)
def _nothing_known():
    switch.forget()
    yield
    switch.forget()


def decide(*shares):
    return [switch.trains_sparse("layer", share, enter=0.5, leave=0.6) for share in shares]


def test_dense_until_something_is_known():
    assert decide(None, None) == [False, False]


def test_it_does_not_flap_between_the_limits():
    assert decide(0.55, 0.5, 0.55, 0.6, 0.61, 0.55, 0.4) == [False, True, True, True, False, False, True]
    (state,) = training_states()
    assert (state.sparse, state.share, state.switches) == (True, 0.4, 3)


def test_a_reading_that_is_lost_changes_nothing():
    assert decide(0.1, None, None, 0.9, None) == [True, True, True, False, False]


def test_switches_are_logged(caplog):
    with caplog.at_level("INFO", logger="twell"):
        decide(0.25, 0.25, 0.75)
    assert ["sparse: 25.0%" in r.message or "dense: 75.0%" in r.message for r in caplog.records] == [True] * 2


def test_layers_are_forgotten_rather_than_piled_up(monkeypatch):
    monkeypatch.setattr(switch, "_MOST_LAYERS", 3)
    for layer in range(5):
        switch.trains_sparse(layer, 0.1, 0.5, 0.6)
    assert [state.layer for state in training_states()] == [2, 3, 4]
