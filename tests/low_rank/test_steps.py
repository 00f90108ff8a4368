"""LoRA on sparse blocks: outputs and gradients are those of peft's own forward and backward."""

from __future__ import annotations

import copy
import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import twell
from twell import low_rank, policy

from ..accuracy import assert_accurate
from .adapted import (
    ALL,
    HIDDEN,
    adapted,
    as_peft,
    assert_same,
    inputs,
    is_sparse,
    mlp_of,
    paths_of,
    step,
    two_adapters,
)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("targets", [ALL, ("up_proj",), ("gate_proj", "down_proj"), ("down_proj",)])
@pytest.mark.parametrize("leading", [(2, 9), (1,)])
def test_as_peft(gated, targets, leading):
    model = adapted(targets, gated, options={"bias": True})
    with twell.recorded_paths() as paths:
        found = step(model, inputs(*leading))
    assert paths[0].path == "row"
    assert_same(found, step(as_peft(model), inputs(*leading)))


@pytest.mark.parametrize(
    "lora",
    [
        {"use_rslora": True},
        {"bias": "all"},
        {"bias": "lora_only"},
        {"lora_bias": True},
        {"r": 1},
        {"rank_pattern": {"up_proj": 40}},
        {"lora_dropout": 0.5},  # in evaluation
    ],
    ids=str,
)
@pytest.mark.parametrize("activation", ["relu", "relu2", "fatrelu(0.1)", "drelu"])
def test_kinds_of_lora(lora, activation):
    model = adapted(options={"bias": True, "activation": activation}, **lora).eval()
    assert is_sparse(model)
    assert_same(step(model, inputs(7)), step(as_peft(model), inputs(7)))


def test_sparse_backward(monkeypatch):
    """On active pairs, with few of them."""
    monkeypatch.setattr(policy.cpu, "_WORTH_LOOKING_SECONDS", 0.0)
    monkeypatch.setattr(policy.cpu, "_MIN_HIDDEN", 1)
    model = adapted(options={"bias": True})
    mlp_of(model).gate_proj.base_layer.bias.data -= 2.5
    with twell.recorded_paths() as paths:
        found = step(model, inputs(64))
    assert [(ran.phase, ran.path) for ran in paths] == [("forward", "row"), ("backward", "row")]
    assert_same(found, step(as_peft(model), inputs(64)))


@pytest.mark.parametrize("adapters", ["float32", "bfloat16"])
@pytest.mark.parametrize("gated", [True, False])
def test_bfloat16(adapters, gated):
    model = adapted(gated=gated, dtype=torch.bfloat16, autocast_adapter_dtype=adapters == "float32")
    assert mlp_of(model).up_proj.lora_A["default"].weight.dtype == getattr(torch, adapters)
    x = inputs(64, dtype=torch.bfloat16)
    found, stock = step(model, x), step(as_peft(model), x)
    exact = step(as_peft(model).double(), x.double())
    assert paths_of(model, x) == ["row"]
    for name, value in found.items():
        assert_accurate(value, exact[name], stock[name], name)


def test_autocast():
    model = adapted()
    x = inputs(64)
    with torch.autocast("cpu", torch.bfloat16):
        found, stock = step(model, x), step(as_peft(model), x)
    exact = step(as_peft(model).double(), x.double())
    for name, value in found.items():
        assert_accurate(value, exact[name], stock[name], name)


def test_statistics():
    model = adapted(options={"record": True})
    twin = as_peft(model)
    model(inputs(9)), twin(inputs(9))
    stats, expected = mlp_of(model).last_stats, mlp_of(twin).last_stats
    torch.testing.assert_close(stats.l1, expected.l1)
    assert stats.firing.tolist() == expected.firing.tolist()


@pytest.mark.parametrize("lora", [{"lora_dropout": 0.5}, {"use_dora": True}], ids=str)
def test_left_to_peft(lora):
    model = adapted(**lora).train()
    assert paths_of(model, inputs(5)) == []
    assert "lora" in mlp_of(model)._layer.ran["forward"].reason.lower()
    twin = as_peft(model)
    torch.manual_seed(1)
    found = step(model, inputs(5))
    torch.manual_seed(1)
    assert_same(found, step(twin, inputs(5)))


def test_dense_steps_are_left_to_peft():
    """They compute the gradients of adapters alone."""
    model = adapted(options={"plan": None, "bias": True})
    with twell.recorded_paths() as paths:
        found = step(model, inputs(5))
    assert not paths
    assert_same(found, step(as_peft(model), inputs(5)))
    assert mlp_of(model)._layer.ran["forward"].path == "dense"


