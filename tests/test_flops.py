"""torch's flop counter: our ops count as the stock block does."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from twell import Plan, SparseMLP, ffn, ffn_with_stats

from .accuracy import stock_dense
from .training import NAMES, block

PLANS = [None, Plan(path="dense"), Plan(path="row"), Plan(path="block")]
plan_ids = {"ids": lambda plan: "auto" if plan is None else plan.path}
SUBSETS = [{name} for name in NAMES] + [{"down", "down_bias"}, {"x", "up"}, {"gate", "down"}, set(NAMES)]


def flops(operands, trained, run):
    leaves = {
        name: None if t is None else t.detach().requires_grad_(name in trained)
        for name, t in operands.items()
    }
    with FlopCounterMode(display=False) as counter:
        loss = run(**leaves).sum()
        if loss.requires_grad:
            loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("plan", PLANS, **plan_ids)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_inference(plan, gated):
    operands = block(5, gated=gated, outputs=24, bias=True)
    with torch.no_grad():
        assert flops(operands, (), lambda **t: ffn(**t, plan=plan)) == flops(operands, (), stock_dense) > 0


@pytest.mark.parametrize("plan", PLANS, **plan_ids)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("trained", SUBSETS, ids=lambda names: "+".join(sorted(names)))
def test_training(plan, gated, trained):
    operands = block(5, gated=gated, outputs=24, bias=True)
    found = flops(operands, trained, lambda **t: ffn(**t, plan=plan))
    assert found == flops(operands, trained, stock_dense)


def test_a_loss_of_l1_alone():
    """Down's product in the forward, none of its two in the backward."""
    operands, trained = block(5), ("x", "up", "gate", "down")
    found = flops(operands, trained, lambda **t: ffn_with_stats(**t, plan=Plan(path="row"))[1].l1)
    dense = flops(operands, trained, lambda **t: ffn_with_stats(**t, plan=Plan(path="dense"))[1].l1)
    assert found == dense


def test_few_16_bit_tokens_without_16_bit_units(monkeypatch):
    monkeypatch.setattr("twell.kernels.cpu.gemm.has_native_gemm", lambda dtype: False)
    operands = block(2, dtype=torch.bfloat16)
    operands["down"] = operands["down"].mT.contiguous().mT
    with torch.no_grad():
        assert flops(operands, (), ffn) == flops(operands, (), stock_dense)


def test_a_module_counts_as_linear_modules_do():
    mlp, x = SparseMLP(16, 48, plan=Plan(path="row")), torch.randn(3, 5, 16)
    stock = torch.nn.ModuleDict({"up": torch.nn.Linear(16, 48), "gate": torch.nn.Linear(16, 48)})
    stock["down"] = torch.nn.Linear(48, 16)

    def count(run):
        with FlopCounterMode(display=False) as counter:
            run(x).sum().backward()
        return counter.get_total_flops()

    assert count(mlp) == count(lambda x: stock["down"](stock["gate"](x).relu() * stock["up"](x)))


def test_a_backward_alone_is_counted():
    operands = block(3)
    leaves = {name: None if t is None else t.detach().requires_grad_() for name, t in operands.items()}
    losses = [run(**leaves).sum() for run in (partial(ffn, plan=Plan(path="row")), stock_dense)]
    counts = []
    for loss in losses:
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_a_mapping_of_the_users_stays():
    x, weight = torch.ones(2, 8), torch.ones(8, 8)
    mapping = {torch.ops.twell.ffn: lambda *_, **__: 7}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter, torch.no_grad():
        ffn(x, weight, weight, plan=Plan(path="row"))
    assert counter.get_total_flops() == 7


COUNT = """
with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
    twell.ffn(torch.ones(2, 8), torch.ones(8, 8), torch.ones(8, 8), plan=twell.Plan(path="row"))
assert counter.get_total_flops() == 2 * 2 * 2 * 8 * 8
"""


@pytest.mark.parametrize(
    "order",
    [
        "import twell\nassert 'torch.utils.flop_counter' not in sys.modules\nimport torch.utils.flop_counter",
        "import torch.utils.flop_counter\nimport twell",
        "import transformers\nimport twell.hf\nimport torch.utils.flop_counter",
    ],
    ids=["twell-first", "counter-first", "hf"],
)
def test_import_orders(order):
    code = f"import sys, torch\n{order}\n{COUNT}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
