"""A few hundred random calls, and the fuzzer itself: a planted bug is found, shrinks and replays."""

from __future__ import annotations

import json
import re
import shlex

import pytest
import torch

from twell import reference
from twell.kernels import dense

from ..accuracy import every_activation
from .__main__ import main
from .campaign import reproducer, run_cases
from .case import Case, consistent
from .draw import draw
from .judge import judge
from .rounding import Block
from .run import final_operands, run_oracle
from .shrink import shrink
from .tensors import make_operands


@pytest.fixture(autouse=True)
def same_threads():
    """Cases run with one thread; tests after them with as many as before."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_random_calls():
    chunk = run_cases("cpu", 0, range(150))
    assert chunk.cases == 150
    assert chunk.failures == []
    assert chunk.counts["refused by stock"] == 0
    for kind in ("training", "inference", "forward row", "forward block", "forward dense", "backward row"):
        assert chunk.counts[kind] > 0, kind


def test_cases_follow_from_seed_and_index():
    assert draw("cpu", 3, 7) == draw("cpu", 3, 7) != draw("cpu", 3, 8)
    assert draw("cuda", 3, 7) == draw("cuda", 3, 7) != draw("cuda", 4, 7)
    case = draw("cpu", 0, 11)
    first, second = make_operands(case), make_operands(case)
    assert all(torch.equal(first[name].nan_to_num(), second[name].nan_to_num()) for name in first)
    assert [t.stride() for t in first.values()] == [t.stride() for t in second.values()]


@pytest.mark.parametrize("device", ["cpu", "cuda", "interpreted"])
def test_cases_survive_json(device):
    for index in range(100):
        case = draw(device, 0, index)
        assert Case.from_json(case.to_json()) == case == consistent(case)


def test_gpu_cases_are_of_few_kinds_that_the_kernels_take():
    cases = [draw("cuda", 0, index) for index in range(2000)]
    assert all(case.features % 8 == case.neurons % 8 == case.outputs % 8 == 0 for case in cases)
    assert max(case.features for case in cases) <= 2048
    assert max(case.neurons for case in cases) <= 6000
    assert max(case.tokens for case in cases) <= 4110  # leading sizes round up
    assert sum(case.features % 64 == 0 for case in cases) >= 600
    compiled = {
        (
            case.dtype,
            case.plan,
            case.gated,
            case.activation,
            case.biases,
            case.features % 16,
            case.neurons % 16,
            case.neurons.bit_length(),
        )
        for case in cases
    }
    assert len(compiled) <= 32


def planted(monkeypatch, spoil):
    """Dense blocks whose down projection is spoilt."""
    real = dense._project_down
    monkeypatch.setattr(dense, "_project_down", lambda *operands: spoil(real, *operands))


def doubled_row(project, hidden, down, bias):
    y = project(hidden, down, bias)
    if y.dim() != 2 or y.shape[0] < 3:
        return y
    return torch.cat([y[:2], 2 * y[2:3], y[3:]])


def no_bias(project, hidden, down, bias):
    return project(hidden, down, None)


@pytest.mark.parametrize(
    ("spoil", "least"), [(doubled_row, {"tokens": 3}), (no_bias, {"biases": ("down_bias",)})]
)
def test_a_planted_bug_is_found_shrinks_and_replays(monkeypatch, capsys, spoil, least):
    planted(monkeypatch, spoil)
    cases = (draw("cpu", 0, index) for index in range(200))
    failing = next(case for case in cases if judge(case)[0])
    case = shrink(failing, lambda case: bool(judge(case)[0]))
    assert judge(case)[0]
    for name, value in least.items():
        assert getattr(case, name) == value
    assert (case.layouts, case.specials, case.autocast) == ((), (), None)
    assert case.features * case.neurons <= 4
    command = shlex.split(reproducer(case))
    assert main(command[3:]) == 1
    assert re.search("y: .*over its bound", capsys.readouterr().out)
    monkeypatch.undo()
    assert main(command[3:]) == 0


def test_a_record_of_a_run(tmp_path, monkeypatch):
    planted(monkeypatch, doubled_row)
    path = tmp_path / "fuzz.json"
    options = ["--device", "cpu", "--cases", "20", "--first", "100", "--seed", "5", "--record", str(path)]
    assert main(options) == 1
    record = json.loads(path.read_text())
    assert (record["cases"], record["first"], record["seed"], record["device"]) == (20, 100, 5, "cpu")
    assert record["failed"] == len(record["failures"]) > 0
    assert record["counts"]["training"] + record["counts"]["inference"] == 20
    assert record["versions"]["torch"] == str(torch.__version__)
    assert record["hardware"]["cpu"]
    for failure in record["failures"]:
        assert Case.from_json(failure["case"]) == draw("cpu", 5, failure["index"])


@every_activation()
def test_the_model_of_roundings_computes_the_block(gated, activation):
    """Its values are the oracle's, with which it is compared nowhere else."""
    case = consistent(
        Case(
            leading=(9,),
            features=12,
            neurons=24,
            outputs=10,
            dtype="float64",
            gated=gated,
            activation=activation,
            biases=("up_bias", "down_bias", "gate_bias"),
            trained=("x", "up", "down", "gate", "up_bias", "down_bias", "gate_bias"),
            loss="weighted+l1",
            entry="stats",
        )
    )
    operands = final_operands(case)
    exact, found = run_oracle(case, operands), Block(case, operands).results()
    torch.testing.assert_close(found["y"], exact.y)
    torch.testing.assert_close(found["l1"].squeeze(), exact.l1)
    for name, gradient in exact.gradients.items():
        torch.testing.assert_close(found[name].view(gradient.shape), gradient, msg=name)


def test_outputs_that_must_not_be_finite():
    """An infinite weight of an active neuron reaches the tokens it is active for; NaN inputs all outputs."""
    case = consistent(Case(leading=(20,), features=8, neurons=16, gated=True, density=0.3))
    operands = final_operands(case)
    operands["down"][3, 5] = torch.inf
    operands["x"][7, 2] = torch.nan
    block = Block(case, operands)
    exact = reference.ffn(**operands, dtype=torch.float64)
    reached = block.must_not_be_finite()
    assert not (reached & exact.y.isfinite()).any()
    assert reached[7].all()
    fires = (exact.hidden[:, 5] != 0) | exact.hidden[:, 5].isnan()
    assert torch.equal(reached[:, 3] & (torch.arange(20) != 7), fires & (torch.arange(20) != 7))


def test_margins_do_not_hide_errors():
    """Spread and slack together stay around a rounding unit of the result, in every dtype."""
    for dtype in ("float32", "bfloat16", "float16"):
        case = consistent(
            Case(
                leading=(40,),
                features=64,
                neurons=128,
                gated=True,
                dtype=dtype,
                density=0.3,
                biases=("up_bias",),
            )
        )
        operands = final_operands(case)
        margins = Block(case, operands).margins()["y"]
        scale = run_oracle(case, operands).y.norm()
        unit = torch.finfo(getattr(torch, dtype)).eps
        assert (margins.spread.norm() + margins.slack.norm()) <= 4 * unit * scale
