"""The portable training kernels on small shapes that cross every tile border, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from twell import Plan, crowded_steps, ffn, ffn_with_stats

from ..accuracy import stock_dense
from ..training import assert_gradients_accurate, block, gradients
from .test_interpreted import NEURONS


def check(operands, activation, backend, rows=16):
    plan = Plan(path="block", block_rows=rows, backend=backend)
    assert_gradients_accurate(operands, activation, lambda **tensors: ffn_with_stats(**tensors, plan=plan))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("tokens", [1, 33])
def test_matches_the_oracle(interpreted, dtype, gated, tokens):
    check(block(tokens, dtype=dtype, gated=gated), "relu", interpreted)


@pytest.mark.parametrize("activation", ["relu", "relu2", "fatrelu(0.25)"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_activations_and_biases(interpreted, activation, gated):
    check(block(21, dtype=torch.float32, gated=gated, bias=True), activation, interpreted)


@pytest.mark.parametrize(
    ("nnz", "rounds"), [(0, 0), (1, 0), (40, 1), (NEURONS, 1)], ids=["none", "one", "rounds", "all"]
)
def test_from_none_to_all_active(interpreted, nnz, rounds):
    """The pool holds a third of all neurons: more go in rounds, with the same result, and are counted."""
    before = crowded_steps()
    check(block(19, nnz=nnz, dtype=torch.float32), "relu", interpreted)
    assert crowded_steps() - before == rounds


def test_frequent_and_rare_neurons(interpreted):
    """Enough tokens that some neurons are rare (one token in 256) and others are not."""
    check(block(600, nnz=4, dtype=torch.float32), "relu", interpreted, rows=64)


def run_block(backend):
    plan = Plan(path="block", block_rows=16, backend=backend)
    return lambda **tensors: ffn(**tensors, plan=plan)


def test_only_what_is_needed(interpreted):
    operands = block(20, dtype=torch.float32, bias=True)
    full = gradients(operands, run_block(interpreted))
    for name in ("x", "down", "gate_bias"):
        alone = gradients(operands, run_block(interpreted), only=(name,))
        assert list(alone) == [name]
        assert torch.equal(alone[name], full[name])


@pytest.mark.parametrize("outputs", [8, 72, 6])
def test_other_numbers_of_outputs(interpreted, outputs):
    """6 float32 are no multiple of 16 bytes: dense."""
    check(block(20, outputs=outputs, bias=True), "relu", interpreted)


def test_rounds_that_are_expected(interpreted, monkeypatch):
    from twell.kernels.gpu import monitor

    monkeypatch.setattr(monitor, "known_share", lambda key: 1.0)
    check(block(40, nnz=60), "relu", interpreted)


def test_several_slabs(interpreted, monkeypatch):
    from twell.kernels.gpu import blocks

    monkeypatch.setattr(blocks, "WORKSPACE_BYTES", 64 << 10)
    check(block(150, dtype=torch.float32), "relu", interpreted)


def test_the_gradient_of_down_is_laid_out_like_down(interpreted):
    operands = block(20, dtype=torch.float32)
    for down in (operands["down"].contiguous(), operands["down"].mT.contiguous().mT):
        found = gradients(operands | {"down": down}, run_block(interpreted))
        assert found["down"].stride() == down.stride()


def test_second_derivatives(interpreted):
    operands = block(5, dtype=torch.float32)

    def second(run):
        leaves = {name: None if t is None else t.clone().requires_grad_() for name, t in operands.items()}
        (first,) = torch.autograd.grad(run(**leaves).square().sum(), leaves["x"], create_graph=True)
        return torch.autograd.grad(first.square().sum(), [leaves["x"], leaves["up"], leaves["down"]])

    for found, wanted in zip(second(run_block(interpreted)), second(stock_dense), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_opcheck(interpreted):
    operands = block(20, dtype=torch.float32)
    leaves = [None if t is None else t.clone().requires_grad_() for t in operands.values()]
    arguments = (*leaves, "relu", "block", 16, interpreted, True)
    torch.library.opcheck(torch.ops.twell.ffn_train, arguments)
