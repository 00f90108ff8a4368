"""Blocks are found by what their code does, whatever its names; what only looks like a block is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import twell
from twell import Plan, recorded_paths, sparsify_

from .stock_blocks import D, Fused, Gated, H, Last, Layer, Pair, Plain


def check_same(model, blocks=1, **options):
    """sparsify_ finds so many blocks, whose sparse paths give stock's outputs and gradients."""
    torch.manual_seed(0)
    model.double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 5, D, dtype=torch.float64, requires_grad=True)
    wanted = model(x)
    wanted.square().sum().backward()
    gradients = [p.grad.clone() for p in [x, *model.parameters()]]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = sparsify_(model, plan=Plan(path="row"), **options)
    assert len(report.blocks) == blocks
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(model.state_dict()[name], state[name]) for name in state)
    x.grad = None
    model.zero_grad()
    with recorded_paths() as ran:
        found = model(x)
    assert [piece.path for piece in ran] == ["row"] * blocks
    found.square().sum().backward()
    torch.testing.assert_close(found, wanted)
    for ours, stock in zip([x, *model.parameters()], gradients, strict=True):
        torch.testing.assert_close(ours.grad, stock)
    return report


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "combine",
    [
        lambda a, b: torch.relu(a) * b,
        lambda a, b: a * torch.relu(b),
        lambda a, b: functional.relu(a).square() * b,
        lambda a, b: functional.threshold(b, 0.5, 0.0) * a,
        lambda a, b: functional.relu(b - 0.5) * a,
    ],
)
def test_gated(combine, bias):
    check_same(Gated(combine, bias))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("combine", "projections", "spec"),
    [
        (lambda a, b: torch.relu(a) * torch.relu(b), "abc", "drelu"),
        (lambda a, b: b.clamp_min(0) * functional.relu(a), "abc", "drelu"),
        (lambda a, b: torch.where(b <= 0, 0, b).mul_(a.relu_()), "abc", "drelu"),
        (lambda a, b: torch.relu(a) * torch.relu(b - 0.5), "bac", "drelu of gate - 0.5"),
    ],
)
def test_drelu(combine, projections, spec, bias):
    """The first projection is the gate, unless the other one is shifted."""
    (block,) = check_same(Gated(combine, bias)).blocks
    assert (block.activation, block.projections) == (spec, tuple(projections))


@pytest.mark.parametrize("activation", [nn.ReLU(), torch.relu, lambda v: functional.relu(v - 0.25)])
def test_plain(activation):
    check_same(Plain(activation))


def test_nested_and_sequential():
    check_same(nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Sequential(nn.Linear(H, D))))
    check_same(nn.Sequential(Plain(nn.ReLU()), Gated(lambda a, b: torch.relu(a) * b)), blocks=2)


@pytest.mark.parametrize(
    "split",
    [
        lambda v: v.chunk(2, -1),
        lambda v: v.chunk(2, -1)[::-1],
        lambda v: (v[..., ::2], v[..., 1::2]),
        lambda v: (v[..., 1::2], v[..., ::2]),
    ],
)
@pytest.mark.parametrize("factor", [None, nn.ReLU()])
def test_gate_and_up_in_one_projection(split, factor):
    (block,) = check_same(Fused(split, factor)).blocks
    assert block.activation == ("relu" if factor is None else "drelu")


def test_projections_in_a_layer():
    report = check_same(nn.Sequential(Layer(), Layer()), blocks=2)
    assert report.blocks[0].projections == ("fc1", "fc2")
    assert report.blocks[1].block == "1"


def test_first_and_last_in_modules_of_their_own():
    check_same(Pair())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Gated(lambda a, b: functional.silu(a) * b), "no exact zeros"),
        (Gated(lambda a, b: torch.relu(a * b)), "applied to more than the gate"),
        (Gated(lambda a, b: torch.relu(a) * torch.relu(b) * 2), "none of relu"),
        (Gated(lambda a, b: torch.relu(a).square() * torch.relu(b)), "applied to more than the gate"),
        (Gated(lambda a, b: torch.relu(a) * functional.leaky_relu(b)), "applied to more than the gate"),
        (Gated(lambda a, b: torch.relu(a) * functional.threshold(b, 0.5, 0.0)), "more than the gate"),
        (Gated(lambda a, b: torch.relu(a) * functional.relu6(b)), "applied to more than the gate"),
        (Gated(lambda a, b: torch.relu(a - 0.5) * torch.relu(b - 0.5)), "none of relu"),
        (Gated(lambda a, b: torch.relu(a) * b.abs()), "applied to more than the gate"),
        (Gated(lambda a, b: torch.relu(a) + b), ""),
        (Gated(lambda a, b: torch.relu(a) * b.clamp(-7, 7)), ""),
        (Gated(lambda a, b: torch.relu(a) * b.clamp(-100, 100)), ""),
        (Gated(lambda a, b: torch.relu(a) * b * 2), "none of relu"),
        (Gated(lambda a, b: functional.normalize(torch.relu(a) * b)), ""),
        (Plain(nn.GELU()), "no exact zeros"),
        (Plain(nn.ReLU(), outer=nn.Tanh()), "not the result of its last projection"),
        (Plain(nn.ReLU(), inner=nn.LayerNorm(H)), "parameters besides"),
        (Plain(nn.ReLU(), inner=nn.Softmax(-1)), ""),
        (Plain(lambda v: torch.relu(v.flip(-1))), ""),
        (Plain(lambda v: torch.relu(v).cumsum(0)), ""),
    ],
)
def test_look_alikes_are_refused(model, reason):
    x = torch.randn(2, 3, D)
    wanted = model(x)
    report = sparsify_(model)
    assert not report.blocks
    assert len(report.skipped) == 1
    assert reason in report.skipped[0].reason
    assert torch.equal(model(x), wanted)


