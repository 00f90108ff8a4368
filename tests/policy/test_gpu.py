"""What automatic plans do with a call, for a Hopper GPU that is not there."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from twell import crossover
from twell._files import CACHE_VARIABLE
from twell.activations import Activation
from twell.backends import BACKENDS
from twell.kernels.gpu.device import Gpu
from twell.layer_state import LayerState
from twell.policy import Resolution, decide, decide_backward, decide_inside, gpu
from twell.problem import FfnArgs

from ..backends import added

HOPPER = Gpu(name="a Hopper", capability=(9, 0), processors=132, shared_memory=1 << 17)
AMPERE = Gpu(name="an Ampere", capability=(8, 0), processors=108, shared_memory=1 << 17)


@pytest.fixture(autouse=True)
def device(monkeypatch, tmp_path):
    """A device whose properties a test may set: target, capturing."""

    class Device:
        target, capturing = HOPPER, False

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Device.capturing)
    monkeypatch.setattr(gpu, "gpu_of", lambda _: Device.target)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    crossover._tuned.cache_clear()
    yield Device
    crossover._tuned.cache_clear()


@pytest.fixture
def layer():
    return LayerState()


D, H = 2048, 5632
PREFILL, BETWEEN = 8192, 4096
DENSE, READ, SPARSE, COUNTED = "dense", "read", "sparse", "counted"


def call(tokens, neuron_major=True, gated=True, hidden=D, neurons=H, dtype=torch.bfloat16):
    def empty(*shape):
        return torch.empty(*shape, device="meta", dtype=dtype)

    down = empty(neurons, hidden).mT if neuron_major else empty(hidden, neurons)
    gate = empty(neurons, hidden) if gated else None
    return FfnArgs(empty(tokens, hidden), empty(neurons, hidden), down, gate, None, None, None, Activation())


def decision_of(args, layer, training=False, hooked=False):
    resolution = Resolution("auto", 0, "gpu", "automatic")
    return decide(args, resolution, layer, training=training, record=False, hooked=hooked)


def run(args, layer, training=False):
    """ "dense", "sparse", "read": sparse, to be read, or "counted": dense, to be read."""
    decision = decision_of(args, layer, training)
    assert decision.reason
    assert layer.ran["forward"][:3] == (decision.path, decision.reason, decision.reading)
    if decision.backend == "dense":
        assert (decision.path, decision.read) == ("dense", False)
        return DENSE
    assert decision.backend == "gpu"
    if decision.path == "dense":
        assert decision.read
        return COUNTED
    assert decision.path == "block"
    return READ if decision.read else SPARSE


def reading_of(args, layer, training=False):
    return layer.reading(args.selector, args.x.shape[0], training)


def know(args, layer, share, training=False):
    reading = reading_of(args, layer, training)
    reading._share, reading.ran = share, True
    return reading


def test_much_work_runs_sparse_whatever_the_layer(layer):
    assert [run(call(PREFILL), layer) for _ in range(3)] == [SPARSE] * 3


@pytest.mark.parametrize("tokens", [65, 640])
def test_less_work_runs_dense_for_a_while(tokens, layer):
    decision = decision_of(call(tokens), layer)
    assert (decision.backend, decision.ahead, decision.reading) == ("dense", gpu.AHEAD, None)
    assert "too little work" in decision.reason


@pytest.mark.parametrize(("tokens", "hidden"), [(16, 2056), (32, 8192)])
def test_few_tokens_of_sizes_that_were_not_measured(tokens, hidden, layer):
    assert run(call(tokens, hidden=hidden), layer) == DENSE
    assert f"not measured for {tokens} tokens at D {hidden}" in layer.ran["forward"].reason


def test_a_compiled_call_is_read_too(layer):
    """The op decides when it runs, and falls back to its own backend."""
    args = call(1)
    found = [
        decide_inside(args, "auto", 0, "gpu", training=False, record=False, layer=layer) for _ in range(3)
    ]
    assert [(decision.path, decision.read) for decision in found] == [
        ("block", True),
        ("dense", True),
        ("dense", False),
    ]
    assert all(decision.backend == "gpu" for decision in found)
    step = decide_inside(call(64), "auto", 64, "gpu", training=True, record=False, layer=layer)
    assert step[:3] == ("dense", 64, "gpu")


def test_as_many_calls_run_dense_ahead_as_come_before_the_next_reading(layer):
    args = call(1)
    assert [run(args, layer) for _ in range(4)] == [READ, COUNTED, DENSE, COUNTED]
    decision = decision_of(args, layer)  # the fifth; the eighth is a reading
    assert (decision.backend, decision.ahead) == ("dense", 2)
    decision.reading.count(2)
    assert run(args, layer) == COUNTED


@pytest.mark.parametrize("tokens", [1, 64, 1024, BETWEEN])
def test_a_layer_that_is_sparse_enough_runs_sparse_and_is_read_on_the_way(layer, tokens):
    args = call(tokens)
    assert run(args, layer) == READ
    know(args, layer, 0.1)
    assert [run(args, layer) for _ in range(3)] == [READ, SPARSE, READ]
    decision = decision_of(args, layer)  # the fifth; the eighth is a reading
    assert (decision.path, decision.ahead, decision.read) == ("block", 2, False)
    decision.reading.count(2)
    decision = decision_of(args, layer)
    assert (decision.read, decision.ahead) == (True, 7)  # the sixteenth is the next


@pytest.mark.parametrize("tokens", [1, 64, 1024, BETWEEN])
def test_a_layer_that_is_too_active_runs_dense_and_counts_by_itself(layer, tokens):
    args = call(tokens)
    assert run(args, layer) == READ
    know(args, layer, 0.9)
    assert [run(args, layer) for _ in range(3)] == [COUNTED, DENSE, COUNTED]


def test_in_the_long_run_readings_are_rare(layer):
    args = call(1)
    found = [run(args, layer) for _ in range(1024)]
    assert [number for number, what in enumerate(found, 1) if what != DENSE] == [
        *(1 << power for power in range(9)),
        512,
        768,
        1024,
    ]


def test_tokens_that_fill_blocks_of_the_same_number_are_treated_alike(layer):
    """A block is computed whole, so it does not matter how many of its tokens are there."""
    for tokens in (641, 700, 768):
        know(call(tokens), layer, 0.1)
        assert decision_of(call(tokens), layer).backend == "gpu"
    know(call(1025), layer, 0.5)
    assert decision_of(call(1025), layer).path == "dense"
    know(call(1409), layer, 0.5)
    assert decision_of(call(1409), layer).path == "block"


@pytest.mark.parametrize(("share", "sparse"), [(0.1, SPARSE), (0.9, DENSE)])
def test_a_capture_in_between(device, layer, share, sparse):
    args = call(BETWEEN)
    assert run(args, layer) == READ
    know(args, layer, share)
    device.capturing = True
    assert run(args, layer) == sparse


@pytest.mark.parametrize(("share", "sparse"), [(None, DENSE), (0.01, SPARSE), (0.9, DENSE)])
def test_a_capture_goes_by_what_is_known(device, layer, share, sparse):
    """Nothing known is dense: a kernel that was never loaded must not be met inside a capture."""
    args = call(1)
    if share is not None:
        know(args, layer, share)
    device.capturing = True
    assert run(args, layer) == sparse
    assert decision_of(args, layer).ahead == 0


class TestExpectedShares:
    """An engine that warms up and captures on made-up input: layers go by what the checkpoint says."""

    SHARES: ClassVar = {1: 0.01, 32: 0.2, 64: 0.3, 128: 0.4}

    @pytest.mark.parametrize(
        ("tokens", "captured"),
        # Sparse pays up to 50% in decode, 25% from 33 tokens on, 35% from 768, 60% from 1,536.
        [
            (1, SPARSE),
            (24, SPARSE),
            (33, DENSE),
            (100, DENSE),
            (1024, DENSE),
            (1536, SPARSE),
            (PREFILL, SPARSE),
        ],
    )
    def test_they_decide_captures(self, device, layer, tokens, captured):
        layer.expect(self.SHARES)
        args = call(tokens)
        assert run(args, layer) == captured  # the warm-up, which loads the kernels
        device.capturing = True
        assert run(args, layer) == captured

    def test_a_capture_without_them_is_dense(self, device, layer):
        device.capturing = True
        assert run(call(1), layer) == DENSE

    def test_a_capture_still_wants_a_warm_up(self, device, layer):
        layer.expect(self.SHARES)
        device.capturing = True
        assert run(call(1), layer) == DENSE
        assert "warm it up" in layer.ran["forward"].reason

    def test_made_up_input_is_never_read(self, layer):
        layer.expect(self.SHARES)
        assert {run(call(1), layer) for _ in range(300)} == {SPARSE}
        assert reading_of(call(1), layer).share == 0.01

    def test_unknown_shares_are_not_read_either(self, layer):
        layer.expect({})
        assert {run(call(1), layer) for _ in range(300)} == {DENSE}
        assert "not known" in layer.ran["forward"].reason
        assert run(call(PREFILL), layer) == SPARSE  # however active

    def test_what_was_read_before_is_forgotten(self, layer):
        know(call(1), layer, 0.9)
        layer.expect(self.SHARES)
        assert run(call(1), layer) == SPARSE

    def test_training_reads_as_ever(self, layer):
        layer.expect(self.SHARES)
        assert run(call(2 * PREFILL), layer, training=True) == READ

    def test_a_compiled_call_goes_by_them(self, layer):
        layer.expect(self.SHARES)
        found = decide_inside(call(8), "auto", 0, "gpu", training=False, record=False, layer=layer)
        assert (found.path, found.read) == ("block", False)


def test_a_capture_of_much_work_wants_a_warm_up(device, layer):
    device.capturing = True
    assert run(call(PREFILL), layer) == DENSE
    assert "warm it up" in layer.ran["forward"].reason
    device.capturing = False
    assert run(call(PREFILL), layer) == SPARSE
    device.capturing = True
    assert run(call(PREFILL), layer) == SPARSE


def test_stock_down_runs_dense_for_few_tokens_and_says_so(caplog, monkeypatch, layer):
    monkeypatch.setattr("twell._log._logged", set())
    assert run(call(1, neuron_major=False), layer) == DENSE
    assert "not neuron-major" in caplog.text
    assert "not neuron-major" in layer.ran["forward"].reason
    assert run(call(PREFILL, neuron_major=False), layer) == SPARSE


def test_what_was_not_measured_runs_dense(device, layer):
    assert run(call(10**5, dtype=torch.float32), layer) == DENSE
    device.target = AMPERE
    for device.capturing in (False, True):
        for tokens in (1, 100, 10**5):
            assert run(call(tokens), layer) == DENSE
            assert "twell tune" in layer.ran["forward"].reason


def test_a_small_block_of_many_tokens_was_not_measured(device, layer):
    """8,192 tokens of a block with a hundredth of the work: dense, inside a graph as well."""
    args = call(PREFILL, hidden=256, neurons=512)
    know(args, layer, 0.01)
    assert run(args, layer) == DENSE
    device.capturing = True
    assert run(args, layer) == DENSE


def test_tuned_limits_of_few_tokens_hold_inside_graphs(device, layer):
    device.target = AMPERE
    crossover.store(AMPERE.name, crossover.Shape(D, H, True), {1: 0.5})
    args = call(1)
    assert run(args, layer) == READ
    know(args, layer, 0.4)
    device.capturing = True
    assert run(args, layer) == SPARSE
    know(args, layer, 0.6)
    assert run(args, layer) == DENSE
    assert (
        layer.ran["forward"].reason
        == "60.0% of the neurons active in a block of tokens, sparse pays up to 50%"
    )


def test_a_block_without_a_gate_needs_to_be_sparse(layer):
    args = call(2 * PREFILL, gated=False)
    assert run(args, layer) == READ
    know(args, layer, 0.9)._next = 100
    assert run(args, layer) == DENSE


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("path", ["auto", "row", "block"])
@pytest.mark.parametrize(
    ("args", "reason"),
    [(call(0), "nothing to compute"), (call(1, neurons=1 << 20, hidden=4096), "32-bit indices")],
    ids=["empty", "huge"],
)
def test_what_the_kernels_cannot_reach_runs_dense(layer, training, path, args, reason):
    resolution = Resolution(path, 0, "gpu", "named")
    decision = decide(args, resolution, layer, training=training, record=False)
    assert (decision.path, decision.backend) == ("dense", "dense")
    assert reason in decision.reason


@pytest.mark.parametrize(
    ("dtype", "training", "record", "path"),
    [
        (torch.bfloat16, False, False, "row"),
        (torch.float32, False, False, "block"),
        (torch.bfloat16, False, True, "block"),
        (torch.bfloat16, True, False, "block"),
    ],
    ids=str,
)
def test_the_row_path_where_it_can(layer, dtype, training, record, path):
    resolution = Resolution("row", 0, "gpu", "named")
    decision = decide(call(64, dtype=dtype), resolution, layer, training=training, record=record)
    assert (decision.path, decision.backend) == (path, "gpu")


def test_another_backend_may_follow_the_same_rules(layer):
    with added(replace(BACKENDS["gpu"], name="twin")):
        resolution = Resolution("auto", 0, "twin", "automatic")
        for tokens, training in ((PREFILL, False), (2 * PREFILL, True)):
            decision = decide(call(tokens), resolution, layer, training=training, record=False)
            assert (decision.path, decision.backend) == ("block", "twin")
        assert decide(call(100), resolution, layer, training=False, record=False).backend == "dense"


class TestTraining:
    def test_a_layer_is_read_then_trains_as_active_as_it_is(self, layer):
        args = call(2 * PREFILL)
        assert [run(args, layer, training=True) for _ in range(4)] == [READ, READ, DENSE, READ]
        know(args, layer, 0.1, training=True)
        assert run(args, layer, training=True) == SPARSE
        know(args, layer, 0.54, training=True)
        assert run(args, layer, training=True) == SPARSE
        know(args, layer, 0.56, training=True)
        decision = decision_of(args, layer, training=True)  # the seventh; the eighth is a reading
        assert (decision.backend, decision.ahead) == ("dense", 0)
        assert run(args, layer, training=True) == READ
        decision = decision_of(args, layer, training=True)
        assert (decision.backend, decision.ahead) == ("dense", 6)

    @pytest.mark.parametrize("tokens", [1024, 2 * PREFILL])
    def test_it_switches_at_limits_that_lie_apart(self, layer, tokens):
        args = call(tokens)
        assert run(args, layer, training=True) == READ
        for share, sparse in ((0.51, False), (0.5, True), (0.55, True), (0.56, False)):
            reading = know(args, layer, share, training=True)
            reading._calls, reading._next = 10, 20
            decision = decision_of(args, layer, training=True)
            assert (decision.path == "block") == sparse
            assert decision.ahead == 8

    def test_a_capture_counts_nothing(self, device, layer):
        args = call(2 * PREFILL)
        device.capturing = True
        assert [run(args, layer, training=True) for _ in range(2)] == [DENSE] * 2
        assert decision_of(args, layer, training=True).ahead == 0
        know(args, layer, 0.1, training=True)
        assert run(args, layer, training=True) == SPARSE

    def test_inside_a_checkpoint_it_is_decided_when_it_runs(self, layer):
        decision = decision_of(call(2 * PREFILL), layer, training=True, hooked=True)
        assert (decision.path, decision.backend) == ("auto", "gpu")
        small = decision_of(call(64), layer, training=True, hooked=True)
        assert (small.backend, small.ahead) == ("dense", gpu.AHEAD)

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"tokens": 512}, "so few tokens"),
            ({"tokens": 2 * PREFILL, "dtype": torch.float32}, "float32"),
            ({"tokens": 2 * PREFILL, "hidden": 2056}, "64 features"),
        ],
    )
    def test_what_was_not_measured(self, layer, options, reason):
        decision = decision_of(call(**options), layer, training=True)
        assert decision.backend == "dense"
        assert reason in decision.reason

    def test_other_gpus(self, device, layer):
        device.target = AMPERE
        assert run(call(2 * PREFILL), layer, training=True) == DENSE
        assert "twell tune --training --hidden 2048 --neurons 5632" in layer.ran["forward"].reason

    @pytest.mark.parametrize("gpu_at_hand", [AMPERE, HOPPER], ids=["ampere", "hopper"])
    def test_tuned_limits_decide(self, device, layer, gpu_at_hand):
        """On any GPU, for any number of tokens, and at shapes that nobody has measured."""
        device.target = gpu_at_hand
        shape = crossover.Shape(2056, H, True, training=True)
        crossover.store(gpu_at_hand.name, shape, {1: 0.0, 256: 0.2, 4096: 0.4})
        few, some, many = (call(tokens, hidden=2056) for tokens in (128, 512, 4096))
        assert run(few, layer, training=True) == DENSE
        assert "slower when tuned" in layer.ran["forward"].reason
        for args, enter in ((some, 0.2), (many, 0.4)):
            assert run(args, layer, training=True) == READ
            for share, sparse in ((enter + 0.01, False), (enter, True), (enter * 1.09, True), (0.5, False)):
                reading = know(args, layer, share, training=True)
                reading._calls, reading._next = 10, 20
                assert (decision_of(args, layer, training=True).path == "block") == sparse
        other = call(2 * PREFILL)  # another shape: as if nothing had been tuned
        expected = READ if gpu_at_hand is HOPPER else DENSE
        assert run(other, layer, training=True) == expected

    def test_the_backward_goes_by_the_forward(self, layer):
        args = call(2 * PREFILL)
        forward = decision_of(args, layer, training=True)
        backward = decide_backward(args, 0, "gpu", forward)
        assert (backward.path, backward.reading) == ("block", forward.reading)
        assert layer.ran["backward"].path == "block"
        dense = forward._replace(path="dense")
        assert decide_backward(args, 0, "gpu", dense).path == "dense"
        unknown = decide_backward(args, 0, "gpu", None)
        assert (unknown.path, unknown.reading) == ("block", None)
        assert decide_backward(call(0), 0, "gpu", None).path == "dense"


def test_counts_that_somebody_looks_at_after_the_decision_are_news(layer):
    args = call(1024)
    run(args, layer)
    know(args, layer, 0.1)
    decision = decision_of(args, layer)
    assert decision.known == (0.1, decision.reading.version)
    decision.reading.take(torch.tensor([9]), 10)
    _ = decision.reading.share  # `explain`, or a call of another shape
    assert decision.known[1] != decision.reading.version
