"""Which gradients a backward may add to; the kernels themselves are tested in tests/kernels/gpu."""

from __future__ import annotations

import pytest
import torch

from twell import Activation, accumulate_in_place
from twell.accumulation import existing_gradients
from twell.problem import FfnArgs

RELU = Activation.parse("relu")


def weight(rows=16, columns=8):
    leaf = torch.randn(rows, columns, requires_grad=True)
    leaf.grad = torch.zeros(rows, columns)
    return leaf


def args(up, gate):
    down = torch.randn(16, 8).mT.requires_grad_()
    down.grad = torch.zeros(16, 8).mT
    return FfnArgs(torch.randn(3, 8), up, down, gate, None, None, None, RELU)


NEEDED = FfnArgs(True, True, True, True, False, False, False, RELU)


class Block(torch.autograd.Function):
    """A block whose backward only asks what it may add to."""

    @staticmethod
    def forward(ctx, answers, operands, needed, *weights):
        ctx.question = answers, operands, needed
        return torch.zeros(())

    @staticmethod
    def backward(ctx, _grad):
        answers, operands, needed = ctx.question
        answers.append(existing_gradients(operands, needed))
        return (None,) * 6


def found(operands, needed=NEEDED, run=torch.Tensor.backward):
    answers = []
    loss = Block.apply(answers, operands, needed, operands.up, operands.down, operands.gate)
    with accumulate_in_place():
        run(loss)
    (answer,) = answers
    return answer


def test_gradients_that_are_there():
    operands = args(weight(), weight())
    assert found(operands).up is operands.up.grad
    assert found(operands, NEEDED._replace(gate=False)).gate is None


def test_nobody_asked():
    operands, answers = args(weight(), weight()), []
    loss = Block.apply(answers, operands, NEEDED, operands.up, operands.down, operands.gate)
    loss.backward()
    with torch.no_grad(), accumulate_in_place():
        answers.append(existing_gradients(operands, NEEDED))  # nor does a backward run
    assert answers == [None, None]


def test_weights_that_the_backward_was_not_asked_for():
    operands = args(weight(), weight())
    answer = found(operands, run=lambda loss: loss.backward(inputs=[operands.up]))
    assert answer.up is operands.up.grad
    assert answer.down is answer.gate is None


def test_a_gradient_that_is_returned_is_not_added():
    operands = args(weight(), weight())
    assert found(operands, run=lambda loss: torch.autograd.grad(loss, operands.up, allow_unused=True)) is None


def test_one_weight_in_two_places_is_left_to_autograd():
    shared = weight()
    assert found(args(shared, shared)) is None


@pytest.mark.parametrize("spoil", ["none", "dtype", "graph", "strides"])
def test_gradients_that_kernels_cannot_add_to(spoil):
    operands = args(weight(), weight())
    gate = operands.gate
    if spoil == "none":
        gate.grad = None
    elif spoil == "dtype":
        gate.grad = None
        gate.grad_dtype = torch.float64
        gate.grad = torch.zeros(16, 8, dtype=torch.float64)
    elif spoil == "graph":
        gate.grad = torch.zeros(16, 8, requires_grad=True) * 2
    else:
        gate.grad = torch.zeros(8, 16).mT
    assert found(operands) is None
