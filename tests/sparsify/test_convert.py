"""Sparsified models behave as stock ones in everything but speed."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import twell
from twell import Plan, SparseMLP, densify_, recorded_paths, sparsify_
from twell.sparsify.blocks import named_blocks

from .test_recognition import D, Fused, Gated, H, Layer, Pair, Plain

ROW = Plan(path="row")


def halves(value):
    return value.chunk(2, -1)


def multiply(a, b):
    return torch.relu(a) * b


def model_of(*blocks):
    torch.manual_seed(0)
    return nn.Sequential(*(blocks or (Gated(multiply), Fused(halves), Layer(), Pair())))


def paths(model, x):
    with recorded_paths() as ran:
        y = model(x)
    return y, [piece.path for piece in ran]


def test_classes_keep_their_names_and_bases():
    model = model_of()
    before = [(type(module), type(module).__name__) for module in model.modules()]
    sparsify_(model)
    for module, (kind, name) in zip(model.modules(), before, strict=True):
        assert isinstance(module, kind) or kind is nn.ReLU  # an activation that is passed by
        assert type(module).__name__ == name or kind is nn.ReLU


def test_densify_restores_everything():
    model, x = model_of().eval(), torch.randn(2, 3, D)
    kinds, wanted = [type(module) for module in model.modules()], model(x)
    strides = {name: p.stride() for name, p in model.named_parameters()}
    attributes = [set(module.__dict__) for module in model.modules()]
    sparsify_(model)
    assert any(p.stride() != strides[name] for name, p in model.named_parameters())
    assert densify_(model) == 4
    assert [type(module) for module in model.modules()] == kinds
    assert [set(module.__dict__) for module in model.modules()] == attributes
    assert {name: p.stride() for name, p in model.named_parameters()} == strides
    assert torch.equal(model(x), wanted)
    assert not model[0].a._state_dict_hooks
    assert densify_(model) == 0


def test_twice_is_once():
    model = model_of()
    sparsify_(model)
    report = sparsify_(model)
    assert not report.blocks
    assert len(report.already) == 4
    assert {block.plan for _, block in named_blocks(model)} == {None}
    sparsify_(model, plan=ROW)
    assert {block.plan for _, block in named_blocks(model)} == {ROW}
    assert not sparsify_(nn.Sequential(SparseMLP(D, H))).blocks
    assert densify_(model) == 4


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_sparse_and_their_own(copied):
    model, x = model_of().eval(), torch.randn(2, 3, D)
    sparsify_(model, plan=ROW)
    other = copied(model)
    wanted, _ = paths(model, x)
    found, ran = paths(other, x)
    assert ran == ["row"] * 4
    assert torch.equal(found, wanted)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(other(x), wanted)
    assert densify_(other) == 4
    assert len(named_blocks(model)) == 4


@pytest.mark.parametrize(
    "name", ["0.a", "0.c", "2.fc1", "2.act", "2.fc2", "3.first", "3.last.dense", "3.first.dense"]
)
def test_hooks_are_called(name):
    """On a projection, or a module that a block passes by: then stock code runs."""
    model, x = model_of().eval(), torch.randn(2, 3, D)
    seen = []
    handle = model.get_submodule(name).register_forward_hook(lambda module, args, out: seen.append(out))
    wanted = model(x)
    handle.remove()
    sparsify_(model, plan=ROW)
    handle = model.get_submodule(name).register_forward_hook(lambda module, args, out: seen.append(out))
    found, ran = paths(model, x)
    assert ran == ["row"] * 3
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(seen[1], seen[0])
    handle.remove()
    assert paths(model, x)[1] == ["row"] * 4


@pytest.mark.parametrize("name", ["0.a", "2.fc1", "2.fc2", "3.last.dense"])
def test_a_replaced_projection_runs_itself(name):
    """As adapters and quantisation do it."""

    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) + 1

    model, x = model_of().eval(), torch.randn(2, 3, D)
    stock = copy.deepcopy(model)
    sparsify_(model, plan=ROW)
    for each in (model, stock):
        holder, _, child = name.rpartition(".")
        setattr(each.get_submodule(holder), child, Wrapped(each.get_submodule(name)))
    found, ran = paths(model, x)
    assert len(ran) == 3
    torch.testing.assert_close(found, stock(x))


@pytest.mark.parametrize(
    "block", [Layer(p=0.5), Plain(nn.ReLU(), inner=nn.Dropout(0.5)), Plain(nn.ReLU(), outer=nn.Dropout(0.5))]
)
def test_dropout_in_training_is_stocks(block):
    model, x = model_of(block), torch.randn(2, 3, D)
    stock = copy.deepcopy(model)
    assert len(sparsify_(model, plan=ROW).blocks) == 1
    torch.manual_seed(1)
    wanted = stock.train()(x)
    torch.manual_seed(1)
    found, ran = paths(model.train(), x)
    torch.testing.assert_close(found, wanted)
    assert not ran
    assert "dropout" in twell.explain(model)[0].reason
    found, ran = paths(model.eval(), x)
    assert ran == ["row"]
    torch.testing.assert_close(found, stock.eval()(x))


def test_a_dropout_that_is_turned_on_later():
    for block in (Layer(), Plain(nn.ReLU(), inner=nn.Dropout(0.0))):
        model, x = model_of(block), torch.randn(2, 3, D)
        sparsify_(model, plan=ROW)
        assert paths(model, x)[1] == ["row"]
        if isinstance(block, Layer):
            block.p = 0.5
        else:
            block.inner.p = 0.5
        assert paths(model, x)[1] == []


def test_values_that_change_on_the_way_are_noticed(monkeypatch):
    """Code that the search has not seen, patched in later."""
    model, x = model_of(Layer()), torch.randn(2, 3, D)
    sparsify_(model, plan=ROW)
    monkeypatch.setattr("torch.nn.functional.dropout", lambda x, **_: x * 2)
    with pytest.raises(RuntimeError, match="changed the values between"):
        model(x)
    monkeypatch.undo()
    assert paths(model, x)[1] == ["row"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype):
    model, x = model_of().eval(), torch.randn(2, 3, D, dtype=dtype)
    stock = copy.deepcopy(model).to(dtype)
    sparsify_(model, plan=ROW)
    model.to(dtype)
    found, ran = paths(model, x)
    assert ran == ["row"] * 4
    tolerance = 1e-9 if dtype == torch.float64 else 3e-2
    torch.testing.assert_close(found, stock(x), rtol=tolerance, atol=tolerance)


def test_a_threshold_is_trusted_in_its_own_dtype_only():
    model = model_of(Plain(nn.Threshold(0.1, 0.0)))
    sparsify_(model, plan=ROW)
    assert paths(model, torch.randn(3, D))[1] == ["row"]
    assert paths(model.double(), torch.randn(3, D).double())[1] == []
    assert "understood in torch.float32" in twell.explain(model)[0].reason


def test_autocast():
    model, x = model_of(Gated(multiply), Layer()).eval(), torch.randn(2, 3, D)
    stock = copy.deepcopy(model)
    sparsify_(model, plan=ROW)
    with torch.autocast("cpu", torch.bfloat16):
        found, ran = paths(model, x)
        wanted = stock(x)
    assert ran == ["row"] * 2
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=5e-2, atol=5e-2)


def test_mixed_dtypes_run_stock():
    class KeepsFloat(Plain):
        def forward(self, x):
            return self.two(self.f(self.one(x)).to(self.two.weight.dtype))

    model = model_of(KeepsFloat(nn.ReLU()))
    sparsify_(model, plan=ROW)
    model[0].one.bfloat16()
    found, ran = paths(model, torch.randn(3, D).bfloat16())
    assert found.dtype == torch.float32
    assert not ran


def test_threads():
    model = model_of().eval()
    stock = copy.deepcopy(model)
    sparsify_(model, plan=ROW)
    inputs = [torch.randn(n, 3, D) for n in range(1, 33)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(model, inputs))
    for y, x in zip(found, inputs, strict=True):
        torch.testing.assert_close(y, stock(x))


@pytest.mark.parametrize("training", [False, True])
def test_compiled(training, fresh_compiler):
    model, x = model_of(Gated(multiply), Layer(), Pair()).train(training), torch.randn(2, 3, D)
    stock = copy.deepcopy(model)
    sparsify_(model, plan=ROW)
    found = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    wanted = stock(x)
    torch.testing.assert_close(found, wanted)
    if training:
        found.square().sum().backward()
        wanted.square().sum().backward()
        for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_keyword_and_other_arguments():
    class Optional(Plain):
        def forward(self, y, scale=None):
            y = super().forward(y)
            return y if scale is None else y * scale

    model, x = Optional(nn.ReLU()).eval(), torch.randn(3, D)
    wanted, scaled = model(x), model(x, scale=2.0)
    sparsify_(model, plan=ROW)
    for call in (lambda: model(x), lambda: model(y=x)):
        with recorded_paths() as ran:
            torch.testing.assert_close(call(), wanted)
        assert len(ran) == 1
    torch.testing.assert_close(model(x, scale=2.0), scaled)


def test_filter_and_report():
    model = model_of(Gated(multiply), Plain(nn.GELU()), Layer())
    report = sparsify_(model, filter_fn=lambda name, module: not isinstance(module, Layer))
    assert [row.block for row in report.blocks] == ["0"]
    assert (report.blocks[0].hidden, report.blocks[0].neurons, report.blocks[0].activation) == (D, H, "relu")
    assert {skipped.name: skipped.reason.split(" (")[0] for skipped in report.skipped} == {
        "1": "the activation has no exact zeros",
        "2": "filter_fn left it out",
    }
    assert "a, b, c" in str(report)
    assert str(sparsify_(nn.Linear(2, 2))) == "no feed-forward block found"


def test_an_error_leaves_the_model_as_it_was(monkeypatch):
    model = model_of()
    kinds = [type(module) for module in model.modules()]
    strides = [p.stride() for p in model.parameters()]

    def fail(carrier):
        raise MemoryError

    monkeypatch.setattr("twell.sparsify.convert.install_carrier", fail)
    with pytest.raises(MemoryError):
        sparsify_(model)
    assert [type(module) for module in model.modules()] == kinds
    assert [p.stride() for p in model.parameters()] == strides


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3,), "model: got a int"),
        ((nn.Linear(2, 2).to("meta"),), "model: got parameters on the meta device"),
    ],
)
def test_bad_models(arguments, message):
    with pytest.raises(ValueError, match=message):
        sparsify_(*arguments)


def test_bad_options():
    with pytest.raises(ValueError, match="plan: got a str"):
        sparsify_(model_of(), plan="row")
    with pytest.raises(ValueError, match="filter_fn: got a int"):
        sparsify_(model_of(), filter_fn=3)
    with pytest.raises(ValueError, match="model: got a str"):
        densify_("model")


def test_hooked_parametrised_and_mixed_blocks_are_skipped():
    model = model_of(Gated(multiply), Gated(multiply), Gated(multiply), Gated(multiply))
    model[0].a.register_forward_hook(lambda *_: None)
    nn.utils.parametrizations.weight_norm(model[1].b)
    model[2].c.bfloat16()
    reasons = [skipped.reason for skipped in sparsify_(model).skipped]
    assert "hooks" in reasons[0]
    assert "dtypes" in reasons[-1]
    assert len(named_blocks(model)) == 1


def test_shared_weights_between_blocks():
    model, x = model_of(Gated(multiply), Gated(multiply)).eval(), torch.randn(3, D)
    for name in "abc":
        getattr(model[1], name).weight = getattr(model[0], name).weight
    wanted = model(x)
    sparsify_(model, plan=ROW)
    assert model[1].a.weight is model[0].a.weight
    found, ran = paths(model, x)
    assert ran == ["row"] * 2
    torch.testing.assert_close(found, wanted)


def test_statistics_of_stock_blocks():
    """What training and evaluation ask of a SparseMLP."""
    model, x = model_of(), torch.randn(2, 3, D)
    sparsify_(model)
    for _name, block in named_blocks(model):
        block.record = True
    model(x)
    for _name, block in named_blocks(model):
        assert block.last_stats.firing.shape == (H,)
        assert block.last_stats.l1.requires_grad


class TestNothingIsTakenForGranted:
    """What a hostile reader found: calls and changes from outside of the code that was understood."""

    def test_projections_called_by_others_compute_themselves(self):
        model, x = model_of(Layer(), Pair()).eval(), torch.randn(2, 3, D)
        stock = copy.deepcopy(model)
        sparsify_(model, plan=ROW)
        for name in ("0.fc1", "1.first", "1.first.dense"):
            found, wanted = model.get_submodule(name)(x), stock.get_submodule(name)(x)
            torch.testing.assert_close(found, wanted)
        hidden = torch.randn(2, 3, H)
        torch.testing.assert_close(model[0].fc2(hidden), stock[0].fc2(hidden))
        torch.testing.assert_close(model[0].act(hidden), stock[0].act(hidden))
        alone = copy.deepcopy(model[0].fc1)
        torch.testing.assert_close(alone(x), stock[0].fc1(x))
        assert paths(model, x)[1] == ["row"] * 2

    def test_and_compiled_ones(self, fresh_compiler):
        model, hidden = model_of(Layer()).eval(), torch.randn(2, 3, H)
        wanted = model[0].act(hidden), model[0].fc2(hidden)
        sparsify_(model, plan=ROW)
        for call, right in zip((model[0].act, model[0].fc2), wanted, strict=True):
            compiled = torch.compile(lambda h, call=call: call(h), backend="eager")
            torch.testing.assert_close(compiled(hidden), right)

    def test_a_compiled_projection_alone(self, fresh_compiler):
        model, x = model_of(Layer()).eval(), torch.randn(2, 3, D)
        wanted = model(x)
        sparsify_(model, plan=ROW)
        model[0].fc1.compile(backend="eager")
        torch.testing.assert_close(model(x), wanted)

    def test_an_error_in_between_leaves_nothing_behind(self, monkeypatch):
        model, x = model_of(Layer()).eval(), torch.randn(2, 3, D)
        wanted = model(x)
        sparsify_(model, plan=ROW)
        with monkeypatch.context() as patch:
            patch.setattr("torch.nn.functional.dropout", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(x)
        torch.testing.assert_close(model(x), wanted)

    def test_a_patched_forward_runs_as_it_is(self):
        def patched(self, x):
            hidden = self.fc1(self.norm(x))
            return x + self.fc2(self.act(hidden)) + hidden.mean()

        layer, x = Layer().eval(), torch.randn(2, 3, D)
        layer.forward = patched.__get__(layer)
        wanted = layer(x)
        assert not sparsify_(layer).blocks
        torch.testing.assert_close(layer(x), wanted)
        other = Layer().eval()
        sparsify_(other, plan=ROW)
        other.load_state_dict(layer.state_dict())
        other.forward = patched.__get__(other)
        torch.testing.assert_close(other(x), wanted)

    def test_what_super_getattr_and_closures_use(self):
        class Base(Layer):
            def extra(self, x):
                return self.fc1(x).mean()

        class Overridden(Base):
            def extra(self, x):
                return super().extra(x)

            def forward(self, x):
                y = self.fc2(self.act(self.fc1(self.norm(x))))
                return y + self.extra(x)

        class ByName(Layer):
            def forward(self, x):
                y = self.fc2(self.act(self.fc1(self.norm(x))))
                return y + getattr(self, "fc1")(x).mean()  # noqa: B009

        class Closure(Layer):
            def forward(self, x):
                mean = lambda: hidden.abs().mean()  # noqa: E731
                hidden = self.fc1(self.norm(x))
                y = self.fc2(self.act(hidden))
                return y + mean()

        for layer in (Overridden(), ByName(), Closure()):
            assert not sparsify_(layer).blocks

    def test_projections_shared_by_two_layers(self):
        first, second = Layer(), Layer()
        second.fc1 = first.fc1
        model, x = model_of(first, second).eval(), torch.randn(2, 3, D)
        wanted = model(x)
        sparsify_(model, plan=ROW)
        torch.testing.assert_close(model(x), wanted)

    def test_an_activation_shared_by_two_layers(self):
        first, second = Layer(), Layer()
        second.act = first.act
        model, x = model_of(first, second).eval(), torch.randn(2, 3, D)
        wanted = model(x)
        assert len(sparsify_(model, plan=ROW).blocks) == 2
        found, ran = paths(model, x)
        assert ran == ["row"] * 2
        torch.testing.assert_close(found, wanted)

    @pytest.mark.parametrize(
        "activation",
        [nn.Sequential(nn.ReLU(), nn.Dropout(0.5)), nn.RReLU(0.0, 0.5), nn.Sequential(nn.ReLU())],
    )
    def test_activations_with_more_than_a_function(self, activation):
        layer = Layer()
        layer.act = activation
        assert not sparsify_(layer).blocks

    def test_monte_carlo_dropout(self):
        model, x = model_of(Plain(nn.ReLU(), inner=nn.Dropout(0.5))).eval(), torch.randn(2, 3, D)
        sparsify_(model, plan=ROW)
        model[0].inner.train()
        assert not torch.equal(model(x), model(x))

    def test_other_dropouts_run_in_training(self):
        block = Plain(nn.ReLU(), inner=nn.Sequential(nn.Dropout(0.0), nn.AlphaDropout(0.5)))
        model, x = model_of(block).train(), torch.randn(2, 3, D)
        sparsify_(model, plan=ROW)
        assert not torch.equal(model(x), model(x))

    def test_a_replaced_hooked_or_changed_activation_counts(self):
        x = torch.randn(2, 3, D)
        for change in (
            lambda block: setattr(block, "f", nn.GELU()),
            lambda block: block.f.register_forward_hook(lambda *_: torch.zeros(2, 3, H)),
            lambda block: setattr(block.f, "threshold", 1.0),
        ):
            model = model_of(Plain(nn.Threshold(0.5, 0.0))).eval()
            stock = copy.deepcopy(model)
            sparsify_(model, plan=ROW)
            assert paths(model, x)[1] == ["row"]
            change(model[0])
            change(stock[0])
            torch.testing.assert_close(model(x), stock(x))

    def test_code_that_keeps_values_or_looks_at_shapes(self):
        class Keeps(Plain):
            def forward(self, y):
                hidden = self.f(self.one(y))
                self.aux = hidden.abs().mean()
                return self.two(hidden)

        class Looks(Plain):
            def forward(self, y):
                hidden = self.f(self.one(y))
                if y.shape[-2] > 6:
                    hidden = hidden - hidden.mean(-2, keepdim=True)
                return self.two(hidden)

        class Scales(Plain):
            def __init__(self):
                super().__init__(nn.ReLU())
                self.register_buffer("scale", torch.ones(()))

            def forward(self, y):
                return self.two(self.f(self.one(y) * self.scale))

        class Decides(Plain):
            def forward(self, y):
                hidden = self.one(y)
                return self.two(self.f(hidden) if y.abs().max() < 50 else hidden)

        for block in (Keeps(nn.ReLU()), Looks(nn.ReLU()), Scales(), Decides(nn.ReLU())):
            attributes = set(block.__dict__)
            assert not sparsify_(block).blocks
            assert set(block.__dict__) == attributes

    @pytest.mark.parametrize("own", [False, True])
    def test_settings_that_change_later(self, own):
        class Scaled(Plain):
            scale = 1.0

            def __init__(self):
                super().__init__(nn.ReLU())
                if own:
                    self.scale = 1.0

            def forward(self, y):
                return self.two(self.f(self.one(y) * self.scale))

        model, x = model_of(Scaled()).eval(), torch.randn(2, 3, D)
        stock = copy.deepcopy(model)
        sparsify_(model, plan=ROW)
        assert paths(model, x)[1] == ["row"]
        model[0].scale = stock[0].scale = 2.0
        torch.testing.assert_close(model(x), stock(x))

    def test_hooks_of_all_modules(self):
        model, x = model_of(Gated(multiply), Layer()).eval(), torch.randn(2, 3, D)
        stock = copy.deepcopy(model)
        sparsify_(model, plan=ROW)
        double = nn.modules.module.register_module_forward_hook(
            lambda module, args, y: y * 2 if isinstance(module, nn.Linear) else None
        )
        try:
            torch.testing.assert_close(model(x), stock(x))
        finally:
            double.remove()

    def test_shallow_copies_run_their_own_modules(self):
        block, x = Gated(multiply).eval(), torch.randn(2, 3, D)
        sparsify_(block, plan=ROW)
        other = copy.copy(block)
        other._modules = dict(block._modules)
        other.a = nn.Linear(D, H, bias=False)
        torch.testing.assert_close(other(x), other.c(multiply(other.a(x), other.b(x))))
