"""Calls that are left to dense ahead of time: how many, which, and that they compute the same."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import twell
from twell import Backend, Plan, SparseMLP, _ahead, ffn, ffn_with_stats, functional
from twell.kernels.args import Skip
from twell.kernels.dense import dense_forward

DENSE = ("dense", 0, "dense")  # a resolution


class Asked:
    """Imitates a GPU backend on the CPU: leaves each call and the next two to dense, and remembers."""

    def __init__(self):
        self.calls, self.settled = 0, []

    def __call__(self, path, backend, args, training):
        self.calls += 1
        return Skip(True, 2, self.settled.append)


@pytest.fixture
def asked(monkeypatch):
    monkeypatch.setattr(_ahead, "_grants", {})
    monkeypatch.setattr(functional, "_skip", asked := Asked())
    return asked


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def block(dtype=torch.float32, rows=(2, 3)):
    """x [*rows, 16], up, down, gate."""
    return [torch.randn(shape, dtype=dtype) for shape in ((*rows, 16), (32, 16), (16, 32), (32, 16))]


def test_as_many_as_were_granted_and_the_backend_hears_of_them(asked):
    operands = block()
    for _ in range(7):
        ffn(*operands)
    assert asked.calls == 3
    assert asked.settled == [2, 2]


@pytest.mark.parametrize("plan", [Plan(path="dense"), None], ids=["dense", "auto"])
@pytest.mark.parametrize("rows", [(), (3,), (2, 3), (0, 3)])
def test_what_was_resolved_to_dense_is_not_resolved_again(monkeypatch, plan, rows):
    """Blocks as small as this one are never worth a sparse path."""
    monkeypatch.setattr(_ahead, "_grants", {})
    operands = block(rows=rows)
    first = ffn(*operands, plan=plan)
    monkeypatch.setattr(functional, "_dispatch", None)
    again = ffn(*operands, plan=plan)
    assert again.shape == operands[0].shape
    assert torch.equal(first, again)


def test_shapes_have_grants_of_their_own(asked):
    x, up, down, gate = block(rows=(6,))
    for _ in range(3):
        ffn(x, up, down, gate)
        ffn(x[:5], up, down, gate)
    assert asked.calls == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(6,), (2, 3)])
@pytest.mark.parametrize("activation", ["relu", "relu2", "fatrelu(0.25)"])
@pytest.mark.parametrize("gated", [True, False])
def test_the_same_bits_as_the_call_that_was_asked_about(asked, dtype, rows, activation, gated):
    x, up, down, gate = block(dtype, rows)
    x = torch.randn(*rows[::-1], 16, dtype=dtype).transpose(0, 1) if len(rows) > 1 else x
    biases = {"up_bias": torch.randn(32, dtype=dtype), "down_bias": torch.randn(16, dtype=dtype)}
    if gated:
        biases["gate_bias"] = torch.randn(32, dtype=dtype)
    first = ffn(x, up, down, gate if gated else None, activation=activation, **biases)
    again = ffn(x, up, down, gate if gated else None, activation=activation, **biases)
    assert asked.calls == 1
    assert torch.equal(first, again)


def test_only_calls_of_the_same_kind(asked, monkeypatch):
    x, up, down, gate = block()
    bias = torch.zeros(16)
    ffn(x, up, down, gate)

    def autocast():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ffn(x, up, down, gate)

    def registered():
        twell.register_backend(
            Backend(
                name="new",
                paths=frozenset({"row"}),
                refusal=lambda site: None,
                forward=lambda args, path, rows, record: dense_forward(args, record),
            )
        )
        ffn(x, up, down, gate)
        twell.unregister_backend("new")

    def environment():
        monkeypatch.setenv("TWELL_PLAN", "auto")
        ffn(x, up, down, gate)
        monkeypatch.delenv("TWELL_PLAN")

    others = (
        lambda: ffn(x[:1], up, down, gate),
        lambda: ffn(x, up, down, gate, activation="relu2"),
        lambda: ffn(x, up, down, gate, plan=Plan()),
        lambda: ffn(x, up, down, gate, down_bias=bias),
        lambda: ffn(x, up, down),
        lambda: ffn(x, up.clone(), down, gate),
        lambda: ffn(x.double(), up.double(), down.double(), gate.double()),
        lambda: ffn_with_stats(x, up, down, gate),
        autocast,
        registered,
        environment,
    )
    for other in others:
        _ahead._grants.clear()
        ffn(x, up, down, gate)
        before = asked.calls
        other()
        assert asked.calls == before + 1, other


def test_what_does_not_last_or_is_recorded_grants_nothing(asked):
    x, up, down, gate = block()
    for _ in range(4):
        ffn_with_stats(x, up, down, gate)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ffn(x, up, down, gate)
    assert asked.calls == 8
    assert not _ahead._grants


def test_what_ffn_refuses_is_still_refused(asked):
    x, up, down, gate = block()
    bias = torch.zeros(32)
    ffn(x, up, down, gate, up_bias=bias)
    for bad in (gate[:1], gate.double(), gate.tolist()):
        with pytest.raises(ValueError, match="gate"):
            ffn(x, up, down, bad, up_bias=bias)
    with pytest.raises(ValueError, match="layout"):
        ffn(x.flatten(0, 1).to_sparse(), up, down, gate, up_bias=bias)
    with pytest.raises(ValueError, match="x"):
        ffn(x.tolist(), up, down, gate, up_bias=bias)
    bias.data = torch.zeros(1)
    with pytest.raises(ValueError, match="up_bias"):
        ffn(x, up, down, gate, up_bias=bias)


def test_a_layer_elsewhere_in_memory_is_asked_about(asked):
    x, up, down, gate = block()
    ffn(x, up, down, gate)
    up.data = up.clone()
    ffn(x, up, down, gate)
    assert asked.calls == 2


def test_a_layer_with_the_identity_of_one_that_is_gone_is_asked_about(asked):
    x, up, down, gate = block()
    ffn(x, up, down, gate)
    (granted,) = _ahead._grants.values()
    other = up.detach()  # at the same address
    _ahead._grants[id(other), x.shape] = granted
    ffn(x, other, down, gate)
    assert asked.calls == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_and_checkpoints_after_granted_calls(asked, reentrant):
    """Square, so that operands in another order would not be noticed by their shapes."""
    torch.manual_seed(0)
    mlp = SparseMLP(16, 16)
    x = torch.randn(16, 16)
    mlp(x)
    mlp(x)
    assert asked.calls == 1
    assert _ahead._grants  # one call is left, which training must not take
    stock = SparseMLP(16, 16, plan=Plan(path="dense"))
    stock.load_state_dict(mlp.state_dict())
    with torch.enable_grad():
        given = x.clone().requires_grad_()
        checkpoint(mlp, given, use_reentrant=reentrant).square().sum().backward()
        other = x.clone().requires_grad_()
        stock(other).square().sum().backward()
    torch.testing.assert_close(given.grad, other.grad)
    for name, parameter in mlp.named_parameters():
        torch.testing.assert_close(parameter.grad, stock.get_parameter(name).grad)


def test_transforms_are_asked_about(asked):
    """Even where a wrapped tensor has the identity of a weight that is gone."""
    x, up, down, gate = block(rows=(3,))
    ffn(x, up, down, gate)
    (granted,) = _ahead._grants.values()

    def run(up):
        _ahead._grants[id(up), x.shape] = granted
        return ffn(x, up, down, gate)

    expected = ffn(x, up, down, gate)
    before = asked.calls
    torch.testing.assert_close(torch.func.vmap(run)(up[None])[0], expected)
    assert granted.left == 1  # the one call above took one of two
    assert asked.calls == before  # transforms run dense before anybody is asked


def test_tracing_does_not_ask(asked, monkeypatch):
    mlp = SparseMLP(16, 32, plan=Plan(path="row")).requires_grad_(False)
    monkeypatch.setattr(functional, "granted_dense", lambda *call: pytest.fail("asked while tracing"))
    program = torch.export.export(mlp, (torch.randn(3, 16),))
    assert any("twell.ffn" in str(node.target) for node in program.graph.nodes)


def test_more_takers_than_calls_end_a_grant(asked):
    """Two threads may both take the last call; the next one asks again."""
    operands = block()
    ffn(*operands)
    (grant,) = _ahead._grants.values()
    grant.left = -1
    ffn(*operands)
    assert asked.calls == 2


def test_grants_are_given_up_rather_than_piled_up(asked, monkeypatch):
    monkeypatch.setattr(_ahead, "_MOST", 4)
    x, up, down, gate = block()
    layers = [up.clone() for _ in range(9)]
    for layer in layers:
        ffn(x, layer, down, gate)
    assert len(_ahead._grants) <= 4
    assert asked.settled == [0] * (9 - len(_ahead._grants))


def test_a_grant_does_not_outlive_a_change_of_hooks(asked):
    """A checkpoint wants the same tensors saved when it computes again: it must not start on a grant."""
    with torch.enable_grad():
        operands = [tensor.requires_grad_() for tensor in block()]
        ffn(*operands)
        with torch.autograd.graph.save_on_cpu():
            ffn(*operands)
        assert asked.calls == 2


def test_other_devices_layouts_and_threads_are_asked_about(monkeypatch):
    monkeypatch.setattr(_ahead, "_grants", {})
    x, up, down, gate = block(rows=(3,))
    ffn(x, up, down, gate)
    with pytest.raises(ValueError, match=r"down: got device meta"):
        ffn(x, up, down.to("meta"), gate)
    ffn(x, up, down, gate)
    with pytest.raises(ValueError, match=r"down: got layout"):
        ffn(x, up, down.to_sparse_csr(), gate)
    ffn(x, up, down, gate)
    threads = torch.get_num_threads()
    resolved = []
    monkeypatch.setattr(functional, "_resolve_constant", lambda *call: resolved.append(call) or DENSE)
    try:
        torch.set_num_threads(threads + 1)
        ffn(x, up, down, gate)
    finally:
        torch.set_num_threads(threads)
    assert len(resolved) == 1
