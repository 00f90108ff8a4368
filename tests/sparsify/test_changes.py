"""Nothing is taken for granted: calls and changes from outside of the code that was understood."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from twell import sparsify_

from .stock_blocks import ROW, D, Gated, H, Layer, Pair, Plain, model_of, multiply, paths


def test_projections_called_by_others_compute_themselves():
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


def test_and_compiled_ones(fresh_compiler):
    model, hidden = model_of(Layer()).eval(), torch.randn(2, 3, H)
    wanted = model[0].act(hidden), model[0].fc2(hidden)
    sparsify_(model, plan=ROW)
    for call, right in zip((model[0].act, model[0].fc2), wanted, strict=True):
        compiled = torch.compile(lambda h, call=call: call(h), backend="eager")
        torch.testing.assert_close(compiled(hidden), right)


def test_a_compiled_projection_alone(fresh_compiler):
    model, x = model_of(Layer()).eval(), torch.randn(2, 3, D)
    wanted = model(x)
    sparsify_(model, plan=ROW)
    model[0].fc1.compile(backend="eager")
    torch.testing.assert_close(model(x), wanted)


def test_an_error_in_between_leaves_nothing_behind(monkeypatch):
    model, x = model_of(Layer()).eval(), torch.randn(2, 3, D)
    wanted = model(x)
    sparsify_(model, plan=ROW)
    with monkeypatch.context() as patch:
        patch.setattr("torch.nn.functional.dropout", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x)
    torch.testing.assert_close(model(x), wanted)


def test_a_patched_forward_runs_as_it_is():
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


def test_what_super_getattr_and_closures_use():
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


def test_projections_shared_by_two_layers():
    first, second = Layer(), Layer()
    second.fc1 = first.fc1
    model, x = model_of(first, second).eval(), torch.randn(2, 3, D)
    wanted = model(x)
    sparsify_(model, plan=ROW)
    torch.testing.assert_close(model(x), wanted)


def test_an_activation_shared_by_two_layers():
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
def test_activations_with_more_than_a_function(activation):
    layer = Layer()
    layer.act = activation
    assert not sparsify_(layer).blocks


def test_monte_carlo_dropout():
    model, x = model_of(Plain(nn.ReLU(), inner=nn.Dropout(0.5))).eval(), torch.randn(2, 3, D)
    sparsify_(model, plan=ROW)
    model[0].inner.train()
    assert not torch.equal(model(x), model(x))


def test_other_dropouts_run_in_training():
    block = Plain(nn.ReLU(), inner=nn.Sequential(nn.Dropout(0.0), nn.AlphaDropout(0.5)))
    model, x = model_of(block).train(), torch.randn(2, 3, D)
    sparsify_(model, plan=ROW)
    assert not torch.equal(model(x), model(x))


def test_a_replaced_hooked_or_changed_activation_counts():
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


def test_code_that_keeps_values_or_looks_at_shapes():
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
def test_settings_that_change_later(own):
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


def test_hooks_of_all_modules():
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


def test_shallow_copies_run_their_own_modules():
    block, x = Gated(multiply).eval(), torch.randn(2, 3, D)
    sparsify_(block, plan=ROW)
    other = copy.copy(block)
    other._modules = dict(block._modules)
    other.a = nn.Linear(D, H, bias=False)
    torch.testing.assert_close(other(x), other.c(multiply(other.a(x), other.b(x))))
