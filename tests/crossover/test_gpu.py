"""Where automatic plans switch: built-in tables, tuned ones, and the crossing that tuning looks for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from twell import crossover as limits
from twell._files import CACHE_VARIABLE
from twell.measure.tune import crossing, tune_gpu

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
def test_tuning_needs_a_gpu():
    with pytest.raises(ValueError, match="device: got no CUDA device"):
        tune_gpu()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tuning_writes_what_plans_read():
    seen = []
    found = tune_gpu(512, 2048, tokens=(1, 8192), repetitions=3, report=lambda *row: seen.append(row[0]))
    assert seen == [1, 8192]
    name = torch.cuda.get_device_properties(0).name
    assert limits.share_limit(name, True, limits.Shape(512, 2048, True), 1) == found[1]
