"""`twell.ffn`: leading shapes, strides, autocast, gradients, torch.compile, opcheck, bad input."""

from __future__ import annotations

import warnings

import pytest
import torch

from twell import Plan, SparseMLP, ffn, ffn_with_stats, reference
from twell.synthetic import make_ffn

from .accuracy import assert_accurate, every_activation, stock_dense
from .backends import added, dense_backend

PLANS = [None, Plan(path="dense"), Plan(path="row"), Plan(path="block", block_rows=4)]
SPARSE_PLANS = PLANS[2:]
plan_ids = {"ids": lambda plan: "auto" if plan is None else plan.path}


def operands(tokens=6, hidden=16, neurons=32, nnz=6, **options):
    return make_ffn(tokens, hidden, neurons, nnz, **options).operands()


@pytest.mark.parametrize("plan", PLANS, **plan_ids)
@pytest.mark.parametrize("leading", [(), (1,), (2, 3), (2, 1, 3), (0,), (2, 0)])
def test_any_leading_shape(plan, leading):
    _, up, down, gate = operands()
    x = torch.randn(*leading, 16)
    y = ffn(x, up, down, gate, plan=plan)
    assert y.shape == x.shape
    assert_accurate(
        y, reference.ffn(x, up, down, gate, dtype=torch.float64).y, stock_dense(x, up, down, gate)
    )


@pytest.mark.parametrize("plan", PLANS, **plan_ids)
def test_non_contiguous_operands(plan):
    x, up, down, gate = operands(tokens=12)
    strided = (
        x.repeat_interleave(2, dim=1)[:, ::2],
        up.mT.contiguous().mT,
        down.repeat(1, 2)[:, :32],
        gate.flip(0).clone().flip(0)[:, :],
    )
    assert torch.allclose(ffn(*strided, plan=plan), ffn(x, up, down, gate), rtol=1e-5, atol=1e-6)
    three = x.view(3, 4, 16).transpose(0, 1)
    assert torch.allclose(
        ffn(three, up, down, gate, plan=plan),
        ffn(x, up, down, gate).view(3, 4, 16).transpose(0, 1),
        atol=1e-6,
    )


@pytest.mark.parametrize("plan", PLANS, **plan_ids)
def test_down_may_change_the_width(plan):
    x, up, _down, gate = operands()
    wide = torch.randn(24, 32)
    assert_accurate(
        ffn(x, up, wide, gate, plan=plan),
        reference.ffn(x, up, wide, gate, dtype=torch.float64).y,
        stock_dense(x, up, wide, gate),
    )


@pytest.mark.parametrize("plan", PLANS, **plan_ids)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(plan, dtype):
    x, up, down, gate = (t.requires_grad_() for t in operands(tokens=20))
    with torch.autocast("cpu", dtype=dtype):
        y = ffn(x, up, down, gate, plan=plan)
        stock = stock_dense(x, up, down, gate)
    assert_accurate(y, reference.ffn(x, up, down, gate, dtype=torch.float64).y, stock)
    y.float().sum().backward()
    assert x.grad.dtype == up.grad.dtype == torch.float32


