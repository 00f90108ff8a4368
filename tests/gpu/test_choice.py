"""What automatic plans do with a call, for a Hopper GPU that is not there."""

from __future__ import annotations

import pytest
import torch

from twell._files import CACHE_VARIABLE
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
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    limits._tuned.cache_clear()
    monitor.forget()
    yield Device
    limits._tuned.cache_clear()
    monitor.forget()


D, H = 2048, 5632
PREFILL, BETWEEN = 8192, 4096


class Weight:
    """What the choice looks at in a weight: its shape, its address and its identity."""

    shape = torch.Size((H, D))

    def numel(self):
        return H * D

    def data_ptr(self):
        return 1


GATE = Weight()


def call(tokens, neuron_major=True, gate=GATE, hidden=D, dtype=torch.bfloat16):
    x = torch.empty(tokens, hidden, device="meta", dtype=dtype)
    down = torch.empty(H, D, device="meta").mT if neuron_major else torch.empty(D, H, device="meta")
    up = GATE if gate is None else None
    return FfnArgs(x, up, down, gate, None, None, None, Activation())


def know(args, share):
    layer = monitor._layer(choice.layer_key(args))
    layer.share, layer.ran = share, True


def test_much_work_runs_sparse_whatever_the_layer():
    assert not choice.skips_eager_calls(call(PREFILL)).dense
    assert choice.choose(call(PREFILL)) == (True, None)


@pytest.mark.parametrize("tokens", [65, 1000])
def test_less_work_is_left_to_dense_without_the_op(tokens):
    assert choice.skips_eager_calls(call(tokens)).dense
    assert choice.choose(call(tokens)) == (False, None)


def test_as_many_calls_are_left_to_dense_as_come_before_the_next_reading():
    args = call(1)
    for number in range(1, 5):
        skip = choice.skips_eager_calls(args)
        assert skip.dense == (number == 3)
        if not skip.dense:
            choice.choose(args)
    skip = choice.skips_eager_calls(args)  # the fifth; the eighth is a reading
    assert skip[:2] == (True, 2)
    skip.settle(2)
    assert not choice.skips_eager_calls(args).dense
    unknown = choice.skips_eager_calls(call(256))
    assert unknown.dense
    assert unknown.ahead > 1
    unknown.settle(unknown.ahead)


def test_few_tokens_eager_take_readings_and_else_run_dense():
    args = call(1)
    key = choice.layer_key(args)
    seen = []
    for _ in range(4):
        skipped = choice.skips_eager_calls(args).dense
        seen.append("dense" if skipped else choice.choose(args))
    assert seen == [(True, key), (True, key), "dense", (True, key)]


@pytest.mark.parametrize(("share", "sparse"), [(0.1, True), (0.9, False)])
def test_in_between_a_graph_may_be_sparse_and_an_eager_call_reads_for_it(device, share, sparse):
    args = call(BETWEEN)
    assert not choice.skips_eager_calls(args).dense
    assert choice.choose(args) == (True, choice.layer_key(args))
    know(args, share)
    assert not choice.skips_eager_calls(args).dense  # the second reading
    assert choice.choose(args) == (True, choice.layer_key(args))
    assert choice.skips_eager_calls(args).dense
    device.capturing = True
    assert choice.choose(args) == (sparse, None)


def test_a_compiled_call_that_never_asked_takes_readings_too():
    args = call(1)
    key = choice.layer_key(args)
    assert [choice.choose(args) for _ in range(3)] == [(True, key), (True, key), (False, None)]


@pytest.mark.parametrize(("share", "sparse"), [(None, False), (0.01, True), (0.9, False)])
def test_a_capture_goes_by_what_is_known(device, share, sparse):
    """Nothing known is dense: a kernel that was never loaded must not be met inside a capture."""
    args = call(1)
    if share is not None:
        know(args, share)
    device.capturing = True
    assert not choice.skips_eager_calls(args).dense
    assert choice.choose(args) == (sparse, None)


def test_a_capture_of_much_work_wants_a_warm_up(device):
    device.capturing = True
    assert choice.choose(call(PREFILL)) == (False, None)
    monitor.note_run(choice.layer_key(call(PREFILL)))
    assert choice.choose(call(PREFILL)) == (True, None)


def test_token_counts_of_one_power_of_two_share_a_layer(device):
    know(call(8), 0.01)
    device.capturing = True
    assert choice.choose(call(5)) == (True, None)
    assert choice.choose(call(4)) == (False, None)  # nothing known


def test_stock_down_runs_dense_for_few_tokens_and_says_so(caplog, monkeypatch):
    monkeypatch.setattr("twell._log._logged", set())
    assert choice.skips_eager_calls(call(1, neuron_major=False)).dense
    assert "not neuron-major" in caplog.text
    assert choice.choose(call(1, neuron_major=False)) == (False, None)
    assert choice.choose(call(PREFILL, neuron_major=False)) == (True, None)


def test_what_was_not_measured_runs_dense(device):
    assert choice.choose(call(10**5, dtype=torch.float32)) == (False, None)
    device.target = AMPERE
    for device.capturing in (False, True):
        for tokens in (1, 100, 10**5):
            assert choice.choose(call(tokens)) == (False, None)
    device.capturing = False
    assert choice.skips_eager_calls(call(1)).dense


def test_a_small_block_of_many_tokens_was_not_measured(device):
    """16,384 tokens of a block with a hundredth of the work: dense, inside a graph as well."""

    class Small(Weight):
        shape = torch.Size((512, 256))

        def numel(self):
            return 512 * 256

    args = call(PREFILL, gate=Small())
    know(args, 0.01)
    assert choice.skips_eager_calls(args).dense
    device.capturing = True
    assert choice.choose(args) == (False, None)


def test_tuned_limits_of_few_tokens_hold_inside_graphs(device):
    device.target = AMPERE
    limits.store(AMPERE.name, limits.Shape(D, H, True), {1: 0.5})
    args = call(1)
    assert choice.choose(args) == (True, choice.layer_key(args))  # a reading
    know(args, 0.4)
    device.capturing = True
    assert choice.choose(args) == (True, None)
    know(args, 0.6)
    assert choice.choose(args) == (False, None)


def test_a_block_without_a_gate_needs_to_be_sparse():
    args = call(2 * PREFILL, gate=None)
    key = choice.layer_key(args)
    assert choice.choose(args) == (True, key)
    know(args, 0.9)
    monitor._layer(key).next = 100
    assert choice.choose(args) == (False, None)
