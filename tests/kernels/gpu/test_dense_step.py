"""What lies between the products of a dense training step, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from twell import Plan, SparseMLP
from twell.activations import Activation
from twell.dense_step import FusedHidden
from twell.kernels.dense import hidden_backward, hidden_forward
from twell.kernels.gpu.dense import FusedStep

from ...accuracy import assert_accurate

KINDS = [
    (spec, gated)
    for spec in ("relu", "relu2", "fatrelu(0.3)", "drelu")
    for gated in (True, False)
    if gated or spec != "drelu"
]
# One token, more than a program's 128, neurons of more than one program; none at all.
SHAPES = [(1, 8), (131, 136), (7, 264), (0, 16)]


def activations(tokens, neurons, dtype=torch.float16, special=False):
    generator = torch.Generator().manual_seed(tokens)
    pre, up, grad = (torch.randn(tokens, neurons, generator=generator).to(dtype) for _ in range(3))
    if special and tokens > 3:
        pre[:3, 0] = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=dtype)
        up[1:4, 0] = torch.tensor([0.0, float("inf"), float("nan")], dtype=dtype)
        grad[2, :4] = float("inf")
    return pre, up, grad


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("spec", "gated"), KINDS)
def test_forward_is_that_of_pytorch(interpreted, spec, gated, shape):
    pre, up, _ = activations(*shape, special=True)
    up = up if gated else None
    activation = Activation.parse(spec)
    expected = hidden_forward(activation, pre, up, record=True)
    found = FusedStep(activation, pre.dtype, gated).forward(pre, up, record=True)
    torch.testing.assert_close(found.hidden, expected.hidden, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found.l1, expected.l1, equal_nan=True)
    assert torch.equal(found.firing, expected.firing)
    plain = FusedStep(activation, pre.dtype, gated).forward(pre, up, record=False)
    assert (plain.l1, plain.firing) == (None, None)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("spec", "gated"), KINDS)
def test_backward_of_the_output_is_that_of_pytorch(interpreted, spec, gated, shape):
    pre, up, grad = activations(*shape, special=True)
    up = up if gated else None
    activation = Activation.parse(spec)
    expected = hidden_backward(activation, pre, up, grad, None)
    found = FusedStep(activation, pre.dtype, gated).backward(pre, up, grad, None)
    for name in ("pre", "up", "hidden") if gated else ("pre", "hidden"):
        theirs = getattr(expected, name)
        torch.testing.assert_close(getattr(found, name), theirs, rtol=0, atol=0, equal_nan=True)
    assert gated or found.up is None


@pytest.mark.parametrize("from_y", [True, False], ids=["y and l1", "l1"])
@pytest.mark.parametrize(("spec", "gated"), KINDS)
def test_backward_of_l1_is_as_accurate_as_that_of_pytorch(interpreted, spec, gated, from_y):
    """Stock rounds what L1 adds before it adds it; this rounds the sum."""
    pre, up, grad = activations(37, 72)
    up, grad = up if gated else None, grad if from_y else None
    grad_l1 = torch.tensor(11.0)
    activation = Activation.parse(spec)
    found = FusedStep(activation, pre.dtype, gated).backward(pre, up, grad, grad_l1, again=False)
    stock = hidden_backward(activation, pre, up, grad, grad_l1)
    exact = hidden_backward(activation, *(t if t is None else t.double() for t in (pre, up, grad)), grad_l1)
    assert found.hidden is None
    for name in ("pre", "up") if gated else ("pre",):
        assert_accurate(getattr(found, name), getattr(exact, name), getattr(stock, name), name)


def fused(activation, pre, up):
    return FusedHidden.apply(FusedStep(activation, pre.dtype, up is not None), pre, up)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=["y", "l1", "both"])
@pytest.mark.parametrize("gated", [True, False])
def test_autograd_sees_what_it_sees_of_pytorch(interpreted, gated, used):
    pre, up, grad = activations(9, 24)
    inputs = [t.requires_grad_() for t in ((pre, up) if gated else (pre,))]
    given = [(grad, torch.tensor(3.0))[place] for place in used]
    found = []
    for run in (fused, lambda *args: hidden_forward(*args, record=True)):
        outputs = run(Activation.parse("relu"), pre, up if gated else None)
        assert not outputs[2].requires_grad
        found.append(torch.autograd.grad([outputs[place] for place in used], inputs, given))
    for ours, stock in zip(*found, strict=True):
        torch.testing.assert_close(ours, stock, rtol=2e-3, atol=2e-3)  # one rounding of float16


def test_second_derivatives_are_those_of_pytorch(interpreted):
    activation = Activation.parse("relu2")
    pre, up, grad = (t.float() for t in activations(5, 16))
    pre.requires_grad_(), up.requires_grad_()
    found = []
    for run in (fused, lambda *args: hidden_forward(*args, record=True)):
        hidden, l1, _ = run(activation, pre, up)
        first = torch.autograd.grad([hidden, l1], (pre, up), [grad, torch.tensor(2.0)], create_graph=True)
        found.append(torch.autograd.grad([t.square().sum() for t in first], (pre, up)))
    for ours, stock in zip(*found, strict=True):
        torch.testing.assert_close(ours, stock)


def test_batches_of_gradients_go_through_pytorch(interpreted):
    pre, up, _ = activations(4, 8)
    pre.requires_grad_()
    hidden, _, _ = fused(Activation.parse("relu"), pre, up)
    grads = torch.stack([torch.ones_like(hidden), torch.full_like(hidden, 2.0)])
    (found,) = torch.autograd.grad(hidden, pre, grads, is_grads_batched=True)
    assert torch.equal(found[1], 2 * found[0])
    assert torch.equal(found[0], torch.where(pre > 0, up, 0.0))


def test_gradients_of_any_strides(interpreted):
    pre, up, _ = activations(6, 8)
    pre.requires_grad_()
    hidden, _, _ = fused(Activation.parse("relu"), pre, up)
    (found,) = torch.autograd.grad(hidden, pre, torch.ones(1, 1, dtype=pre.dtype).expand_as(hidden))
    assert torch.equal(found, torch.where(pre > 0, up, 0.0))


def block_and_input(gated=True, activation="relu", tokens=300):
    torch.manual_seed(0)
    options = {"gated": gated, "activation": activation, "plan": Plan(path="dense")}
    block = SparseMLP(256, 520, **options).cuda().bfloat16()
    block.record = True
    return block, torch.randn(2, tokens // 2, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def gradients(block, x, run=None):
    y = block(x) if run is None else run(block, x)
    stats = block.last_stats
    weight = torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y).to(y)
    loss = (y * weight).sum() + 40 * stats.l1
    inputs = [x, *block.parameters()]
    return y, stats, torch.autograd.grad(loss, inputs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGpu:
    @pytest.mark.parametrize(("spec", "gated"), KINDS)
    def test_a_dense_step_is_as_accurate_as_stock(self, spec, gated, monkeypatch):
        block, x = block_and_input(gated, spec)
        y, stats, found = gradients(block, x)
        with monkeypatch.context() as patch:
            patch.setattr("twell.dense_step.fused_step", lambda args: None)
            y_stock, stats_stock, stock = gradients(block, x)
        wide = block.double()
        _, stats_exact, exact = gradients(wide, x.detach().double().requires_grad_())
        assert torch.equal(y, y_stock)
        assert torch.equal(stats.firing, stats_stock.firing)
        assert_accurate(stats.l1, stats_exact.l1, stats_stock.l1.to(stats.l1), "l1")
        for ours, theirs, right in zip(found, stock, exact, strict=True):
            assert_accurate(ours, right, theirs, "gradient")

    def test_kernels_run_where_they_should(self, monkeypatch):
        ran = []
        for name in ("forward", "backward"):
            inner = getattr(FusedStep, name)
            monkeypatch.setattr(
                FusedStep, name, lambda self, *a, n=name, i=inner, **k: ran.append(n) or i(self, *a, **k)
            )
        block, x = block_and_input()
        gradients(block, x)
        assert ran == ["forward", "backward"]
        block.record = False
        block(x).sum().backward()
        assert len(ran) == 2  # without statistics PyTorch has little to fuse

    def test_inside_a_checkpoint(self):
        block, x = block_and_input()
        block.plan = None  # decides inside
        y, stats, found = gradients(block, x, lambda b, x: checkpoint(b, x, use_reentrant=False))
        block.plan = Plan(path="dense")
        y_plain, stats_plain, plain = gradients(block, x)
        assert torch.equal(stats.firing, stats_plain.firing)
        torch.testing.assert_close(y, y_plain)
        for one, other in zip(found, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * other.abs().max().item())

    def test_in_a_captured_step(self):
        block, x = block_and_input()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(2):
                gradients(block, x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, _, found = gradients(block, x)
        graph.replay()
        y_plain, _, plain = gradients(block, x)
        assert torch.equal(y, y_plain)
        for one, other in zip(found, plain, strict=True):
            assert torch.equal(one, other)

    def test_frozen_projections(self):
        block, x = block_and_input()
        block.gate_proj.weight.requires_grad_(False)
        block(x)
        (block(x).float().sum() + block.last_stats.l1).backward()
        assert block.gate_proj.weight.grad is None
        assert all(tensor.grad.any() for tensor in (x, block.up_proj.weight, block.down_proj.weight))
