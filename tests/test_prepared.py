"""Calls that repeat a decision: how many, which, and that they compute the same."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from twell import Plan, SparseMLP, ffn, ffn_with_stats, functional, layer_state, prepared
from twell.layer_state import layer_of
from twell.problem import Decision

from .accuracy import every_activation, stock_dense


class Asked:
    """Imitates what is decided on a GPU: each call and the next two run dense; remembers how many did."""

    has_news, version = False, 0

    def __init__(self):
        self.calls, self.settled = 0, []

    def __call__(self, args, resolution, layer, **options):
        self.calls += 1
        layer.note("forward", "dense", "")
        return Decision("dense", 0, "dense", "", ahead=2, reading=self, layer=layer)

    def count(self, calls):
        self.settled.append(calls)


@pytest.fixture
def asked(monkeypatch):
    monkeypatch.setattr(functional, "decide", asked := Asked())
    return asked


@pytest.fixture(autouse=True, params=[True, False], ids=["guards", "no-guards"])
def _with_and_without_guards(request, monkeypatch):
    """Operands are checked by what guards compiled graphs, or one by one where torch has no such thing."""
    if not request.param:
        monkeypatch.setattr(prepared, "_compiled_check", lambda *given: None)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def block(dtype=torch.float32, rows=(2, 3)):
    """x [*rows, 16], up, down, gate."""
    return [torch.randn(shape, dtype=dtype) for shape in ((*rows, 16), (32, 16), (16, 32), (32, 16))]


def test_as_many_calls_as_were_decided_and_the_reading_hears_of_them(asked):
    operands = block()
    for _ in range(7):
        ffn(*operands)
    assert asked.calls == 3
    assert asked.settled == [2, 2]


def test_a_reading_that_has_arrived_is_heard_of_at_once(asked):
    operands = block()
    ffn(*operands)
    asked.has_news = True
    ffn(*operands)
    assert asked.calls == 2


def test_a_reading_that_somebody_else_looked_at_is_heard_of(asked):
    operands = block()
    ffn(*operands)
    asked.version += 1
    ffn(*operands)
    assert asked.calls == 2


@pytest.mark.parametrize("plan", [Plan(path="dense"), None], ids=["dense", "auto"])
@pytest.mark.parametrize("rows", [(), (3,), (2, 3), (0, 3)])
def test_what_was_resolved_to_dense_is_not_resolved_again(monkeypatch, plan, rows):
    """Blocks as small as this one are never worth a sparse path."""
    operands = block(rows=rows)
    first = ffn(*operands, plan=plan)
    monkeypatch.setattr(functional, "_run", None)
    again = ffn(*operands, plan=plan)
    assert again.shape == operands[0].shape
    assert torch.equal(first, again)


def test_shapes_are_prepared_one_by_one(asked):
    x, up, down, gate = block(rows=(6,))
    for _ in range(3):
        ffn(x, up, down, gate)
        ffn(x[:5], up, down, gate)
    assert asked.calls == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(6,), (2, 3)])
@every_activation()
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

    def environment():
        monkeypatch.setenv("TWELL_PLAN", "auto")
        ffn(x, up, down, gate)
        monkeypatch.delenv("TWELL_PLAN")

    others = (
        lambda: ffn(x[:1], up, down, gate),
        lambda: ffn(x, up, down, gate, activation="relu2"),
        lambda: ffn(x, up, down, gate, activation="drelu"),
        lambda: ffn(x, up, down, gate, plan=Plan()),
        lambda: ffn(x, up, down, gate, down_bias=bias),
        lambda: ffn(x, up, down),
        lambda: ffn(x, up, down, gate.clone()),
        lambda: ffn(x.double(), up.double(), down.double(), gate.double()),
        lambda: ffn_with_stats(x, up, down, gate),
        autocast,
        environment,
    )
    for other in others:
        layer_of(gate).prepared.clear()
        ffn(x, up, down, gate)
        before = asked.calls
        other()
        assert asked.calls == before + 1, other


def test_what_does_not_last_or_is_recorded_prepares_nothing(asked):
    x, up, down, gate = block()
    for _ in range(4):
        ffn_with_stats(x, up, down, gate)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ffn(x, up, down, gate)
    assert asked.calls == 8
    assert not layer_of(gate).prepared


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


def test_a_layer_elsewhere_in_memory_computes_with_what_it_holds(asked):
    """Moved, re-laid or loaded weights stay the same object; nothing prepared remembers their address."""
    x, up, down, gate = block()
    ffn(x, up, down, gate)
    down.data = down.mT.contiguous().mT.mul(2)
    up.data = up.clone()
    torch.testing.assert_close(ffn(x, up, down, gate), stock_dense(x, up, down, gate))
    assert asked.calls == 2  # of other strides
    up.data, down.data = up * 2, (down.mT * 2).mT
    torch.testing.assert_close(ffn(x, up, down, gate), stock_dense(x, up, down, gate))
    assert asked.calls == 2
    for tensor in (up, down, gate):
        tensor.data = tensor.double()
    torch.testing.assert_close(ffn(x.double(), up, down, gate), stock_dense(x.double(), up, down, gate))
    assert asked.calls == 3


def test_a_freed_layer_is_forgotten(asked):
    x, up, down, gate = block()
    ffn(x, up, down, gate)
    state = weakref.ref(layer_of(gate))
    del gate
    gc.collect()
    assert state() is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_and_checkpoints_after_prepared_calls(asked, reentrant):
    """Square, so that operands in another order would not be noticed by their shapes."""
    torch.manual_seed(0)
    mlp = SparseMLP(16, 16)
    x = torch.randn(16, 16)
    mlp(x)
    mlp(x)
    assert asked.calls == 1
    assert mlp._layer.prepared  # one call is left, which training must not take
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


def test_transforms_do_not_repeat(asked):
    x, up, down, gate = block(rows=(3,))
    expected = ffn(x, up, down, gate)
    (prepared,) = layer_of(gate).prepared.values()
    found = torch.func.vmap(lambda up: ffn(x, up, down, gate))(up[None])[0]
    torch.testing.assert_close(found, expected)
    _, tangent = torch.func.jvp(lambda x: ffn(x, up, down, gate), (x,), (torch.ones_like(x),))
    assert tangent.abs().sum() > 0
    assert prepared._left == 2
    assert asked.calls == 1  # transforms run dense before anything is decided


def test_tracing_does_not_ask(asked, monkeypatch):
    mlp = SparseMLP(16, 32, plan=Plan(path="row")).requires_grad_(False)
    monkeypatch.setattr(functional, "_repeated", lambda *call: pytest.fail("asked while tracing"))
    program = torch.export.export(mlp, (torch.randn(3, 16),))
    assert any("twell.ffn" in str(node.target) for node in program.graph.nodes)


def test_more_takers_than_calls_end_it(asked):
    """Two threads may both take the last call; the next one asks again."""
    operands = block()
    ffn(*operands)
    (prepared,) = layer_of(operands[3]).prepared.values()
    prepared._left = -1
    ffn(*operands)
    assert asked.calls == 2


def test_shapes_are_given_up_rather_than_piled_up(asked, monkeypatch):
    monkeypatch.setattr(layer_state, "_MOST_PREPARED", 4)
    x, up, down, gate = block(rows=(9,))
    for tokens in range(1, 10):
        ffn(x[:tokens], up, down, gate)
    assert len(layer_of(gate).prepared) <= 4
    assert asked.settled == [0] * (9 - len(layer_of(gate).prepared))


def test_what_is_prepared_does_not_outlive_a_change_of_hooks(asked):
    """A checkpoint wants the same tensors saved when it computes again: it must not repeat another."""
    with torch.enable_grad():
        operands = [tensor.requires_grad_() for tensor in block()]
        ffn(*operands)
        with torch.autograd.graph.save_on_cpu():
            ffn(*operands)
        assert asked.calls == 1  # no matter where it is kept meanwhile
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            ffn(*operands)
        assert asked.calls == 2


def test_other_devices_layouts_and_threads_are_asked_about(monkeypatch):
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
    monkeypatch.setattr(
        functional, "_resolve_constant", lambda *call: resolved.append(call) or ("dense", 0, "dense", "")
    )
    try:
        torch.set_num_threads(threads + 1)
        ffn(x, up, down, gate)
    finally:
        torch.set_num_threads(threads)
    assert len(resolved) == 1


class OnlyLinear(torch.Tensor):
    """A weight that knows F.linear and what it looks like, as quantised ones do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        looks = ("__get__", "dim", "is_contiguous", "size", "stride", "numel")
        if func is not torch.nn.functional.linear and func.__name__ not in looks:
            raise NotImplementedError(f"OnlyLinear does not know {func.__name__}")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})


