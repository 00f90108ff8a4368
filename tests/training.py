"""Gradients of a block, compared with those of the oracle."""

from __future__ import annotations

import torch

from twell import ops, policy, reference
from twell.layer_state import Reading
from twell.synthetic import make_ffn

from .accuracy import assert_accurate, stock_dense

HIDDEN, NEURONS = 40, 104  # neither is a multiple of a tile
SMALL = {"hidden": 24, "neurons": 40}  # nor are these: one tile, for tests of what happens around kernels
L1_WEIGHT = 0.5
NAMES = ("x", "up", "down", "gate", "up_bias", "down_bias", "gate_bias")


def expect_overflow(monkeypatch):
    """Backwards on GPUs expect every neuron to be active, and so to take rounds."""
    crowd = Reading()
    crowd._share = 1.0
    monkeypatch.setattr(
        ops, "decide_backward", lambda *step: policy.decide_backward(*step)._replace(reading=crowd)
    )


def block(
    tokens,
    nnz=20,
    dtype=torch.float32,
    gated=True,
    bias=False,
    hidden=HIDDEN,
    neurons=NEURONS,
    outputs=None,
    neuron_major=False,
):
    """The operands of a block by name.

    outputs:       D_out, if it is not D.
    neuron_major:  rows of `down` belong to neurons.
    """
    made = make_ffn(tokens, hidden, neurons, nnz, gated=gated, dtype=dtype).operands()
    operands = dict.fromkeys(NAMES) | dict(zip(NAMES, made, strict=False))
    if outputs is not None:
        operands["down"] = (torch.randn(outputs, neurons) / neurons**0.5).to(dtype)
    if neuron_major:
        operands["down"] = operands["down"].mT.contiguous().mT
    if bias:
        generator = torch.Generator().manual_seed(0)
        sizes = {"up_bias": neurons, "down_bias": outputs or hidden} | (
            {"gate_bias": neurons} if gated else {}
        )
        operands |= {name: (torch.randn(n, generator=generator) / 4).to(dtype) for name, n in sizes.items()}
    return operands


def gradients(operands, run, only=None, dtype=None):
    """Gradients, by name, of a fixed weighting of y, and of L1 if `run` returns statistics too."""
    leaves = {name: None if t is None else t.detach().to(dtype or t.dtype) for name, t in operands.items()}
    # A leaf keeps the strides of its operand: layouts are part of what is tested.
    for name, tensor in leaves.items():
        if tensor is not None and (only is None or name in only):
            tensor.requires_grad_()
    wanted = {name: t for name, t in leaves.items() if t is not None and t.requires_grad}
    result = run(**leaves)
    y, l1 = result if isinstance(result, tuple) else (result, None)
    if l1 is not None:
        l1 = l1.l1 if hasattr(l1, "l1") else l1
    weighting = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    loss = (y * weighting).sum()
    if l1 is not None:
        loss = loss + L1_WEIGHT * l1.to(loss.dtype)
    found = torch.autograd.grad(loss, list(wanted.values()))
    return dict(zip(wanted, found, strict=True))


def assert_gradients_accurate(operands, activation, run):
    """`run(activation=..., **operands)` returns y and statistics; every gradient at most twice as far from
    the oracle's as stock PyTorch's in the same dtype."""

    def oracle(**tensors):
        exact = reference.ffn(**tensors, activation=activation, dtype=torch.float64)
        return exact.y, exact.l1

    def stock(**tensors):
        y = stock_dense(**tensors, activation=activation)
        hidden = stock_hidden(activation, **tensors)
        return y, hidden.abs().sum(dtype=torch.float32) / hidden.shape[0]

    found = gradients(operands, lambda **tensors: run(activation=activation, **tensors))
    exact = gradients(operands, oracle, dtype=torch.float64)
    dense = gradients(operands, stock)
    assert set(found) == set(exact)
    for name, gradient in found.items():
        assert gradient.dtype == operands[name].dtype
        assert_accurate(gradient, exact[name], dense[name], f"gradient of {name}")


def assert_l1_alone(operands, penalty):
    """A loss of `penalty(**operands)`, the L1: as stock autograd has it, no gradient for `down`, and nothing
    of it, an Inf say, in the others."""
    operands["down"][3] = torch.inf

    def run(loss_of):
        leaves = {name: None if t is None else t.detach().requires_grad_() for name, t in operands.items()}
        loss_of(**leaves).backward()
        return {name: leaf.grad for name, leaf in leaves.items() if leaf is not None}

    def stock(**tensors):
        hidden = stock_hidden("relu", **tensors)
        return hidden.abs().sum(dtype=torch.float32) / hidden.shape[0]

    found, wanted = run(penalty), run(stock)
    assert found["down"] is None
    assert found.get("down_bias") is None
    for name, gradient in wanted.items():
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient)


def stock_hidden(activation, x, up, down, gate=None, up_bias=None, down_bias=None, gate_bias=None):
    identity = torch.eye(up.shape[0], dtype=x.dtype, device=x.device)
    return stock_dense(x, up, identity, gate, activation=activation, up_bias=up_bias, gate_bias=gate_bias)
