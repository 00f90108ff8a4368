"""Sparsified models behave as stock ones in everything but speed."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import twell
from twell import recorded_paths, sparsify_

from ..accuracy import assert_accurate
from .stock_blocks import ROW, D, Gated, Layer, Pair, Plain, model_of, multiply, paths


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
    model, x = model_of().eval(), torch.randn(2, 31, D, dtype=dtype)
    stock = copy.deepcopy(model).to(dtype)
    sparsify_(model, plan=ROW)
    model.to(dtype)
    found, ran = paths(model, x)
    assert ran == ["row"] * 4
    exact = copy.deepcopy(stock).double()(x.double())
    assert_accurate(found, exact, stock(x))


def test_a_threshold_is_trusted_in_its_own_dtype_only():
    model = model_of(Plain(nn.Threshold(0.1, 0.0)))
    sparsify_(model, plan=ROW)
    assert paths(model, torch.randn(3, D))[1] == ["row"]
    assert paths(model.double(), torch.randn(3, D).double())[1] == []
    assert "understood in torch.float32" in twell.explain(model)[0].reason


def test_autocast():
    model, x = model_of(Gated(multiply), Layer()).eval(), torch.randn(2, 31, D)
    stock = copy.deepcopy(model)
    sparsify_(model, plan=ROW)
    with torch.autocast("cpu", torch.bfloat16):
        found, ran = paths(model, x)
        wanted = stock(x)
    assert ran == ["row"] * 2
    assert_accurate(found, copy.deepcopy(stock).double()(x.double()), wanted)


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
