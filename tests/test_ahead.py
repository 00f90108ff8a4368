"""Calls that are left to dense ahead of time: how many, and which."""

from __future__ import annotations

import pytest
import torch

from twell import Plan, SparseMLP, _ahead, ffn, functional, reference


@pytest.fixture
def asked(monkeypatch):
    """The shapes of x that the backend was asked about; it leaves each call and the next two to dense."""
    shapes = []
    monkeypatch.setattr(_ahead, "_grants", {})
    monkeypatch.setattr(
        functional, "_skipped_calls", lambda path, backend, args: shapes.append(args.x.shape) or 3
    )
    return shapes


def block(dtype=torch.float32):
    """x [2, 3, 16], up, down, gate."""
    shapes = ((2, 3, 16), (32, 16), (16, 32), (32, 16))
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def test_as_many_as_were_granted(asked):
    operands = block()
    exact = reference.ffn(*operands).y
    for _ in range(7):
        torch.testing.assert_close(ffn(*operands), exact)
    assert len(asked) == 3


def test_only_calls_of_the_same_kind(asked, monkeypatch):
    x, up, down, gate = block()
    ffn(x, up, down, gate)
    others = (
        lambda: ffn(x[:1], up, down, gate),
        lambda: ffn(x, up, down, gate, activation="relu2"),
        lambda: ffn(x, up, down, gate, plan=Plan()),
        lambda: ffn(x, up, down.clone(), gate),
        lambda: ffn(x, up, down, gate, down_bias=torch.zeros(16)),
        lambda: ffn(x, up, down),
        lambda: ffn(x, up.clone(), down, gate),
        lambda: functional.ffn_with_stats(x, up, down, gate),
    )
    for number, other in enumerate(others, start=2):
        other()
        assert len(asked) == number
        _ahead._grants.clear()
        _ahead.grant_dense((x, up, down, gate, None, None, None), functional.Activation(), None, 2)
    monkeypatch.setenv("TWELL_PLAN", "auto")
    ffn(x, up, down, gate)
    assert len(asked) == number + 1


def test_what_ffn_refuses_is_still_refused(asked):
    x, up, down, gate = block()
    ffn(x, up, down, gate)
    for bad in (gate[:1], gate.double(), gate.tolist()):
        with pytest.raises(ValueError, match="gate"):
            ffn(x, up, down, bad)
    with pytest.raises(ValueError, match="down_bias"):
        ffn(x, up, down, gate, down_bias=torch.zeros(1))


def test_another_tensor_at_the_same_place_starts_anew(asked):
    x, up, down, gate = block()
    ffn(x, up, down, gate)
    (granted,) = _ahead._grants.values()
    other = up.clone()
    _ahead._grants[id(other)] = granted  # as if `up` were gone and `other` had its identity
    ffn(x, other, down, gate)
    assert len(asked) == 2


def test_gradients_and_compilers_see_the_block(asked, monkeypatch):
    mlp = SparseMLP(16, 32)
    x = torch.randn(3, 16)
    with torch.no_grad():
        mlp(x)
    y = mlp(x)  # granted
    assert len(asked) == 1
    y.sum().backward()
    exact = SparseMLP(16, 32, plan=Plan(path="dense"))
    exact.load_state_dict(mlp.state_dict())
    exact(x).sum().backward()
    torch.testing.assert_close(mlp.up_proj.weight.grad, exact.up_proj.weight.grad)
    mlp.plan = Plan(path="row")
    monkeypatch.setattr(functional, "granted_dense", lambda *call: pytest.fail("asked while tracing"))
    with torch.no_grad():
        program = torch.export.export(mlp, (x,))
    assert any("twell.ffn" in str(node.target) for node in program.graph.nodes)


def test_layers_are_forgotten_rather_than_piled_up(asked, monkeypatch):
    monkeypatch.setattr(_ahead, "_MOST_LAYERS", 4)
    x, up, down, gate = block()
    layers = [up.clone() for _ in range(9)]
    for layer in layers:
        ffn(x, layer, down, gate)
    assert len(_ahead._grants) <= 4