def test_trained_base_is_left_to_peft():
    model = adapted()
    mlp_of(model).down_proj.base_layer.weight.requires_grad_()
    assert not is_sparse(model)
    assert_same(step(model, inputs(5)), step(as_peft(model), inputs(5)))


@pytest.mark.parametrize("place", ["up_proj", "up_proj.base_layer", "up_proj.lora_A.default"])
def test_hooks_are_called(place):
    model, called = adapted(), []
    mlp_of(model).get_submodule(place).register_forward_hook(lambda *_: called.append(1))
    step(model, inputs(5))
    assert called == [1]


def test_other_adapters_before_the_backward():
    """As preference training calls a model: policy, then reference, then the policy's backward."""
    model = two_adapters()
    twin = as_peft(model)

    def both_ways(model):
        model.zero_grad()
        model.set_adapter("default")
        y = model(inputs(5))
        with torch.no_grad(), model.disable_adapter():
            base = model(inputs(5))
        model.set_adapter("other")
        with torch.no_grad():
            other = model(inputs(5))
        model.set_adapter("default")
        (y * other * base).sum().backward()
        return {"other": other, "base": base} | {n: p.grad for n, p in model.named_parameters()}

    for _ in range(2):
        assert_same(both_ways(model), both_ways(twin))
    assert is_sparse(model)


def test_changed_between_two_backwards():
    model = adapted()
    y = model(inputs(5)).sum()
    y.backward(retain_graph=True)
    with torch.no_grad():
        mlp_of(model).up_proj.lora_B["default"].weight.mul_(2)
    model(inputs(5))
    with pytest.raises(RuntimeError, match="changed"):
        y.backward()


def test_changed_without_a_version():
    """As optimisers do that write through pointers."""
    model = adapted()
    model(inputs(5))
    for name in ALL:
        mlp_of(model).get_submodule(name).lora_B["default"].weight.data.mul_(-3)
        mlp_of(model).get_submodule(name).lora_A["default"].weight.data.mul_(0.5)
    assert_same(step(model, inputs(5)), step(as_peft(model), inputs(5)))


def test_training():
    model = adapted()
    twin = as_peft(model)
    for one in (model, twin):
        optimizer = torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=1e-2)
        for seed in range(6):
            torch.manual_seed(seed)
            loss = one(torch.randn(9, HIDDEN)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.model, x, use_reentrant=reentrant)

    model = adapted()
    assert_same(step(Checkpointed(model), inputs(5)), step(Checkpointed(as_peft(model)), inputs(5)))


def test_frozen_adapters():
    model = adapted().requires_grad_(False)
    assert_same(step(model, inputs(5)), step(as_peft(model), inputs(5)))
    y = model(inputs(5).requires_grad_())
    with torch.no_grad():
        mlp_of(model).up_proj.lora_B["default"].weight.mul_(2)
    assert not is_sparse(model)  # the graph of y still reads what was there
    y.sum().backward()
    assert is_sparse(model)


def test_only_what_is_trained_has_gradients():
    model = adapted()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("up_proj.lora_B" in name)
    found = step(model, inputs(5))
    assert sum("lora" in name for name in found) == 1
    assert_same(found, step(as_peft(model), inputs(5)))
    y = model(inputs(5))  # x needs none
    y.sum().backward()


def test_second_derivatives():
    model = adapted(options={"activation": "relu2"}).double()
    twin = as_peft(model)

    def second(model):
        x = inputs(3, dtype=torch.float64).requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        trained = [p for p in model.parameters() if p.requires_grad]
        return dict(enumerate(torch.autograd.grad(grad.square().sum(), trained)))

    assert_same(second(model), second(twin))


def test_compiled(fresh_compiler):
    model = adapted()
    model(inputs(5))
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    torch.testing.assert_close(compiled(inputs(5)), as_peft(model)(inputs(5)))


def test_other_wrappers_run_themselves():
    model = adapted()
    mlp = mlp_of(model)
    mlp.up_proj = nn.Sequential(mlp.up_proj)
    assert not is_sparse(model)


def test_threads_that_call_first(monkeypatch):
    """One makes room for the adapters, the others wait for it: no one reads what is half written."""
    clear, turn = low_rank._Side.clear, itertools.count()

    def slow_clear(side):
        time.sleep(0.01 * next(turn))  # some are done when others begin
        clear(side)
        time.sleep(0.02)

    monkeypatch.setattr(low_rank._Side, "clear", slow_clear)
    model = adapted().eval()
    expected = as_peft(model)
    batches = [inputs(n) for n in range(1, 9)]

    def calls(x):
        with torch.no_grad():
            return [model(x) for _ in range(20)]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(calls, batches))
    for x, outputs in zip(batches, found, strict=True):
        for y in outputs:
            torch.testing.assert_close(y, expected(x), rtol=1e-4, atol=1e-4)
