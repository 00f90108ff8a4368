"""When a call on the CPU looks for zeros, and which backwards run as stock PyTorch runs them."""

from __future__ import annotations

import pytest
import torch

from twell import ffn, recorded_paths
from twell.activations import Activation
from twell.kernels.cpu.weights import CpuSite
from twell.layer_state import layer_of
from twell.policy import cpu
from twell.problem import FfnArgs
from twell.synthetic import make_ffn


@pytest.mark.parametrize(
    ("changes", "pays"),
    [
        ({}, False),
        ({"gated": True}, True),
        ({"gated": True, "threads": 2}, False),
        ({"dtype": torch.float64}, True),
        ({"tokens": 5}, False),
        ({"tokens": 6}, True),
        ({"tokens": 6, "threads": 2}, False),
    ],
)
def test_there_must_be_enough_to_save(changes, pays, monkeypatch):
    """One token reads 4,000 bytes in 0.4 ms and multiplies in 0.2 ms."""
    monkeypatch.setattr(cpu, "_READ_BYTES_PER_CORE", 1e7)
    monkeypatch.setattr(cpu, "_FLOPS_PER_CORE", 1e7)
    monkeypatch.setattr(cpu, "_WORTH_LOOKING_SECONDS", 0.7e-3)
    monkeypatch.setattr(cpu, "_MANY_WORTH_LOOKING_SECONDS", 1.1e-3)
    small = CpuSite(1, 20, 50, torch.float32, gated=False, neuron_major_down=True, threads=1)
    assert cpu.sparse_can_pay(small._replace(**changes)) == pays


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_expected_shares_do_not_matter(share, monkeypatch):
    """A CPU looks at the activations themselves."""
    monkeypatch.setattr(cpu, "_WORTH_LOOKING_SECONDS", 0.0)
    x, up, down, gate = make_ffn(40, 64, 256, 4).operands()
    layer_of(gate).expect({1: share, 128: share})
    with recorded_paths() as ran:
        ffn(x, up, down, gate)
    assert [piece.path for piece in ran] == ["row"]


@pytest.mark.parametrize(("tokens", "backend"), [(0, "dense"), (3, "dense"), (4, "cpu"), (40, "cpu")])
def test_very_few_tokens_go_backward_as_stock(tokens, backend):
    x, up, down, gate = make_ffn(40, 16, 32, 4).operands()
    args = FfnArgs(x[:tokens], up, down, gate, None, None, None, Activation())
    decision = cpu.decide_backward(args, None)
    assert (decision.path, decision.backend) == ("dense", backend)


@pytest.mark.parametrize("length", [1, 16, 64, 100, 128, 512])
def test_first_tokens_of_sequences_do_not_pass_for_all(length):
    """Chunks of 512 tokens, sequences of any length; each first token activates everything."""
    activated = torch.zeros(512, 64)
    activated[::length] = 1
    sample = cpu._sample(activated, 8)
    assert sample.shape == (8, 64)
    firsts = sample[:, 0].sum().item() / 8
    assert abs(firsts - 1 / length) <= 1 / 8


def test_sampled_rows_are_different_ones():
    for count, size in ((9, 8), (17, 16), (64, 8), (512, 8), (4096, 8), (100_000, 64)):
        places = cpu._places(count, size)
        assert len(set(places)) > 0.6 * size
        assert min(places) >= 0
        assert max(places) < count
        assert max(places) - min(places) > count / 2
    rows = torch.arange(8.0).reshape(4, 2)
    assert cpu._sample(rows, 8) is rows
