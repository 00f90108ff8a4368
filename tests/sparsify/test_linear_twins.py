"""Subclasses of nn.Linear: the same product spelled out counts, everything else does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import twell

PLAN = twell.Plan.parse("row")


class SpelledOut(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        result = input @ self.weight.T
        if self.bias is None:
            return result
        return result + self.bias


class Shifted(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.T + 1e-9  # too small for whole numbers to show it


class Rounded(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input.round(), self.weight, self.bias)


class OtherWay(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight


class Hidden(nn.Linear):
    __call__ = lambda self, input: nn.Linear.__call__(self, 2 * input)  # noqa: E731

    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.T


def block(kind: type[nn.Linear], bias: bool = True) -> nn.Module:
    return nn.Sequential(kind(8, 24, bias=bias), nn.ReLU(), kind(24, 8, bias=bias)).eval()


@pytest.mark.parametrize("bias", [True, False])
def test_the_same_product_spelled_out_is_a_projection(bias):
    model, x = block(SpelledOut, bias), torch.randn(5, 8)
    wanted = model(x)
    report = twell.sparsify_(model, plan=PLAN)
    assert len(report.blocks) == 1
    with twell.recorded_paths() as ran:
        torch.testing.assert_close(model(x), wanted)
    assert [piece.path for piece in ran] == ["row"]
    twell.densify_(model)
    assert type(model[0]) is SpelledOut
    assert torch.equal(model(x), wanted)


@pytest.mark.parametrize("kind", [Shifted, Rounded, OtherWay, Hidden])
def test_other_subclasses_are_not(kind):
    assert not twell.sparsify_(block(kind)).blocks


def test_looking_leaves_the_random_state():
    model = block(type("Fresh", (SpelledOut,), {})), block(SpelledOut)
    before = torch.random.get_rng_state()
    for each in model:
        twell.sparsify_(each)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_class_that_is_patched_later(monkeypatch, fresh_compiler):
    model, x = block(SpelledOut), torch.randn(5, 8)
    twell.sparsify_(model, plan=PLAN)
    compiled = torch.compile(lambda x: model(x), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    monkeypatch.setattr(SpelledOut, "forward", lambda self, x: 2 * (x @ self.weight.T + self.bias))
    wanted = model[2](torch.relu(model[0](x)))
    with twell.recorded_paths() as ran:
        torch.testing.assert_close(model(x), wanted)
    assert not ran
    assert not twell.sparsify_(block(SpelledOut)).blocks
