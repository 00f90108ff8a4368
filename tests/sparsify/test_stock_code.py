"""Blocks in the code of layers: what may stand around and between their projections, and what may not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import twell

PLAN = twell.Plan.parse("row")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.fc1, self.act, self.fc2 = nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8)
        self.dropout = nn.Dropout(0.1)


class CalledTwice(Layer):
    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.act(self.fc1(self.norm(x)))
        x = x + self.fc2(hidden)
        other = self.act(self.fc1(self.norm(other)))
        other = self.fc2(other)
        return x, other


class CalledOtherwise(Layer):
    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.act(self.fc1(self.norm(x)))
        x = x + self.fc2(hidden)
        return x, self.fc1(self.norm(other))


class SharedDropout(Layer):
    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.dropout(self.act(self.fc1(self.norm(x))))
        return x + self.dropout(self.fc2(hidden)), other


class NormFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dense, self.act = nn.LayerNorm(8), nn.Linear(8, 24), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = self.dense(x)
        return self.act(x)


class NormLast(NormFirst):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.dense(self.norm(x)))
        return self.last(x)


class SometimesElse(NormFirst):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 100:
            return x.repeat(1, 3)
        x = self.norm(x)
        return self.act(self.dense(x))


class TwoProjections(nn.Module):
    """MobileBERT's output: one projection reads the hidden values, another one what comes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.more = nn.Linear(24, 8), nn.Linear(8, 8)

    def forward(self, hidden: Tensor, x: Tensor, other: Tensor) -> Tensor:
        hidden = self.dense(hidden)
        return self.more(hidden + x) + other


class ReadsTwice(TwoProjections):
    def forward(self, hidden: Tensor, x: Tensor, other: Tensor) -> Tensor:
        result = self.dense(hidden)
        return self.more(result + x) + other + hidden.mean()


class Around(nn.Module):
    def __init__(self, intermediate: nn.Module, output: nn.Module) -> None:
        super().__init__()
        self.intermediate, self.output = intermediate, output

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.intermediate(x)
        return self.output(hidden, x, other), other


def run(model: nn.Module) -> tuple[list[str], tuple[Tensor, ...]]:
    """Paths that blocks took, and the output."""
    generator = torch.Generator().manual_seed(0)
    inputs = (torch.randn(5, 8, generator=generator) for _ in range(2))
    with torch.no_grad(), twell.recorded_paths() as ran:
        output = model(*inputs)
    return [piece.path for piece in ran], output


@pytest.mark.parametrize(
    ("make", "calls"),
    [
        (CalledTwice, 2),
        (SharedDropout, 1),
        (lambda: Around(NormFirst(), TwoProjections()), 1),
    ],
)
def test_blocks_in_code_run_sparse(make, calls):
    model = make().eval()
    wanted = run(model)[1]
    assert len(twell.sparsify_(model, plan=PLAN).blocks) == 1
    paths, output = run(model)
    assert paths == ["row"] * calls
    torch.testing.assert_close(output, wanted)
    assert twell.densify_(model) == 1
    assert all(map(torch.equal, run(model)[1], wanted))


@pytest.mark.parametrize(
    "make",
    [
        CalledOtherwise,
        lambda: Around(NormLast(), TwoProjections()),
        lambda: Around(SometimesElse(), TwoProjections()),
        lambda: Around(NormFirst(), ReadsTwice()),
    ],
)
def test_other_code_stays_stock(make):
    model = make().eval()
    wanted = run(model)[1]
    assert not twell.sparsify_(model, plan=PLAN).blocks
    assert all(map(torch.equal, run(model)[1], wanted))


@pytest.mark.parametrize("name", ["intermediate", "output"])
def test_hooks_on_the_way_see_stock_values(name):
    model = Around(NormFirst(), TwoProjections()).eval()
    twell.sparsify_(model, plan=PLAN)
    shapes = []
    module = model.get_submodule(name)
    module.register_forward_hook(lambda _module, given, result: shapes.append((given[0].shape, result.shape)))
    paths, _output = run(model)
    assert paths == []
    assert shapes == [((5, 8), (5, 24)) if name == "intermediate" else ((5, 24), (5, 8))]


def test_training_with_a_dropout_between_runs_stock():
    model = SharedDropout().train()
    twell.sparsify_(model, plan=PLAN)
    assert run(model)[0] == []
    model.dropout.p = 0.0
    assert run(model)[0] == ["row"]
