"""Where automatic plans switch: built-in tables, tuned ones, and the crossing that tuning looks for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from twell import Plan
from twell import crossover as limits
from twell._files import CACHE_VARIABLE
from twell.measure.tune import crossing, training_gain, tune_gpu, tune_training

SHAPE = limits.Shape(2048, 5632, True)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    limits._tuned.cache_clear()
    yield
    limits._tuned.cache_clear()


def test_built_in_limits_take_the_nearest_smaller_count():
    table = limits._HOPPER
    assert limits.share_limit("any", True, SHAPE, 1) == table[1]
    assert limits.share_limit("any", True, SHAPE, 5) == table[1]
    assert limits.share_limit("any", True, SHAPE, 40) == table[33]
    for hidden in (512, 8192):
        assert limits.share_limit("any", True, limits.Shape(hidden, 8192, True), 8) == 0.0  # not measured
        assert limits.share_limit("any", True, limits.Shape(hidden, 8192, True), 8192) == 0.85
    wide = limits.Shape(4096, 11008, True)
    assert limits.share_limit("any", True, wide, 40) == limits._HOPPER_WIDE[33] < table[33]
    assert limits.share_limit("any", True, SHAPE, 65) == 0.0
    assert limits.share_limit("any", True, SHAPE, 10**6) == 1.0
    assert limits.share_limit("any", False, SHAPE, 10**6) == 0.0  # not measured: dense until tuned


def test_tuned_limits_win_for_their_shape_and_survive_the_process():
    plain = limits.Shape(2048, 5632, False)
    limits.store("Some GPU", SHAPE, {1: 0.25, 64: 0.5})
    limits.store("Some GPU", plain, {1: 0.125})
    limits._tuned.cache_clear()  # as a new process would start
    assert limits.share_limit("Some GPU", True, SHAPE, 63) == 0.25
    assert limits.share_limit("Some GPU", True, SHAPE, 64) == 0.5
    assert limits.share_limit("Some GPU", True, plain, 64) == 0.125
    assert limits.share_limit("Some GPU", True, limits.Shape(1024, 4096, True), 1) == limits._HOPPER[1]
    assert limits.share_limit("Other GPU", True, SHAPE, 10**6) == 1.0


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": 1}', '{"a": {"b": 1}}', "{}"])
def test_a_broken_file_is_as_none(content):
    limits.cache_file("Some GPU").write_text(content)
    assert limits.share_limit("Some GPU", True, SHAPE, 1) == limits._HOPPER[1]


def test_without_a_home_directory(monkeypatch):
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert limits.share_limit("Some GPU", True, SHAPE, 1) == limits._HOPPER[1]
    assert limits.store("Some GPU", SHAPE, {1: 0.5}) is None
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert limits.cache_file("G").parts[:3] == ("/", "somewhere", "twell")


def test_fewer_tokens_than_any_entry_take_the_first():
    limits.store("Some GPU", SHAPE, {64: 0.5})
    assert limits.share_limit("Some GPU", True, SHAPE, 1) == 0.5


@pytest.mark.parametrize(
    ("gains", "limit"),
    [
        ({0.1: 2.0, 0.5: 1.5, 1.0: 0.98}, 1.0),  # never slower than dense: always sparse
        ({0.1: 0.9, 0.5: 0.8, 1.0: 0.7}, 0.0),  # never faster
        ({0.1: 2.0, 0.5: 1 / 0.97, 1.0: 0.5}, 0.5),
        ({0.1: 0.9, 0.5: 2.0, 1.0: 0.5}, 0.0),  # a gain past a loss is not trusted
    ],
)
def test_crossing(gains, limit):
    assert crossing(gains) == pytest.approx(limit)


def test_crossing_is_linear_between_shares():
    assert crossing({0.0: 2 / 0.97, 1.0: 0.0}) == pytest.approx(0.5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it measures")
@pytest.mark.parametrize("tune", [tune_gpu, tune_training])
def test_tuning_needs_a_gpu(tune):
    with pytest.raises(ValueError, match="device: got no CUDA device"):
        tune()


@pytest.mark.parametrize("gated", [True, False])
def test_limits_of_training_are_beside_those_of_inference(gated):
    shape = limits.Shape(2048, 5632, gated)
    assert limits.training_limit("Some GPU", shape, 4096) is None
    limits.store("Some GPU", shape, {1: 0.25})
    limits.store("Some GPU", shape._replace(training=True), {1: 0.0, 1024: 0.375, 4096: 0.625})
    limits._tuned.cache_clear()  # as a new process would start
    found = [limits.training_limit("Some GPU", shape, tokens) for tokens in (1, 1023, 1024, 5000)]
    assert found == [0.0, 0.0, 0.375, 0.625]
    assert limits.share_limit("Some GPU", True, shape, 4096) == 0.25
    assert limits.training_limit("Some GPU", limits.Shape(2048, 5632, not gated), 4096) is None
    assert len(limits.tuned_shapes("Some GPU")) == 2


@pytest.mark.parametrize("gated", [True, False])
def test_a_training_step_is_timed(gated):
    """On a CPU, where the sparse step runs for real; what it gains is the machine's business."""
    plan = Plan(path="row", backend="cpu")
    options = {"repetitions": 2, "device": "cpu", "dtype": torch.float32}
    assert 0 < training_gain(64, 64, 256, 0.05, gated, plan, **options) < 1000


def test_tuned_training_is_stored_for_the_policy(monkeypatch):
    """Everything but the timing, which the gains of a made-up GPU replace."""
    from types import SimpleNamespace

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="Some GPU"))
    monkeypatch.setattr(
        "twell.measure.tune.training_gain",
        lambda count, hidden, neurons, share, *rest, **options: (0.5 if count < 4096 else 1.5) - share,
    )
    rows = []
    found = tune_training(512, 2048, tokens=(1024, 4096), report=lambda *row: rows.append(row[:2]))
    assert rows == [(1024, 0.0), (4096, found[4096])]
    assert found[4096] == pytest.approx(1.5 - 1 / 0.97)
    shape = limits.Shape(512, 2048, True)
    assert limits.training_limit("Some GPU", shape, 10**6) == pytest.approx(found[4096])
    assert limits.training_limit("Some GPU", shape, 64) == 0.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tuning_writes_what_plans_read():
    seen = []
    found = tune_gpu(512, 2048, tokens=(1, 8192), repetitions=3, report=lambda *row: seen.append(row[0]))
    assert seen == [1, 8192]
    name = torch.cuda.get_device_properties(0).name
    assert limits.share_limit(name, True, limits.Shape(512, 2048, True), 1) == found[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("gated", [True, False])
def test_tuning_of_training_writes_what_plans_read(gated):
    seen = []
    report = lambda count, limit, gains: seen.append((count, limit, len(gains)))  # noqa: E731
    found = tune_training(512, 2048, gated=gated, tokens=(1024, 8192), repetitions=3, report=report)
    assert [row[0] for row in seen] == [1024, 8192]
    assert all(0 <= limit <= 1 for limit in found.values())
    name = torch.cuda.get_device_properties(0).name
    shape = limits.Shape(512, 2048, gated)
    assert limits.training_limit(name, shape, 8192) == found[8192]
    assert limits.training_limit(name, shape, 512) == 0.0