class TestGradients:
    @pytest.mark.parametrize("plan", SPARSE_PLANS, **plan_ids)
    @every_activation(0.3)
    def test_gradcheck(self, plan, activation, gated):
        torch.manual_seed(0)  # an unlucky bias puts a pre-activation within a difference quotient of the kink
        x, up, down, gate = operands(tokens=3, hidden=8, neurons=16, gated=gated, dtype=torch.float64)
        biases = [torch.randn(16).double(), torch.randn(8).double(), torch.randn(16).double()]
        tensors = [x, up, down, *([gate] if gated else []), *(biases if gated else biases[:2])]
        tensors = [t.clone().requires_grad_() for t in tensors]

        def run(x, up, down, *rest):
            gate, rest = (rest[0], rest[1:]) if gated else (None, rest)
            names = ("up_bias", "down_bias", "gate_bias")[: len(rest)]
            y, stats = ffn_with_stats(
                x, up, down, gate, activation=activation, plan=plan, **dict(zip(names, rest, strict=True))
            )
            return y, stats.l1

        assert torch.autograd.gradcheck(run, tensors)

    @pytest.mark.parametrize("plan", PLANS, **plan_ids)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_every_named_gradient(self, plan, dtype):
        names = ("x", "up", "down", "gate")
        base = operands(tokens=40, hidden=32, neurons=64, nnz=10, dtype=dtype)
        seed = torch.randn(40, 32).to(dtype)

        def gradients(function, tensors):
            tensors = [t.clone().requires_grad_() for t in tensors]
            y = function(*tensors)
            return torch.autograd.grad(y, tensors, seed.to(y.dtype))

        ours = gradients(lambda *t: ffn(*t, plan=plan), base)
        stock = gradients(stock_dense, base)
        exact = gradients(lambda *t: reference.ffn(*t, dtype=torch.float64).y, [t.double() for t in base])
        for name, mine, theirs, true in zip(names, ours, stock, exact, strict=True):
            assert_accurate(mine, true, theirs, name)

    @every_activation(0.3)
    def test_infinite_gradients_are_masked_as_stock_masks_them(self, activation, gated):
        x, up, down, gate = operands(gated=gated)
        down[3, 5] = float("inf")

        def gradients(function):
            tensors = [t.clone().requires_grad_() for t in (x, up, down, gate) if t is not None]
            return torch.autograd.grad(function(*tensors).sum(), tensors)

        ours = gradients(lambda *t: ffn(*t, activation=activation, plan=Plan(path="row")))
        stock = gradients(lambda *t: stock_dense(*t, activation=activation))
        for mine, theirs in zip(ours, stock, strict=True):
            assert (mine.isnan() <= theirs.isnan()).all()

    @pytest.mark.parametrize("frozen", ["x", "up", "down", "gate"])
    def test_frozen_operands_get_no_gradient(self, frozen):
        tensors = dict(zip(("x", "up", "down", "gate"), operands(), strict=True))
        for name, tensor in tensors.items():
            tensor.requires_grad_(name != frozen)
        ffn(**tensors, plan=Plan(path="row")).sum().backward()  # sum: a zero-stride gradient
        for name, tensor in tensors.items():
            assert (tensor.grad is None) == (name == frozen)

    def test_l1_gradient_matches_the_oracle(self):
        tensors = [t.requires_grad_() for t in operands(dtype=torch.float64)]
        _, stats = ffn_with_stats(*tensors, plan=Plan(path="block"))
        ours = torch.autograd.grad(stats.l1, tensors[:2] + tensors[3:])
        exact = torch.autograd.grad(
            reference.ffn(*tensors, dtype=torch.float64).l1, tensors[:2] + tensors[3:]
        )
        for mine, true in zip(ours, exact, strict=True):
            torch.testing.assert_close(mine, true)


class TestTransforms:
    """The op has a reverse-mode rule only: forward mode and torch.func must not lose tangents."""

    @pytest.mark.parametrize("plan", PLANS, **plan_ids)
    def test_jvp(self, plan):
        x, up, down, gate = operands(dtype=torch.float64)
        tangent = torch.randn_like(x)
        ours = torch.func.jvp(lambda t: ffn(t, up, down, gate, plan=plan), (x,), (tangent,))
        stock = torch.func.jvp(lambda t: stock_dense(t, up, down, gate), (x,), (tangent,))
        torch.testing.assert_close(ours, stock)
        assert ours[1].abs().max() > 0

    def test_running_dense_is_said(self, caplog, monkeypatch):
        monkeypatch.setattr("twell._log._logged", set())
        x, *weights = operands()
        torch.func.jvp(lambda t: ffn(t, *weights), (x,), (x,))
        assert "inside a torch.func transform" in caplog.text

    @pytest.mark.parametrize("plan", PLANS, **plan_ids)
    def test_compiled_jvp(self, plan):
        x, up, down, gate = operands()
        tangent = torch.randn_like(x)

        def differentiate(function):
            return lambda x, t: torch.func.jvp(lambda x: function(x, up, down, gate), (x,), (t,))

        compiled = torch.compile(differentiate(lambda *t: ffn(*t, plan=plan)), backend="aot_eager")
        torch.testing.assert_close(compiled(x, tangent), differentiate(stock_dense)(x, tangent))

    @pytest.mark.parametrize("plan", PLANS, **plan_ids)
    def test_forward_ad(self, plan):
        x, up, down, gate = operands()
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            ours = torch.autograd.forward_ad.unpack_dual(ffn(dual, up, down, gate, plan=plan)).tangent
            stock = torch.autograd.forward_ad.unpack_dual(stock_dense(dual, up, down, gate)).tangent
        torch.testing.assert_close(ours, stock)

    @pytest.mark.parametrize("plan", [None, Plan(path="row")], **plan_ids)
    @pytest.mark.parametrize("inside", [True, False], ids=["level-inside", "level-outside"])
    def test_compiled_forward_ad(self, fresh_compiler, plan, inside):
        """The level entered by the compiled code itself, or around a graph compiled without one."""
        x, up, down, gate = operands()
        tangent = torch.ones_like(x)
        forward_ad = torch.autograd.forward_ad

        def differentiate(function, x, tangent):
            with forward_ad.dual_level():
                return forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))).tangent

        def block(x):
            return ffn(x, up, down, gate, plan=plan)

        if inside:
            found = torch.compile(lambda *t: differentiate(block, *t), backend="aot_eager")(x, tangent)
        else:
            compiled = torch.compile(block, backend="aot_eager")
            compiled(x)
            found = differentiate(compiled, x, tangent)
            torch.testing.assert_close(compiled(x), stock_dense(x, up, down, gate))
        torch.testing.assert_close(found, differentiate(lambda x: stock_dense(x, up, down, gate), x, tangent))

    @pytest.mark.parametrize("op", [torch.ops.twell.ffn, torch.ops.twell.ffn_train])
    def test_ops_refuse_tangents(self, op):
        x, *weights = operands()
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            with pytest.raises(ValueError, match="got a tangent"):
                op(dual, *weights, None, None, None, "relu", "row", 0, "cpu", False)
            op(x, *weights, None, None, None, "relu", "row", 0, "cpu", False)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_few_16_bit_tokens_without_16_bit_units(self, monkeypatch, dtype):
        """Dense products over such weights are sums of rows, which have neither tangent nor batching rule."""
        monkeypatch.setattr("twell.kernels.cpu.gemm.has_native_gemm", lambda dtype: False)
        x, up, down, gate = operands(dtype=dtype)
        down = down.mT.contiguous().mT
        forward_ad = torch.autograd.forward_ad
        with torch.no_grad(), forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            ours = forward_ad.unpack_dual(ffn(dual, up, down, gate)).tangent
            stock = forward_ad.unpack_dual(stock_dense(dual, up, down, gate)).tangent
        torch.testing.assert_close(ours, stock)
        with torch.no_grad():
            ours = torch.func.vmap(lambda x: ffn(x, up, down, gate))(x.unsqueeze(1))
        torch.testing.assert_close(ours.squeeze(1), stock_dense(x, up, down, gate))

    @pytest.mark.parametrize("plan", PLANS, **plan_ids)
    def test_per_sample_gradients(self, plan):
        x, up, down, gate = operands()

        def loss(up, sample):
            return ffn(sample, up, down, gate, plan=plan).square().sum()

        grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(up, x)
        total = torch.func.grad(lambda up: stock_dense(x, up, down, gate).square().sum())(up)
        torch.testing.assert_close(grads.sum(0), total, rtol=1e-4, atol=1e-5)


