"""A comparison of contenders that fail, read their layers or use power as they like."""

from __future__ import annotations

import subprocess

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import InvalidCxxCompiler

from twell._errors import OtherProcessError, in_one_line
from twell.measure.contest import Contender, Setting, largest_that_fits, ready


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
