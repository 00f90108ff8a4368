"""Launches without Triton's front door: what compiled kernels would be called with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from twell.kernels.gpu import launch
from twell.kernels.gpu.launch import Known, Tiled, Tokens
from twell.kernels.gpu.tape import Tape

FUNCTION, PACKED, STREAM = 77, (4, 1, 0), 5


class Run:
    """What a compiled kernel is called through, in all versions."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True
    launch = None

    def __init__(self):
        self.calls = []

    def __call__(self, *values):
        self.calls.append(values)


@pytest.fixture(params=["raw", "run"])
def known(request, monkeypatch):
    """A compiled kernel, its calls, and whether tensor maps are made here."""
    run = Run()
    monkeypatch.setattr(launch, "_raw_launcher", lambda _: run if request.param == "raw" else None)
    monkeypatch.setattr(
        launch,
        "_map_maker",
        lambda meta: lambda shape, strides: lambda address, rows: (meta, address, rows, shape, strides),
    )
    metadata = SimpleNamespace(tensordesc_meta=["meta"])
    compiled = SimpleNamespace(run=run, function=FUNCTION, packed_metadata=PACKED, metadata=metadata)
    return Known(compiled, {"WIDTH": 64}), run.calls, request.param == "raw"


def arguments_of(x, out, tokens):
    return Tiled(x, [8, 16], by_tokens=True), out, Tokens(tokens), 16, 0.5


def head(raw):
    hooks = (None, None, None)
    return (FUNCTION, False, True, None, None, PACKED, *hooks) if raw else (FUNCTION, PACKED, *hooks)


def check(values, raw, x, out, tokens):
    assert values[:4] == (3, 2, 1, STREAM)
    assert values[4 : 4 + len(head(raw))] == head(raw)
    described, *rest = values[4 + len(head(raw)) :]
    if raw:
        meta, address, rows, shape, strides = described
        assert (meta, address, [rows or shape[0], *shape[1:]], strides) == (
            "meta",
            x.data_ptr(),
            [tokens, 16],
            [16, 1],
        )
        assert rest[:4] == [tokens, 16, 16, 1]
        rest = rest[4:]
    else:
        assert not isinstance(described, tuple)
        assert (described.base.data_ptr(), described.base.dtype) == (x.data_ptr(), x.dtype)
        assert (described.shape, described.strides, described.block_shape) == ([tokens, 16], [16, 1], [8, 16])
        assert described.padding == "zero"
    assert rest == [out.data_ptr(), tokens, 16, 0.5, 64]
    assert not any(type(value) is Tokens for value in values)


def test_a_launch(known):
    known, calls, raw = known
    x, out = torch.zeros(24, 16), torch.zeros(24)
    known.prepare((3, 2), arguments_of(x, out, 24)).launch(STREAM)
    (values,) = calls
    check(values, raw, x, out, 24)


@pytest.mark.parametrize("steady", [0, 1, 2])
def test_a_tape_of_it_for_other_tensors_and_tokens(known, steady):
    """Whichever tensors are expected to stay, those of the call are taken."""
    known, calls, raw = known
    x, out = torch.zeros(24, 16), torch.zeros(24)
    tape = Tape((out, x), steady)
    tape.add(known, None, (3, 2), arguments_of(x, out, 24), {})
    assert tape.finish()
    if steady == 2:  # tokens that change come with an x that moves
        assert tape.play((out, x), STREAM)
        check(calls[-1], raw, x, out, 24)
        return
    for tokens in (24, 17, 24):
        x, out = torch.zeros(tokens, 16), torch.zeros(24)
        assert tape.play((out, x), STREAM, tokens)
        check(calls[-1], raw, x, out, tokens)
    assert not tape.play((out, torch.zeros(385)[1:].view(24, 16)), STREAM, 24)  # not aligned
    assert len(calls) == 3


def test_only_what_is_known_is_called_past_triton(monkeypatch):
    """Another version, or a kernel that wants scratch memory, goes through what Triton calls itself."""
    run = Run()
    run.launch = len  # a function in C
    monkeypatch.setattr(launch.triton, "__version__", "3.6.0")
    assert launch._raw_launcher(run) is len

    def wrapped(launcher):
        return lambda: launcher

    run.launch = wrapped(len)
    assert launch._raw_launcher(run) is len
    run.launch = wrapped(print.__name__)
    assert launch._raw_launcher(run) is None
    run.launch, run.global_scratch_size = len, 128
    assert launch._raw_launcher(run) is None
    run.global_scratch_size = 0
    monkeypatch.setattr(launch.triton, "__version__", "3.9.0")
    assert launch._raw_launcher(run) is None
