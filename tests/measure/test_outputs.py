"""A contender that computes something else is found out, in training and at inference; records say so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from twell import SparseMLP
from twell.measure.comparison import clear_of_thresholds
from twell.measure.contest import Setting
from twell.measure.inference import Batch, bench_forward
from twell.measure.models import ModelSize, build_pair, decoder_layers
from twell.measure.results import Measured, records_of
from twell.measure.training import Trained, TrainingCase, bench_training

SIZE = ModelSize(hidden=128, neurons=1024, layers=2, vocabulary=100, positions=64, nnz=12)
CONTENDERS = ["dense-eager", "ours-eager"]
SOURCE = {
    "hardware": {"device": "cpu", "cpu": "one"},
    "versions": {"torch": "2"},
    "commit": "abc1234",
    "date": "2026-11-18T00:00:00+00:00",
}


class Outcome:
    """What a bench emits and says."""

    def __init__(self) -> None:
        self.last: dict[str, Measured] = {}
        self.said: list[str] = []
        self.setting = Setting(
            device=torch.device("cpu"),
            rounds=1,
            memory=False,
            emit=lambda measured: self.last.__setitem__(measured.contender, measured),
            say=self.said.append,
        )

    @property
    def doubtful(self) -> list[str]:
        """Names; a record can hold each of them."""
        assert len(records_of("bench", self.last.values(), source=SOURCE, seed=0)) == len(CONTENDERS)
        found = [name for name, one in self.last.items() if one.details.get("doubtful")]
        assert [name for name in CONTENDERS if any(f"{name} computes" in line for line in self.said)] == found
        return found


def trained_with(change, precision: str = "float32", contenders=CONTENDERS) -> Outcome:
    case = TrainingCase(
        size=SIZE, name="small", batch=2, sequence=16, precision=precision, device=torch.device("cpu")
    )
    trained, outcome = case.build(), Outcome()
    with torch.no_grad():
        change(decoder_layers(trained.pair.sparse)[1].mlp)
    bench_training(trained, False, contenders, outcome.setting)
    return outcome


def passed_forward_with(change) -> Outcome:
    pair, outcome = build_pair(SIZE, dtype=torch.float32, device="cpu"), Outcome()
    with torch.no_grad():
        change(decoder_layers(pair.sparse)[1].mlp)
    ids = torch.arange(32).view(2, 16)
    bench_forward(pair, "small", Batch(ids=ids, origin="text"), CONTENDERS, outcome.setting, calibrated=True)
    return outcome


def nothing(block) -> None:
    pass


def some_more(block) -> None:
    block.up_proj.weight.mul_(1.05)


def not_a_number(block) -> None:
    block.down_proj.weight.fill_(torch.nan)


@pytest.mark.parametrize("run", [trained_with, passed_forward_with])
@pytest.mark.parametrize(
    ("change", "doubtful"), [(nothing, []), (some_more, ["ours-eager"]), (not_a_number, ["ours-eager"])]
)
def test_a_wrong_block_is_found_out(run, change, doubtful):
    outcome = run(change)
    assert outcome.doubtful == doubtful
    assert (outcome.last["ours-eager"].error is None) == (change is not_a_number)
    assert 0 < outcome.last["dense-eager"].error < 1e-5


@pytest.mark.parametrize("precision", ["bfloat16", "mixed"])
@pytest.mark.parametrize(("change", "doubtful"), [(nothing, []), (some_more, ["ours-eager"])])
def test_a_wrong_block_is_found_out_in_16_bits(precision, change, doubtful):
    """Where thresholds move with every rounding: a block that is wrong by a twentieth still shows."""
    assert trained_with(change, precision).doubtful == doubtful


def test_blocks_are_compared_on_the_path_that_is_timed(monkeypatch):
    monkeypatch.setenv("TWELL_PLAN", "row")  # nothing pays at this size
    outcome = trained_with(nothing)
    ours = outcome.last["ours-eager"].details
    assert ours["compared_sparse_share"] == ours["sparse_share"] > 0
    assert 0 < ours["block_error"] < 1e-5


def test_errors_are_of_gradients_too():
    """A block with right outputs and wrong gradients."""

    def scaled_gradient(block) -> None:
        block.register_full_backward_pre_hook(lambda module, grads: tuple(1.05 * one for one in grads))

    assert trained_with(scaled_gradient).doubtful == ["ours-eager"]


def test_errors_are_of_what_runs_with_the_l1_term(monkeypatch):
    """A block that is wrong in timed steps alone, which record statistics."""
    right = SparseMLP.forward

    def wrong(self, x):
        y = right(self, x)
        return y * 1.05 if self.record and torch.is_grad_enabled() else y

    monkeypatch.setattr(SparseMLP, "forward", wrong)
    assert trained_with(nothing).doubtful == ["ours-eager"]


def test_a_wrong_l1_term_is_found_out(monkeypatch):
    right = SparseMLP.forward

    def wrong(self, x):
        y = right(self, x)
        if self.last_stats is not None:
            self.last_stats = self.last_stats._replace(l1=1.05 * self.last_stats.l1)
        return y

    monkeypatch.setattr(SparseMLP, "forward", wrong)
    assert trained_with(nothing).doubtful == ["ours-eager"]


def test_a_wrong_dense_contender_is_found_out(monkeypatch):
    """It has no block of its own to compare: the last hidden states tell."""
    prepared = Trained._prepared

    def wrong(self, contender, checkpointing):
        model = prepared(self, "dense-eager", checkpointing)
        if contender == "dense-compiled":
            decoder_layers(model)[0].mlp.register_forward_hook(lambda module, given, y: 0 * y)
        return model

    monkeypatch.setattr(Trained, "_prepared", wrong)
    outcome = trained_with(nothing, contenders=["dense-eager", "dense-compiled"])
    assert [name for name, one in outcome.last.items() if one.details.get("doubtful")] == ["dense-compiled"]


def test_a_neuron_on_its_threshold_is_no_error():
    """Both ways to round are right; its gradient is there or not."""
    torch.manual_seed(0)
    gate, up, down = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
    x = torch.randn(5, 8)
    with torch.no_grad():  # token 2 is next to the threshold of neuron 7
        gate.weight[7] -= x[2] * (x[2] @ gate.weight[7]) / x[2].square().sum()
        assert gate(x)[2, 7].abs() < 1e-6
    block = nn.Module()
    block.gate_proj, block.up_proj, block.down_proj = (one.double() for one in (gate, up, down))
    clear = clear_of_thresholds(block, x)
    assert torch.equal(clear, x[[0, 1, 0, 3, 4]])
