"""Training steps: how many layers are chosen."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from twell.measure import models, training
from twell.measure.contest import Setting
from twell.measure.models import ModelSize, layers_in, require_room
from twell.measure.training import TrainingCase, layers_that_fit

SIZE = ModelSize(hidden=64, neurons=256, layers=40, vocabulary=300, positions=128, nnz=6)


@pytest.fixture
def case(monkeypatch):
    monkeypatch.setattr(models, "_SAMPLE", 256)
    return TrainingCase(
        size=SIZE, name="small", batch=1, sequence=8, precision="float32", device=torch.device("cpu")
    )


def limit(monkeypatch, free: int) -> None:
    for module in (models, training):
        monkeypatch.setattr(module, "free_bytes", lambda device: free)


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_what_is_chosen_is_not_refused_later(case, monkeypatch, layers):
    """Though the measured steps take so little that more layers would fit."""
    needed = case.bytes_per_parameter * (SIZE.parameters - (SIZE.layers - layers) * SIZE.layer_parameters)
    free = int(needed / training._MARGIN) + 1
    limit(monkeypatch, free)
    monkeypatch.setattr(training, "peak_bytes", lambda step, device: 0)
    monkeypatch.setattr(training.Trained, "own_bytes", lambda self, contender: 1)
    found = layers_that_fit(case, Setting(device=case.device, rounds=1))
    assert found == layers == layers_in(training._MARGIN * free, SIZE, case.bytes_per_parameter)
    chosen = ModelSize(**{**vars(SIZE), "layers": found})
    require_room(chosen, bytes_per_parameter=case.bytes_per_parameter, device="cpu", name="small")


def test_what_steps_take_may_leave_room_for_fewer(case, monkeypatch):
    limit(monkeypatch, 1 << 30)
    taken = iter([100 << 20, 200 << 20])
    monkeypatch.setattr(training, "peak_bytes", lambda step, device: next(taken))
    monkeypatch.setattr(training.Trained, "own_bytes", lambda self, contender: 0)
    assert layers_that_fit(case, Setting(device=case.device, rounds=1)) == 9


def test_a_model_of_which_no_layer_fits_is_refused_before_anything_is_built(case, monkeypatch):
    limit(monkeypatch, 1 << 10)
    monkeypatch.setattr(TrainingCase, "build", lambda *given: pytest.fail("it was built"))
    with pytest.raises(ValueError, match="a smaller preset"):
        layers_that_fit(case, Setting(device=case.device, rounds=1))