class ReadTwice(Layer):
    def forward(self, x):
        hidden = self.fc1(x)
        active = self.act(hidden)
        y = self.fc2(active)
        return y + hidden.mean()


class UsedTwice(Layer):
    def forward(self, x):
        x = self.act(self.norm(x))
        x = self.act(self.fc1(x))
        return self.fc2(x)


class InALoop(Layer):
    def forward(self, x):
        hidden = x
        for _ in range(2):
            inner = self.act(self.fc1(hidden))
            hidden = self.fc2(inner) + inner.mean()
        return self.norm(hidden)


class Chained(Layer):
    """Two projections with nothing between them."""

    def forward(self, x):
        return self.act(self.fc2(self.fc1(self.norm(x))))


class Clamped(Layer):
    def forward(self, x):
        x = self.act(self.fc1(self.norm(x)))
        x = x.clamp(max=1.0)
        return self.fc2(x)


class ChangedBetween(Layer):
    """The first projection's input changes in place before the last one runs."""

    def forward(self, x):
        x = self.norm(x)
        hidden = self.fc1(x)
        x += 1
        hidden = self.act(hidden)
        return self.fc2(hidden) + x


class LastLooksAgain(Last):
    def forward(self, hidden, residual):
        return self.norm(self.dense(hidden) + residual) + hidden.mean()


@pytest.mark.parametrize(
    "model",
    [ReadTwice(), UsedTwice(), InALoop(), Chained(), Clamped(), ChangedBetween(), Pair(LastLooksAgain())],
)
def test_layers_whose_values_go_elsewhere_are_refused(model):
    x = torch.randn(2, 3, D)
    wanted = model(x)
    assert not sparsify_(model).blocks
    assert torch.equal(model(x), wanted)


def test_a_module_that_draws_numbers_leaves_the_seed_alone():
    model = Plain(nn.ReLU(), inner=nn.Dropout(0.5))
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    sparsify_(model)
    assert torch.equal(torch.rand(3), wanted)


class Odd(nn.Module):
    """Uses the weights without calling the projections."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(D, H), nn.Linear(H, D), nn.Linear(D, H)

    def forward(self, x):
        gate = functional.linear(x, self.w1.weight, self.w1.bias).relu()
        return functional.linear(
            gate * functional.linear(x, self.w3.weight, self.w3.bias), self.w2.weight, self.w2.bias
        )


@pytest.fixture
def adapters(monkeypatch):
    monkeypatch.setattr("twell.sparsify.adapters._adapters", {})


@pytest.mark.usefixtures("adapters")
class TestAdapters:
    def test_described_blocks_run(self):
        assert not sparsify_(Odd()).blocks
        twell.register_adapter(Odd)(lambda module: twell.BlockDescription(gate="w1", up="w3", down="w2"))
        check_same(Odd())

    def test_drelu(self):
        def describe(gate):
            names = {"gate": gate, "up": "b", "down": "c"}
            return lambda module: twell.BlockDescription(**names, activation="drelu")

        twell.register_adapter(Gated)(describe("a"))
        (block,) = check_same(Gated(lambda a, b: torch.relu(a) * torch.relu(b))).blocks
        assert block.activation == "drelu"
        with pytest.raises(ValueError, match="computes something else"):
            sparsify_(Gated(lambda a, b: torch.relu(a) * b))
        twell.register_adapter(Gated)(describe(None))
        with pytest.raises(ValueError, match="activation: got 'drelu' for a non-gated block"):
            sparsify_(Gated(lambda a, b: torch.relu(b)))

    def test_a_wrong_description_changes_nothing(self):
        twell.register_adapter(Odd)(lambda module: twell.BlockDescription(gate="w3", up="w1", down="w2"))
        model = nn.Sequential(Plain(nn.ReLU()), Odd())
        with pytest.raises(ValueError, match="computes something else"):
            sparsify_(model)
        assert type(model[0]) is Plain

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    def test_descriptions_are_held_to_rounding(self, dtype):
        class Off(Odd):
            def forward(self, x):
                return super().forward(x) * 1.03

        twell.register_adapter(Odd)(lambda module: twell.BlockDescription(gate="w1", up="w3", down="w2"))
        assert len(sparsify_(Odd().to(dtype)).blocks) == 1
        with pytest.raises(ValueError, match="computes something else"):
            sparsify_(Off().to(dtype))

    @pytest.mark.parametrize("name", ["w4", "w1.weight", ""])
    def test_names_are_checked(self, name):
        twell.register_adapter(Odd)(lambda module: twell.BlockDescription(gate="w1", up=name, down="w2"))
        with pytest.raises(ValueError, match="up: got"):
            sparsify_(Odd())

    def test_none_leaves_it_to_the_search(self):
        twell.register_adapter(Plain)(lambda module: None)
        check_same(Plain(nn.ReLU()))

    def test_what_is_registered_and_returned_is_checked(self):
        with pytest.raises(ValueError, match="kind: got 3"):
            twell.register_adapter(3)
        twell.register_adapter(Odd)(lambda module: "w1")
        with pytest.raises(ValueError, match="adapter: got a str"):
            sparsify_(Odd())
