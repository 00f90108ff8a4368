"""Blocks with LoRA on their projections, and peft's own forward and backward to compare with."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import twell
from twell.nn import SparseMLP

peft = pytest.importorskip("peft")

HIDDEN, NEURONS = 48, 104
ALL = ("gate_proj", "up_proj", "down_proj")
ROW = twell.Plan.parse("row")


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.mlp = SparseMLP(HIDDEN, NEURONS, **{"plan": ROW} | options)

    def forward(self, x):
        return self.mlp(x)


def adapted(targets=ALL, gated=True, dtype=torch.float32, autocast_adapter_dtype=True, options=None, **lora):
    """A block with LoRA, whose B are not zero."""
    torch.manual_seed(0)
    model = Model(gated=gated, **options or {}).to(dtype)
    targets = [name for name in targets if gated or name != "gate_proj"]
    config = peft.LoraConfig(
        **{"r": 5, "lora_alpha": 12, "target_modules": targets, "init_lora_weights": False} | lora
    )
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=autocast_adapter_dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B.default.bias"):
            nn.init.normal_(parameter)
    return model


def mlp_of(model) -> SparseMLP:
    return model.base_model.model.mlp


def as_peft(model):
    """A copy that runs peft's own forward."""
    twin = copy.deepcopy(model)
    mlp_of(twin)._adapt = lambda x: "a test says so"
    return twin


def inputs(*leading, dtype=torch.float32, hidden=HIDDEN):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*leading, hidden, generator=generator).to(dtype)


def step(model, x, backward=True):
    """y, and the gradients of x and of every trained parameter, by name."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = model(x)
    found = {"y": y.detach()}
    if backward:
        y.backward(torch.linspace(-1, 2, y.numel()).view_as(y).to(y.dtype))
        found["x"] = x.grad
        found |= {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    return found


def assert_same(results, expected):
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            results[name], value, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def paths_of(model, x) -> list[str]:
    with twell.recorded_paths() as paths, torch.no_grad():
        model(x)
    return [ran.path for ran in paths]


def is_sparse(model) -> bool:
    return paths_of(model, inputs(6)) == ["row"]


def two_adapters():
    model = adapted(lora_alpha=7)
    config = peft.LoraConfig(r=11, target_modules=["up_proj", "down_proj"], init_lora_weights=False)
    model.add_adapter("other", config)
    return model
