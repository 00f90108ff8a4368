"""A block in a notebook: what it is and what is known of it, whatever its projections are."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
import torch
from torch import nn

import twell
from twell import Plan, SparseMLP
from twell.functional import FfnStats
from twell.layer_state import Reading
from twell.sparsify.blocks import named_blocks


def shown(block) -> dict[str, str]:
    """name -> value, and the name of the class under "class"."""
    drawn = ElementTree.fromstring(block._repr_html_().replace("class=wrap", ""))
    title, _ = ("".join(cell.itertext()) for cell in drawn.iter("th"))
    cells = ["".join(cell.itertext()) for cell in drawn.iter("td")]
    return {"class": title, **dict(zip(cells[::2], cells[1::2], strict=True))}


def test_what_a_block_is():
    block = SparseMLP(32, 96, activation="fatrelu(0.5)", bias=True, plan=Plan(path="row"))
    assert shown(block) == {
        "class": "SparseMLP",
        "kind": "gated",
        "D x H": "32 x 96",
        "activation": "fatrelu(0.5)",
        "parameters": f"{3 * 32 * 96 + 2 * 96 + 32:,}",
        "weights": "float32 on cpu",
        "plan": "row",
        "ran": "not yet",
    }
    assert repr(block).startswith("SparseMLP(\n  gated, activation=fatrelu(0.5)")


def test_what_ran_and_why():
    block = SparseMLP(32, 96, gated=False, plan=Plan(path="row"), record=True, dtype=torch.float64)
    x = torch.randn(5, 32, dtype=torch.float64)
    block(x)
    active = 100 * (block.up_proj(x) > 0).double().mean().item()
    found = shown(block)
    assert found["kind"] == "non-gated"
    assert found["weights"] == "float64 on cpu"
    assert float(found["active per token"].removesuffix("%")) == pytest.approx(active, abs=0.01)
    assert found["ran"] == "row"
    assert found["why"] == block._layer.ran["forward"].reason


def test_a_share_that_was_read_and_a_backward():
    block = SparseMLP(32, 96)
    block._own_layer().note("forward", "block", "<few> & far between", Reading.given(0.25), 0.25)
    block._layer.note("backward", "block", "")
    found = shown(block)
    assert found["active per block of tokens"] == "25.0%"
    assert found["ran"] == "block, backward block"
    assert found["why"] == "<few> & far between"


def test_statistics_on_a_device_are_not_waited_for():
    block = SparseMLP(32, 96)
    elsewhere = torch.empty((), device="meta")
    block.last_stats = FfnStats(l1=elsewhere, l0=elsewhere, firing=elsewhere)
    assert "active per token" not in shown(block)


def test_blocks_of_stock_models():
    stock = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    twell.sparsify_(stock)
    [(_, twin)] = named_blocks(stock)
    stock(torch.randn(3, 16))
    found = shown(twin)
    assert found["class"] == type(twin).__name__
    assert (found["D x H"], found["parameters"]) == ("16 x 32", f"{2 * 16 * 32 + 32 + 16:,}")
    assert found["ran"] == "dense"


def test_meta_device():
    assert shown(SparseMLP(32, 96, device="meta"))["weights"] == "float32 on meta"


class _Packed(nn.Module):
    """As a quantised projection: no weight, integers and scales."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("packed", torch.zeros(8, dtype=torch.uint8))
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.float16))


class _Hostile(nn.Module):
    def parameters(self, recurse=True):
        raise RuntimeError("not now")


@pytest.mark.parametrize(
    ("projection", "weights", "parameters"),
    [
        (_Packed(), "float32 on cpu, float16 on cpu, uint8 on cpu", f"{2 * 32 * 96 + 2:,}"),
        (nn.LazyLinear(96), None, None),
        (nn.utils.parametrizations.weight_norm(nn.Linear(32, 96, bias=False)), "float32 on cpu", None),
        (_Hostile(), None, None),
    ],
    ids=["quantised", "lazy", "parametrised", "hostile"],
)
def test_odd_projections(projection, weights, parameters):
    block = SparseMLP(32, 96)
    block.up_proj = projection
    found = shown(block)
    assert found["D x H"] == "32 x 96"
    assert weights is None or found["weights"] == weights
    assert parameters is None or found["parameters"] == parameters


def test_a_block_without_projections():
    block = SparseMLP(32, 96)
    del block.up_proj
    assert shown(block)["plan"] == "auto"
