"""What ran in each layer, and why, as `twell.explain` tells it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import twell
from twell import Plan, SparseMLP, explanation, policy
from twell._interval import Interval
from twell._text_table import together


def model(**options):
    torch.manual_seed(0)
    mlps = {"small": SparseMLP(16, 32), "named": SparseMLP(16, 32, gated=False, plan=Plan(path="row"))}
    return nn.ModuleDict({**mlps, **options})


def test_before_anything_ran():
    explained = twell.explain(model())
    assert [layer.layer for layer in explained] == ["small", "named"]
    assert [layer.forward for layer in explained] == [None, None]
    assert "not been called" in str(explained)
    assert str(twell.explain(nn.Linear(2, 2))).startswith("no sparse block found")


def explained(*reasons, name="model.layers.{}.mlp", plan="auto"):
    gain = Interval(1.0, 1.1, 1.2)
    return explanation.Explanation(
        explanation.ExplainedLayer(name.format(i), 384, 6144, plan, "row", None, 0.01, 0.1, 2.9, gain, reason)
        for i, reason in enumerate(reasons)
    )


class TestWidth:
    def test_a_table_that_fits_stays_whole(self):
        table = explained("a reason", "another reason")
        width = max(map(len, str(table).splitlines()))
        assert table.text(width) == table.text() == str(table)
        assert table.text(width - 1) != str(table)
        assert "why" in str(table).splitlines()[0]

    def test_reasons_go_first_and_are_told_once(self):
        lines = explained("a", "few tokens", "a", "a", "a", "b").text(100).splitlines()
        assert lines[0].split()[-2:] == ["products", "measured"]
        assert lines[7:] == [
            "why, model.layers.0,2-4.mlp: a",
            "why, model.layers.1.mlp: few tokens",
            "why, model.layers.5.mlp: b",
        ]

    @pytest.mark.parametrize(
        ("width", "gone"),
        [
            (94, ["why"]),
            (88, ["why", "plan"]),
            (80, ["why", "plan", "D x H"]),
            (70, ["why", "plan", "D x H", "fewer products"]),
            (56, ["why", "plan", "D x H", "fewer products", "union"]),
        ],
    )
    def test_columns_go_in_turn(self, width, gone):
        table = explained("it is so " * 20)
        header, _, *below = table.text(width).splitlines()
        every = ("layer", "D x H", "plan", "ran", "active", "union", "fewer products", "measured", "why")
        assert [title for title in every if title not in header] == [t for t in every if t in gone]
        assert all(len(line) <= width for line in table.text(width).splitlines())
        assert ("plan, all layers: auto" in below) == ("plan" in gone)
        assert ("D x H, all layers: 384 x 6144" in below) == ("D x H" in gone)
        left_out = [title for title in gone if title in ("fewer products", "union")]
        assert below[-1] == f"no room for: {', '.join(left_out)}" if left_out else "room" not in below[-1]

    @pytest.mark.parametrize(
        ("names", "said"),
        [
            (["h.0", "h.1", "h.2"], "h.0-2"),
            (["h.9", "h.10", "h.2"], "h.2,9-10"),
            (["h.3"], "h.3"),
            (["h.0.up", "h.0.down"], "h.0.up, h.0.down"),
            (["h.0.e.1", "h.1.e.0"], "h.0.e.1, h.1.e.0"),
            (["h.0", "h.0.1"], "h.0, h.0.1"),
            (["small", "named"], "small, named"),
        ],
    )
    def test_layers_are_named_together(self, names, said):
        assert together(names) == said

    def test_nothing_has_no_width(self):
        assert explanation.Explanation().text(20).startswith("no sparse block found")

    @pytest.mark.parametrize("width", [0, -3, 7.5, True])
    def test_a_width_is_a_number_of_columns(self, width):
        with pytest.raises(ValueError, match=f"width: got {width!r}; accepted: an integer >= 1"):
            explained("a").text(width)


def test_paths_and_reasons():
    layers = model()
    x = torch.randn(20, 16)
    with torch.no_grad():
        for mlp in layers.values():
            for _ in range(3):
                mlp(x)
    small, named = twell.explain(layers)
    assert (small.hidden, small.neurons, small.plan, small.forward) == (16, 32, "auto", "dense")
    assert "too little work" in small.reason
    assert (named.plan, named.forward, named.backward) == ("row", "row", None)
    assert named.reason == "the plan names it"
    table = str(twell.explain(layers)).splitlines()
    assert table[0].split() == ["layer", "D", "x", "H", "plan", "ran", "why"]
    assert table[2].split()[:6] == ["named", "16", "x", "32", "row", "row"]


def test_chunks_and_backwards(monkeypatch):
    monkeypatch.setattr(policy.cpu, "_WORTH_LOOKING_SECONDS", 0.0)
    layers = model()
    with torch.no_grad():
        layers["small"](torch.randn(20, 16))
    layers["named"](torch.randn(20, 16)).sum().backward()
    small, named = twell.explain(layers)
    assert small.forward == "dense"
    assert "rows pay up to 13.0%" in small.reason  # half of the neurons fire
    assert (named.forward, named.backward) == ("row", "dense")


def test_what_a_compiled_graph_knows(fresh_compiler):
    mlp = SparseMLP(16, 32, plan=Plan(path="row")).requires_grad_(False)
    torch.compile(mlp, backend="eager", fullgraph=True)(torch.randn(3, 16))
    (layer,) = twell.explain(mlp)
    assert (layer.layer, layer.forward) == ("", "row")
    assert str(twell.explain(mlp)).splitlines()[1].startswith("(model)")


def test_gains_are_over_weights_as_stock_stores_them(monkeypatch):
    """Ours lies in memory neuron by neuron."""
    seen = []
    stock = explanation.dense_as_stock
    monkeypatch.setattr(
        explanation,
        "dense_as_stock",
        lambda x, weights, act: seen.append(weights[1]) or stock(x, weights, act),
    )
    mlp = SparseMLP(16, 32)
    assert not mlp.down_proj.weight.is_contiguous()
    twell.explain(mlp, torch.randn(20, 16))
    assert seen
    assert all(down.is_contiguous() and torch.equal(down, mlp.down_proj.weight) for down in seen)


def test_a_copy_explains_itself():
    mlp = SparseMLP(16, 32)
    mlp(torch.randn(3, 16))
    assert twell.explain(copy.deepcopy(mlp))[0].forward is None


def test_readings_of_a_gpu_are_shown():
    mlp = SparseMLP(16, 32)
    mlp(torch.randn(3, 16))
    mlp._layer.reading(mlp.gate_proj.weight, 3, training=False).take(torch.tensor([8]), 32)
    (layer,) = twell.explain(mlp)
    assert layer.union == 0.25
    assert "25.0%" in str(twell.explain(mlp))


def test_what_was_known_when_it_was_decided_is_shown():
    mlp = SparseMLP(16, 32)
    mlp(torch.randn(3, 16))
    reading = mlp._layer.reading(mlp.gate_proj.weight, 3, training=False)
    reading.take(torch.tensor([8]), 32)
    mlp._layer.note("forward", "block", "25.0% are active", reading, reading.share)
    reading.take(torch.tensor([16]), 32)
    assert twell.explain(mlp)[0].union == 0.25


@pytest.mark.parametrize("as_batch", [lambda x: x, lambda x: [x], lambda x: {"input": x}])
def test_a_batch_is_run_counted_and_timed(as_batch):
    torch.manual_seed(0)
    model = nn.Sequential(SparseMLP(16, 32), nn.Dropout(), SparseMLP(16, 64, gated=False)).train()
    x = torch.randn(3, 50, 16)
    first, second = twell.explain(model, as_batch(x))
    assert all(module.training for module in model.modules())  # as it was
    active = model[0].gate_proj(x).flatten(0, 1) > 0
    union = [window.any(0).double().mean() for window in active.split(128)]
    assert first.active == pytest.approx(active.double().mean().item())
    assert first.union == pytest.approx(torch.stack(union).mean().item())
    assert first.limit == pytest.approx(3 / (1 + 2 * first.active))
    assert second.limit == pytest.approx(2 / (1 + second.active))
    assert all(layer.gain.low > 0 and layer.forward == "dense" for layer in (first, second))
    header = str(twell.explain(model, as_batch(x))).splitlines()[0].split()
    assert header[5:] == ["ran", "active", "union", "fewer", "products", "measured", "why"]


def test_a_block_that_is_called_twice_counts_both():
    mlp = SparseMLP(16, 32)
    (layer,) = twell.explain(nn.Sequential(mlp, mlp), torch.randn(4, 16))
    assert 0 < layer.active < 1
    assert layer.limit is not None


@pytest.mark.parametrize("batch", [3, "text"])
def test_a_bad_batch_is_rejected(batch):
    with pytest.raises(ValueError, match="batch: got a"):
        twell.explain(SparseMLP(16, 32), batch)


def test_something_else_than_a_module_is_rejected():
    with pytest.raises(ValueError, match="model: got int"):
        twell.explain(3)


def test_a_backward_of_autograd_shows_none(monkeypatch):
    """Prepared and decided dense steps, after one with a backward of ours."""
    mlp, x = SparseMLP(16, 32, plan=Plan(path="row")), torch.randn(20, 16)
    for _ in range(3):
        mlp.plan = Plan(path="row")
        mlp(x).sum().backward()
        assert twell.explain(mlp)[0].backward is not None
        mlp.plan = Plan(path="dense")
        mlp(x).sum().backward()
        assert twell.explain(mlp)[0].backward is None


def test_blocks_that_run_through_their_modules():
    mlp = SparseMLP(16, 32, plan=Plan(path="row")).requires_grad_(False)
    mlp(torch.randn(3, 16))
    mlp.up_proj.register_forward_hook(lambda *_: None)
    mlp(torch.randn(3, 16))
    (layer,) = twell.explain(mlp)
    assert layer.forward == "dense"
    assert "hooked" in layer.reason


def test_transforms():
    mlp = SparseMLP(16, 32, plan=Plan(path="row")).requires_grad_(False)
    torch.func.vmap(mlp)(torch.randn(2, 3, 16))
    assert "torch.func" in twell.explain(mlp)[0].reason


def test_the_last_call_counts(monkeypatch):
    """A dense one that is prepared, after a sparse one of another shape; inference after training."""
    monkeypatch.setattr(policy.cpu, "sparse_can_pay", lambda site: site.tokens > 8)
    monkeypatch.setattr(policy.cpu, "row_limit", lambda site: 1.0)
    mlp = SparseMLP(16, 32).requires_grad_(False)
    few, many = torch.randn(3, 16), torch.randn(20, 16)
    for x, path in ((few, "dense"), (many, "row"), (few, "dense"), (many, "row")):
        mlp(x)
        assert twell.explain(mlp)[0].forward == path
    mlp.requires_grad_().plan = Plan(path="row")
    mlp(many).sum().backward()
    assert twell.explain(mlp)[0].backward == "dense"
    with torch.no_grad():
        mlp(many)
    assert twell.explain(mlp)[0].backward is None


def test_second_derivatives_are_seen():
    mlp = SparseMLP(16, 32, plan=Plan(path="row"))
    x = torch.randn(3, 16, requires_grad=True)
    torch.autograd.grad(mlp(x).sum(), x, create_graph=True)
    assert twell.explain(mlp)[0].backward == "dense"


def test_progress_of_every_block_is_told():
    told: dict[str, list[float]] = {}
    twell.explain(
        nn.Sequential(*model().values()),
        torch.randn(3, 16),
        progress=lambda name, share: told.setdefault(name, []).append(share),
    )
    assert list(told) == ["0", "1"]
    for shares in told.values():
        assert len(shares) > 5
        assert shares == sorted(shares)
        assert shares[-1] == 1