class TestRegisteredOp:
    def test_dispatch_modes_and_subclasses_see_it(self):
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.utils._python_dispatch import TorchDispatchMode

        class Seen(TorchDispatchMode):
            def __init__(self):
                super().__init__()
                self.ops = []

            def __torch_dispatch__(self, op, types, args=(), kwargs=None):
                self.ops.append(op)
                return op(*args, **(kwargs or {}))

        tensors = operands()
        with torch.no_grad():
            expected = ffn(*tensors, plan=Plan(path="row"))
            with Seen() as seen:
                observed = ffn(*tensors, plan=Plan(path="row"))
            assert seen.ops == [torch.ops.twell.ffn.default]
            assert torch.equal(observed, expected)
            mode = FakeTensorMode()
            fake = ffn(*map(mode.from_tensor, tensors), plan=Plan(path="row"))
        assert type(fake) is not torch.Tensor
        assert fake.shape == expected.shape

    @pytest.mark.parametrize("tokens", [1, 300, 20000])
    def test_fake_tensors_of_a_gpu_that_is_not_there(self, tokens):
        from torch._subclasses.fake_tensor import FakeTensorMode

        with torch.no_grad(), FakeTensorMode():
            options = {"device": "cuda", "dtype": torch.bfloat16}
            up, gate, rows = (torch.empty(5632, 2048, **options) for _ in range(3))
            y = ffn(torch.empty(tokens, 2048, **options), up, rows.mT, gate)
        assert (y.shape, y.device.type) == ((tokens, 2048), "cuda")

    @pytest.mark.parametrize("path", ["auto", "row", "block", "dense"])
    @pytest.mark.parametrize("record", [False, True])
    @pytest.mark.parametrize("trained", [False, True])
    @pytest.mark.parametrize("activation", ["fatrelu(0.1)", "drelu"])
    def test_opcheck(self, path, record, trained, activation):
        tensors = [t.requires_grad_(trained) for t in operands()]
        biases = [torch.randn(32), torch.randn(16), torch.randn(32)]
        arguments = (*tensors, *biases, activation, path, 0, "cpu", record)
        torch.library.opcheck(torch.ops.twell.ffn.default, arguments)

    def test_opcheck_non_gated(self):
        x, up, down, _ = operands(gated=False)
        arguments = (x, up, down, None, None, None, None, "relu", "row", 0, "cpu", True)
        torch.library.opcheck(torch.ops.twell.ffn.default, arguments)


