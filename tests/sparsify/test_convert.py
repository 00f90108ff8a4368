"""`sparsify_` and `densify_`: what they change, report and refuse."""

from __future__ import annotations

import copy
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from twell import SparseMLP, densify_, sparsify_
from twell.sparsify.blocks import named_blocks

from .stock_blocks import ROW, D, Gated, H, Layer, Plain, model_of, multiply, paths


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


def test_a_report_fits_the_terminal(monkeypatch):
    report = sparsify_(model_of(*(Plain(nn.ReLU()) for _ in range(4)), Plain(nn.GELU())))
    wide = str(report)
    assert wide.splitlines()[1].startswith("4: 0-3 ")
    narrow = report.text(48)
    assert max(map(len, narrow.splitlines())) <= 48 < max(map(len, wide.splitlines()))
    told = {word.strip(",:") for word in narrow.split()}
    assert all(word.strip(",:") in told for line in wide.splitlines()[1:] for word in line.split())
    with pytest.raises(ValueError, match="width"):
        report.text(0)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "48")
    assert str(report) == narrow


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


class Quantised(nn.Linear):
    """As a library makes one."""


def quantised(block):
    block.one, block.two = Quantised(D, H), Quantised(H, D)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.ones(3, H, D)), nn.Parameter(torch.ones(3, D, H))

    def forward(self, x):
        return sum(torch.relu(x @ up.T) @ down.T for up, down in zip(self.up, self.down, strict=True))


def test_the_way_out_names_the_model():
    model = model_of(Plain(nn.SiLU()))
    model.config = SimpleNamespace(name_or_path="a folder/model")
    assert "model.init_from='a folder/model' data.source=TEXT`" in str(sparsify_(model))


@pytest.mark.parametrize(
    ("change", "way"),
    [
        (
            lambda block: setattr(block, "f", nn.SiLU()),
            "--preset relufy model.init_from=MODEL data.source=TEXT",
        ),
        (lambda block: block.one.register_forward_hook(lambda *_: None), "remove them"),
        (lambda block: setattr(block.two, "forward", block.two.forward), "restore it"),
        (lambda block: nn.utils.parametrizations.weight_norm(block.one), "remove_parametrizations"),
        (lambda block: block.one.bfloat16(), "one dtype"),
        (quantised, "unquantised"),
        (lambda block: setattr(block, "inner", Experts()), "not supported yet"),
    ],
)
def test_what_is_skipped_names_the_way_out(change, way):
    model = model_of(Plain(nn.ReLU()))
    change(model[0])
    report = sparsify_(model)
    assert not report.blocks
    assert any(way in skipped.way_out for skipped in report.skipped)
    assert way in str(report)
    assert all(len(line) < 250 for line in str(report).splitlines())
