"""Code that does something else with some values is refused: large, tiny, infinite or NaN."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from twell import sparsify_

from .stock_blocks import ROW, D, First, Gated, Last, Layer, Pair, Plain, model_of, paths

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


class Block(Plain):
    """after: what happens to the result; before: to the input."""

    def __init__(self, after=lambda y, x: y, before=lambda x: x, activation=torch.relu):
        super().__init__(activation)
        self.after, self.before = after, before

    def forward(self, x):
        return self.after(self.two(self.f(self.one(self.before(x)))), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "block",
    [
        Block(after=lambda y, x: y + 0 * x.max()),
        Block(after=lambda y, x: y + (x.max() > 1e4)),
        Block(after=lambda y, x: torch.where(x.abs() > 1e4, 0.0, y)),
        Block(after=lambda y, x: torch.where(x.abs() < 1e-4, 0.0, y)),
        Block(after=lambda y, x: y.clamp(-6e4, 6e4)),
        Block(after=lambda y, x: y.nan_to_num()),
        Block(before=lambda x: x.clamp(-6e4, 6e4)),
        Block(before=lambda x: x.nan_to_num(posinf=math.inf, neginf=-math.inf)),
        Block(activation=lambda h: torch.relu(h).clamp(max=6e4)),
        Block(activation=lambda h: torch.relu(h).clamp(max=torch.finfo(h.dtype).max)),
        Gated(lambda a, b: torch.relu(a) * b.clamp(-6e4, 6e4)),
        Gated(lambda a, b: torch.relu(a) * b.nan_to_num()),
        Gated(lambda a, b: torch.relu(a) * b + 0 * b.max()),
    ],
)
def test_blocks(block, dtype):
    report = sparsify_(block.to(dtype))
    assert not report.blocks
    assert len(report.skipped) == 1


class Cleans(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return torch.nan_to_num(functional.relu(hidden), posinf=math.inf)


class Caps(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return functional.relu(hidden).clamp(max=torch.finfo(hidden.dtype).max)


@pytest.mark.parametrize("activation", [Cleans(), Caps()])
def test_activations(activation):
    layer = Layer()
    layer.act = activation
    assert not sparsify_(layer).blocks
    assert not sparsify_(Plain(activation)).blocks


class FirstAdds(First):
    def forward(self, hidden):
        return torch.relu(self.dense(hidden)) + 0 * hidden.max()


class FirstClamps(First):
    def forward(self, hidden):
        return torch.relu(self.dense(hidden.clamp(-6e4, 6e4)))


class LastAdds(Last):
    def forward(self, hidden, residual):
        return self.norm(self.dense(hidden) + residual) + 0 * hidden.max()


class LastCompares(Last):
    def forward(self, hidden, residual):
        return self.norm(self.dense(hidden) + residual) + (hidden.max() > 1e3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("first", "last"),
    [(FirstAdds(), None), (FirstClamps(), None), (None, LastAdds()), (None, LastCompares())],
)
def test_pairs(first, last, dtype):
    model = Pair(last)
    model.first = first or First()
    assert not sparsify_(model.to(dtype)).blocks


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e30, 1e-30])
def test_what_is_taken_computes_the_same(value):
    """On input with such a value: the same numbers, the same infinities, NaN where stock has NaN."""
    model, x = model_of().eval(), torch.randn(2, 3, D)
    wanted = model(x.index_fill(-1, torch.tensor([3]), value))
    assert len(sparsify_(model, plan=ROW).blocks) == 4
    found, ran = paths(model, x.index_fill(-1, torch.tensor([3]), value))
    assert ran == ["row"] * 4
    torch.testing.assert_close(found, wanted, equal_nan=True)


def test_code_that_reads_conditions_only_is_not_refused():
    class Asks(Plain):
        def forward(self, x):
            if self.training:
                x = x * 1
            return super().forward(x)

    assert sparsify_(Asks(nn.ReLU())).blocks