class TestCompile:
    @pytest.mark.parametrize("plan", PLANS, **plan_ids)
    @pytest.mark.parametrize("trained", [False, True])
    def test_full_graph(self, plan, trained):
        tensors = [t.requires_grad_(trained) for t in operands()]
        compiled = torch.compile(
            lambda *t: ffn_with_stats(*t, plan=plan), fullgraph=True, backend="aot_eager"
        )
        y, stats = compiled(*tensors)
        torch.testing.assert_close(y, ffn(*tensors, plan=plan))
        assert stats.firing.sum() == ffn_with_stats(*tensors, plan=plan)[1].firing.sum()
        if trained:
            mine = torch.autograd.grad(y.sum() + stats.l1, tensors)
            eager_y, eager = ffn_with_stats(*tensors, plan=plan)
            torch.testing.assert_close(mine, torch.autograd.grad(eager_y.sum() + eager.l1, tensors))

    def test_inductor_with_dynamic_tokens(self):
        _, up, down, gate = operands()
        compiled = torch.compile(
            lambda x: ffn(x * 2, up, down, gate, plan=Plan(path="row")) + 1, fullgraph=True, dynamic=True
        )
        for tokens in (5, 9, 2):
            x = torch.randn(tokens, 16)
            torch.testing.assert_close(compiled(x), stock_dense(x * 2, up, down, gate) + 1)

    def test_fallback_is_logged_while_tracing(self, caplog):
        tensors = operands(dtype=torch.float64)  # a site no other test resolves with this plan
        with added(dense_backend("refuses", refusal=lambda site: "testing")):
            compiled = torch.compile(
                lambda *t: ffn(*t, plan=Plan(path="row", backend="refuses")), fullgraph=True, backend="eager"
            )
            torch.testing.assert_close(compiled(*tensors), stock_dense(*tensors))
        assert "backend 'refuses': testing" in caplog.text


def _bad(**changes):
    x, up, down, gate = operands()
    return {"x": x, "up": up, "down": down, "gate": gate, **changes}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (_bad(x=[1.0]), r"x: got a list; accepted: a floating-point torch.Tensor"),
        (_bad(x=torch.ones(3, 16, dtype=torch.int64)), r"x: got dtype torch.int64; accepted: torch.float32"),
        (_bad(x=torch.tensor(1.0)), r"x: got a 0-D tensor"),
        (_bad(up=None), r"up: got a NoneType"),
        (_bad(up=torch.randn(32, 15)), r"up: got shape \(32, 15\); accepted: \[H, D\] = \(any, 16\)"),
        (_bad(down=torch.randn(16, 31)), r"down: got shape \(16, 31\); accepted: \[D, H\] = \(any, 32\)"),
        (_bad(down=torch.randn(16)), r"down: got shape \(16,\)"),
        (_bad(gate=torch.randn(31, 16)), r"gate: got shape \(31, 16\); accepted: \[H, D\] = \(32, 16\)"),
        (_bad(up_bias=torch.randn(31)), r"up_bias: got shape \(31,\); accepted: \[H\] = \(32\)"),
        (_bad(gate_bias=torch.randn(1, 32)), r"gate_bias: got shape \(1, 32\)"),
        (_bad(down_bias=torch.randn(32)), r"down_bias: got shape \(32,\); accepted: \[D\] = \(16\)"),
        (_bad(gate=None, gate_bias=torch.randn(32)), r"gate_bias: got a tensor without a gate"),
        (_bad(gate=torch.randn(32, 16).double()), r"gate: got dtype torch.float64; accepted: torch.float32"),
        (_bad(down=torch.randn(16, 32, device="meta")), r"down: got device meta; accepted: cpu"),
        (_bad(x=torch.randn(6, 16).to_sparse()), r"x: got layout torch.sparse_coo; accepted: torch.strided"),
        (
            _bad(up=torch.randn(32, 16).to_sparse()),
            r"up: got layout torch.sparse_coo; accepted: torch.strided",
        ),
        (_bad(activation="silu"), r"activation: got 'silu'; accepted: 'relu' \| 'relu2'"),
        (_bad(activation="fatrelu(-1)"), r"activation"),
        (
            _bad(activation="drelu", gate=None),
            r"activation: got 'drelu' for a non-gated block; accepted: 'relu' \| 'relu2' \| 'fatrelu",
        ),
        (_bad(plan="row"), r"plan: got a str; accepted: a twell.Plan"),
    ],
)
def test_bad_input_names_argument_value_and_accepted(arguments, message):
    with pytest.raises(ValueError, match=message):
        ffn(**arguments)


@pytest.mark.parametrize("plan", [None, Plan(path="row")])
@pytest.mark.parametrize("leading", [(5,), (2, 5)])
def test_traced_by_jit(plan, leading):
    mlp = SparseMLP(32, 96, plan=plan).requires_grad_(False)
    x = torch.randn(*leading, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(mlp, (x,))
    for other in (x, torch.randn(*x.shape[:-2], 7, 32)):
        torch.testing.assert_close(traced(other), mlp(other))