def test_weights_of_another_type_are_asked_about(cpu_choices):
    """After a call with plain ones of the same shapes; products that took another form than F.linear."""
    cpu_choices.form_gain = 2.0
    mlp, x = SparseMLP(256, 1024).requires_grad_(False), torch.randn(1, 256)
    mlp(x)
    expected = mlp(x)
    for projection in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        projection._parameters["weight"] = projection.weight.data.as_subclass(OnlyLinear)
    torch.testing.assert_close(mlp(x), expected, rtol=1e-4, atol=1e-5)


def test_who_watches_operations_sees_them(asked):
    operands = block()
    ffn(*operands)
    with FlopCounterMode(display=False) as counter:
        ffn(*operands)
    assert counter.get_total_flops() > 0
    assert asked.calls == 1  # nor is one of the prepared calls taken
    (prepared,) = layer_of(operands[3]).prepared.values()
    assert prepared._left == 2


def test_tangents_are_not_lost(asked):
    x, up, down, gate = block(rows=(3,))
    ffn(x, up, down, gate)
    with forward_ad.dual_level():
        y = ffn(forward_ad.make_dual(x, torch.ones_like(x)), up, down, gate)
        assert forward_ad.unpack_dual(y).tangent.abs().sum() > 0


def test_meta_tensors_again_and_again():
    mlp = SparseMLP(16, 32, device="meta")
    for _ in range(3):
        assert mlp(torch.empty(3, 16, device="meta")).shape == (3, 16)
