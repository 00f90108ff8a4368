"""What automatic plans do with a call, for a Hopper GPU that is not there."""

from __future__ import annotations

import pytest
import torch

from twell.activations import Activation
from twell.kernels.args import FfnArgs
from twell.kernels.gpu import choice, limits, monitor
from twell.kernels.gpu.target import Target

HOPPER = Target(name="a Hopper", capability=(9, 0), processors=132, shared_memory=1 << 17)
AMPERE = Target(name="an Ampere", capability=(8, 0), processors=108, shared_memory=1 << 17)


@pytest.fixture(autouse=True)
def device(monkeypatch, tmp_path):
    """A device whose properties a test may set: target, capturing."""

    class Device:
        target, capturing = HOPPER, False

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Device.capturing)
    monkeypatch.setattr(choice, "target_of", lambda _: Device.target)
    monkeypatch.setenv(limits.CACHE_VARIABLE, str(tmp_path))
    limits._tuned.cache_clear()
    monitor.forget()
    yield Device
    limits._tuned.cache_clear()
    monitor.forget()


UP, GATE, DOWN = torch.empty(16, 8), torch.empty(16, 8), torch.empty(16, 8).mT


def call(tokens, down=DOWN):
    return FfnArgs(torch.empty(tokens, 8), UP, down, GATE, None, None, None, Activation())


def know(args, share):
    monitor._layer(choice.layer_key(args)).share = share


def test_many_tokens_run_sparse_whatever_the_layer(device):
    for device.capturing in (False, True):
        assert not choice.skips_eager_call(call(16384))
        assert choice.choose(call(16384)) == (True, None)


@pytest.mark.parametrize("tokens", [65, 1000, 4096, 16383])
def test_eager_calls_in_between_skip_the_op(tokens):
    assert choice.skips_eager_call(call(tokens))


def test_in_between_graphs_run_sparse_where_it_never_loses(device):
    device.capturing = True
    assert [choice.choose(call(tokens))[0] for tokens in (65, 1000, 4096)] == [False, False, True]


def test_few_tokens_eager_take_readings_and_else_run_dense():
    args = call(1)
    key = choice.layer_key(args)
    seen = []
    for _ in range(4):
        skipped = choice.skips_eager_call(args)
        seen.append("dense" if skipped else choice.choose(args))
    assert seen == [(True, key), (True, key), "dense", (True, key)]


def test_a_compiled_call_that_never_asked_takes_readings_too():
    args = call(1)
    key = choice.layer_key(args)
    assert [choice.choose(args) for _ in range(3)] == [(True, key), (True, key), (False, None)]


@pytest.mark.parametrize(("share", "sparse"), [(None, True), (0.01, True), (0.9, False)])
def test_a_capture_goes_by_what_is_known(device, share, sparse):
    args = call(1)
    know(args, share)
    device.capturing = True
    assert not choice.skips_eager_call(args)
    assert choice.choose(args) == (sparse, None)


def test_token_counts_of_one_power_of_two_share_a_layer(device):
    know(call(8), 0.9)
    device.capturing = True
    assert choice.choose(call(5)) == (False, None)
    assert choice.choose(call(4)) == (True, None)  # nothing known


def test_stock_down_runs_dense_for_few_tokens_and_says_so(caplog, monkeypatch):
    monkeypatch.setattr("twell._log._logged", set())
    stock = torch.empty(8, 16)
    assert choice.skips_eager_call(call(1, stock))
    assert choice.choose(call(1, stock)) == (False, None)
    assert "not neuron-major" in caplog.text
    assert choice.choose(call(16384, stock)) == (True, None)


def test_a_gpu_that_nobody_measured_runs_dense_until_tuned(device):
    device.target = AMPERE
    for device.capturing in (False, True):
        for tokens in (1, 100, 10**5):
            assert choice.choose(call(tokens)) == (False, None)
    limits.store(AMPERE.name, {1: 0.5})
    assert choice.choose(call(1))[0]
