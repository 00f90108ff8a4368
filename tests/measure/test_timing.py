"""Timing: statistics, the order of interleaved calls, calls per sample, and real clocks."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import time

import pytest

from twell.measure import Timing, compare, speedup
from twell.measure import timing as timing_module


class FakeClock:
    """A clock that only the timed functions advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 0
        self.calls = 0
        monkeypatch.setattr(timing_module, "perf_counter_ns", lambda: self.now_ns)

    def function(self, nanoseconds: int):
        def fn() -> None:
            self.now_ns += nanoseconds
            self.calls += 1

        return fn


def time_calls(fn, **options) -> Timing:
    return compare({"fn": fn}, **options)["fn"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return FakeClock(monkeypatch)


def test_statistics_of_known_samples():
    timing = Timing((5.0, 1.0, 4.0, 2.0, 3.0))
    assert (timing.n, timing.median) == (5, 3.0)
    assert (timing.quantile(0), timing.quantile(0.25), timing.quantile(1)) == (1.0, 2.0, 5.0)
    assert timing.quantiles() == pytest.approx({"p10": 1.4, "p50": 3.0, "p90": 4.6})
    assert Timing((1.0, 2.0)).median == 1.5
    assert str(Timing((0.002,))) == "2 ms (p10 2, p90 2, n 1)"


def test_timing_is_frozen_and_takes_any_sequence():
    timing = Timing([1, 2])
    assert timing.samples == (1.0, 2.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        timing.samples = (3.0,)


@pytest.mark.parametrize("samples", [(), (1.0, math.nan), (math.inf,), (-1.0,)])
def test_bad_samples_are_refused(samples):
    with pytest.raises(ValueError, match="samples: got"):
        Timing(samples)


@pytest.mark.parametrize("q", [-0.1, 1.1, math.nan])
def test_bad_quantile_is_refused(q):
    with pytest.raises(ValueError, match=r"q: got .* accepted: a number from 0 to 1"):
        Timing((1.0,)).quantile(q)


def test_speedup_is_the_ratio_of_medians():
    assert speedup(Timing((2.0, 4.0, 90.0)), Timing((1.0, 2.0, 3.0))) == 2.0
    with pytest.raises(ValueError, match="candidate: got a median of 0 s"):
        speedup(Timing((1.0,)), Timing((0.0,)))


@pytest.mark.parametrize(
    ("nanoseconds", "sample_calls"),
    [(5_000_000, 1), (1_000_000, 1), (100_000, 11), (1_000, 1100)],
)
def test_calls_per_sample_fill_a_millisecond(clock, nanoseconds, sample_calls):
    fn = clock.function(nanoseconds)
    assert timing_module._calls_filling_a_sample(fn, cuda=False) == sample_calls
    timing = time_calls(fn, warmup=0, repetitions=4)
    assert timing.samples == pytest.approx([nanoseconds * 1e-9] * 4)


def test_calls_per_sample_end_even_if_the_clock_stands_still(clock, monkeypatch):
    monkeypatch.setattr(timing_module, "_MAX_CALLS", 1000)
    assert timing_module._calls_filling_a_sample(clock.function(0), cuda=False) == 1000


def test_every_call_is_accounted_for(clock):
    timing = time_calls(clock.function(10), warmup=2, repetitions=3, calls_per_sample=7)
    assert clock.calls == 2 + 3 * 7
    assert timing.samples == pytest.approx([1e-8] * 3)


def test_drift_hits_two_candidates_alike(clock):
    """The machine slows down steadily; equal candidates still come out equal."""

    def drifting() -> None:
        clock.calls += 1
        clock.now_ns += 1_000_000 + 10_000 * clock.calls

    timings = compare({"a": drifting, "b": drifting}, warmup=0, repetitions=20, calls_per_sample=1)
    sums = {name: sum(timing.samples) for name, timing in timings.items()}
    assert sums["a"] == pytest.approx(sums["b"], rel=1e-12)


def recorded(names: str, repetitions: int) -> tuple[str, dict[str, Timing]]:
    calls: list[str] = []
    candidates = {name: (lambda name=name: calls.append(name)) for name in names}
    timings = compare(candidates, warmup=0, repetitions=repetitions, calls_per_sample=1)
    return "".join(calls), timings


def test_two_candidates_alternate():
    calls, timings = recorded("ab", 4)
    assert calls == "abbabaab"
    assert list(timings) == ["a", "b"]
    assert all(timing.n == 4 for timing in timings.values())


def test_three_candidates_take_every_order():
    calls, _ = recorded("abc", 6)
    rounds = [calls[start : start + 3] for start in range(0, 18, 3)]
    assert sorted(rounds) == sorted("".join(order) for order in itertools.permutations("abc"))


def test_warm_up_comes_before_any_sample():
    calls: list[str] = []
    candidates = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    compare(candidates, warmup=2, repetitions=1, calls_per_sample=3)
    assert "".join(calls) == "aabb" + "aaabbb"


def test_progress_is_called_after_every_round():
    log: list[str] = []
    candidates = {name: (lambda name=name: log.append(name)) for name in "ab"}
    compare(candidates, warmup=0, repetitions=2, calls_per_sample=1, progress=lambda: log.append("|"))
    assert "".join(log) == "ab|ba|"


def test_garbage_collection_is_paused_and_restored():
    seen: list[bool] = []
    time_calls(lambda: seen.append(gc.isenabled()), warmup=0, repetitions=2, calls_per_sample=1)
    assert seen == [False, False]
    assert gc.isenabled()

    def fail() -> None:
        raise RuntimeError("from the candidate")

    with pytest.raises(RuntimeError, match="from the candidate"):
        time_calls(fail, warmup=0, calls_per_sample=1)
    assert gc.isenabled()


def test_real_time_is_taken():
    start = time.perf_counter()
    timing = time_calls(lambda: time.sleep(0.003), warmup=1, repetitions=7)
    elapsed = time.perf_counter() - start
    assert timing.n == 7
    assert min(timing.samples) >= 0.003
    assert sum(timing.samples) < elapsed


def test_a_slower_function_is_slower(clock):
    candidates = {"slow": clock.function(8_000_000), "fast": clock.function(2_000_000)}
    timings = compare(candidates, warmup=0, repetitions=7, calls_per_sample=1)
    assert speedup(timings["slow"], timings["fast"]) == pytest.approx(4)


def test_a_fast_function_is_timed_per_call(clock):
    timing = time_calls(clock.function(2_000), warmup=0, repetitions=5)
    assert clock.calls > 5 * 100  # many calls a sample
    assert timing.median == pytest.approx(2e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"warmup": -1}, "warmup: got -1"),
        ({"warmup": True}, "warmup: got True"),
        ({"repetitions": 0}, "repetitions: got 0"),
        ({"calls_per_sample": 0}, "calls_per_sample: got 0"),
        ({"queued": True}, "queued: got True; accepted: False on the CPU"),
        ({"device": "meta"}, "device: got 'meta'"),
        ({"device": "no such device"}, "device: got 'no such device'"),
        ({"device": "cuda:99"}, "device: got 'cuda:99'"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        compare({"fn": lambda: None}, **arguments)


def test_nothing_to_compare_is_refused():
    with pytest.raises(ValueError, match=r"candidates: got \{\}"):
        compare({})
