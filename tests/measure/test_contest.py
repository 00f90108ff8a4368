"""A comparison of contenders that fail, read their layers or use power as they like."""

from __future__ import annotations

import subprocess

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import InvalidCxxCompiler

from twell._errors import OtherProcessError, in_one_line
from twell._log import note_path
from twell.measure import contest
from twell.measure.contest import Contender, Setting, Workload, largest_that_fits, ready, run_contest
from twell.measure.energy import COUNTER, SAMPLES, Energy, Power, Reading
from twell.measure.results import Measured


class Heard:
    """A setting, and what it was told."""

    def __init__(self, **options) -> None:
        self.said: list[str] = []
        self.setting = Setting(
            device=torch.device("cpu"), rounds=1, memory=False, say=self.said.append, **options
        )


def contender(call, **options) -> Contender:
    return Contender(name="ours-compiled", meaning="in words", call=call, **options)


def raising(error: BaseException):
    def call() -> None:
        raise error

    return call


def backend(compiled, inputs) -> None:
    """Fails, as `BackendCompilerFailed` names it."""


FAILED_TO_COMPILE = {
    "no C++ compiler": InvalidCxxCompiler(),
    "no C compiler": RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
    "a compiler that fails": subprocess.CalledProcessError(1, ["gcc", "main.c"]),
    "a backend": BackendCompilerFailed(backend, RuntimeError("no such [tile]"), None),
}


@pytest.mark.parametrize("error", FAILED_TO_COMPILE.values(), ids=FAILED_TO_COMPILE)
def test_a_contender_that_does_not_compile_has_a_failure_of_one_line(error):
    heard, one = Heard(), contender(raising(error))
    assert not ready(one, heard.setting, lambda: "3 x 8 tokens would fit", place="2 of 3")
    assert one.failure.startswith("does not compile: ")
    assert "would fit" not in one.failure
    assert len(one.failure.splitlines()) == 1
    assert f"note: ours-compiled (2 of 3): {one.failure}" in heard.said


def test_errors_of_triton_are_of_compiling():
    errors = pytest.importorskip("triton.runtime.errors")
    one = contender(raising(errors.OutOfResources(300_000, 232_448, "shared memory")))
    assert not ready(one, Heard().setting)
    assert one.failure.startswith("does not compile: OutOfResources: out of resource: shared memory")


@pytest.mark.parametrize("error", [ValueError("x: got 1"), AssertionError("rows"), RuntimeError("shape")])
def test_other_errors_of_a_contender_are_mistakes(error):
    with pytest.raises(type(error), match=str(error)):
        ready(contender(raising(error)), Heard().setting)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (IndexError("index 64 is out of range"), "IndexError: index 64 is out of range"),
        (AssertionError(), "AssertionError"),
        (RuntimeError(), "RuntimeError"),
        (ValueError("batch: got 9\n\nSet A=1 for more"), "batch: got 9"),
        (OtherProcessError("it failed:\nTraceback\n  line 1\nKeyError: 'a'"), "it failed: KeyError: 'a'"),
        (RuntimeError("x" * 1000), "x" * 300 + "..."),
    ],
)
def test_an_error_in_one_line(error, said):
    assert in_one_line(error) == said


def test_searches_say_what_they_try_and_know():
    said: list[str] = []
    assert largest_that_fits(lambda count: count <= 11, 4, 64, say=said.append) == 11
    assert said == [
        "trying 4",
        "trying 8, since 4 fits",
        "trying 16, since 8 fits",
        "trying 12, since 8 fits and 16 does not",
        "trying 10, since 8 fits and 12 does not",
        "trying 11, since 10 fits and 12 does not",
    ]


def run(setting: Setting, *contenders: Contender) -> None:
    run_contest(list(contenders), Workload(name="forward", title="forward", shape={}, tokens=8), setting)


class Layers:
    """Calls of a model with five layers, of which some read how active they are now and then."""

    def __init__(self, planned: str, reading: dict[int, list[int]]) -> None:
        self.calls, self._planned, self._reading = 0, planned, reading

    def __call__(self) -> None:
        self.calls += 1
        for layer in range(5):
            read = layer in self._reading.get(self.calls, [])
            note_path("block" if read else self._planned, torch.empty(8, 4), 16)


# The first call is timed.
@pytest.mark.parametrize("reading", [{}, {2: [0, 1, 2, 3, 4]}, {2: [0, 4], 3: [1], 4: [2, 3]}])
@pytest.mark.parametrize(("planned", "share"), [("dense", 0), ("block", 1)])
def test_calls_that_read_their_layers_do_not_count_as_sparse(planned, share, reading):
    found: list[Measured] = []
    calls = Layers(planned, reading)
    run(Heard(emit=found.append).setting, contender(calls, sparse=True))
    assert found[-1].details["sparse_share"] == share
    assert calls.calls == 4


def test_calls_that_are_never_the_same_have_the_share_of_the_middle_one():
    found: list[Measured] = []
    counts = iter([0, 1, 4, 3])  # pieces, of which the first is sparse

    def call() -> None:
        for piece in range(next(counts)):
            note_path("dense" if piece else "row", torch.empty(8, 4), 16)

    run(Heard(emit=found.append).setting, contender(call, sparse=True))
    assert found[-1].details["sparse_share"] == pytest.approx(1 / 3)


def test_the_most_frequent_reason_of_dense_calls_is_kept():
    found: list[Measured] = []

    def call() -> None:
        for path, reason in [("dense", "small"), ("row", "sparse"), ("dense", "active"), ("dense", "active")]:
            note_path(path, torch.empty(8, 4), 16, reason=reason)
        for _ in range(9):
            note_path("dense", torch.empty(8, 4), 16, "backward", "another")

    run(Heard(emit=found.append).setting, contender(call, sparse=True))
    assert found[-1].dense_reason == "active"
    assert found[-1].details["sparse_share"] == 0.25


class Source:
    counter = COUNTER

    def read(self) -> Reading:
        return Reading(seconds=0.0)


def power(watts: float, clock: int, warm: int, method: str = COUNTER) -> Power:
    return Power(watts=watts, method=method, sm_clock_mhz=clock, temperature_c=warm)


def test_clocks_of_the_rounds_and_of_the_energy_windows_are_kept_apart(monkeypatch):
    windows = [power(600.0, 1500, 66), power(610.0, 1503, 64, SAMPLES)]
    monkeypatch.setattr(contest, "mean_power", lambda readings, counter: power(300.0, 1980, 50))
    monkeypatch.setattr(
        contest,
        "energy_of",
        lambda *given, **options: Energy(joules=2.0, seconds=1.0, calls=1, power=windows.pop(0)),
    )
    found: list[Measured] = []
    run(Heard(emit=found.append, source=Source(), energy_seconds=1.0).setting, contender(lambda: None))
    assert windows == []
    assert found[-1].joules == (2.0, 2.0)
    assert found[-1].power == {
        "power_w": 300.0,
        "sm_clock_mhz": 1980,
        "temperature_c": 50,
        "energy_from": f"{COUNTER} and {SAMPLES}",
        "energy_power_w": 605.0,
        "energy_sm_clock_mhz": 1502,
        "energy_temperature_c": 66,
    }
