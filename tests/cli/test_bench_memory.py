"""`twell bench` where memory runs out: it says what would fit, and keeps what it has measured."""

from __future__ import annotations

import inspect

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("transformers")

import twell.hf
from twell.measure import read_records

from .small_bench import QUICK, SMALL, run

pytestmark = pytest.mark.usefixtures("small_bench")
NO_MEMORY = "CUDA out of memory. Tried to allocate 4 GiB."


def limit_forward(monkeypatch, too_much) -> None:
    """Forward passes of models for which too_much(model, sequences, logits_to_keep) run out of memory."""
    from transformers import LlamaForCausalLM

    stock = LlamaForCausalLM.forward

    def limited(self, input_ids=None, logits_to_keep=0, **options):
        if too_much(self, input_ids.shape[0], logits_to_keep):
            raise torch.OutOfMemoryError(NO_MEMORY)
        return stock(self, input_ids=input_ids, logits_to_keep=logits_to_keep, **options)

    limited.__signature__ = inspect.signature(stock)
    monkeypatch.setattr(LlamaForCausalLM, "forward", limited)


def is_ours(model) -> bool:
    return isinstance(model, twell.hf.SparseLlamaForCausalLM)


@pytest.mark.parametrize("checkpointing", ["off", "on"])
def test_a_step_that_does_not_fit_says_what_would(tmp_path, monkeypatch, checkpointing):
    """Ours takes at most 3 sequences, and lets go of what the step that broke off held."""
    from twell.hf import SparseLlamaForCausalLM
    from twell.measure.training import Step

    loss, held = SparseLlamaForCausalLM.loss_function, []

    def limited(self, *given, logits, **options):
        if logits.shape[0] > 3:
            held.append(self)
            raise RuntimeError("CUDA error: out of memory")
        return loss.fget(self)(*given, logits=logits, **options)

    monkeypatch.setattr(
        SparseLlamaForCausalLM, "loss_function", property(lambda self: lambda *a, **k: limited(self, *a, **k))
    )
    step = Step.__call__

    def noted(self):
        try:
            return step(self)
        except RuntimeError:
            held.append(self.model)
            raise

    monkeypatch.setattr(Step, "__call__", noted)
    out = tmp_path / "records.jsonl"
    sizes = ("--batch", "8", "--sequence-length", "16", "--checkpointing", checkpointing)
    result = run("training", *sizes, *QUICK, "--out", str(out))
    assert result.exit_code == 0
    assert "out of memory: 3 x 16 tokens would fit" in result.output
    (dense,) = read_records(out)
    assert dense.what.endswith("dense-eager")
    assert held
    assert all(layer.mlp.last_stats is None for model in held for layer in model.model.layers)
    assert all(parameter.grad is None for model in held for parameter in model.parameters())


def test_memory_that_runs_out_while_tokens_are_timed_is_told(tmp_path, monkeypatch):
    from twell.measure import inference

    def perf_counter():
        raise torch.OutOfMemoryError(NO_MEMORY)

    monkeypatch.setattr(inference, "perf_counter", perf_counter)
    sizes = ("--prompt-length", "4", "--new-tokens", "2", "--workload", "generation")
    result = run("inference", *sizes, *QUICK)
    assert "out of memory while contenders took turns; --contenders names fewer" in result.output


def test_what_was_timed_is_kept_where_memory_runs_out_later(tmp_path, monkeypatch):
    from twell.measure import contest

    def recorded(contender):
        raise torch.OutOfMemoryError(NO_MEMORY)

    monkeypatch.setattr(contest, "_paths", recorded)
    out = tmp_path / "records.jsonl"
    result = run("inference", "--shape", "2x16", "--workload", "forward", *QUICK, "--out", str(out))
    assert result.exit_code == 0
    assert "ours-eager: no memory for one call more, so its share of sparse calls is not" in result.output
    dense, ours = read_records(out)
    assert [len(one.rounds[0]) for one in (dense, ours)] == [2, 2]
    assert ours.details["peak_bytes"] > 0


def test_memory_that_runs_out_between_contenders_is_told(tmp_path, monkeypatch):
    from twell.measure import contest

    def compare(*given, **options):
        raise torch.OutOfMemoryError(NO_MEMORY)

    monkeypatch.setattr(contest, "compare", compare)
    out = tmp_path / "records.jsonl"
    result = run("inference", "--shape", "2x16", "--workload", "forward", *QUICK, "--out", str(out))
    assert "out of memory while contenders took turns; --contenders names fewer" in result.output
    assert read_records(out) == []


@pytest.mark.parametrize("most", [1, 3])
def test_what_dense_cannot_run_is_measured_of_ours(tmp_path, monkeypatch, most):
    """Dense takes 1 sequence or 3, and is compared with two if it can; ours takes all 8."""
    limit_forward(monkeypatch, lambda model, sequences, keep: sequences > most and not is_ours(model))
    out = tmp_path / "records.jsonl"
    result = run("inference", "--shape", "8x16", "--workload", "forward", *QUICK, "--out", str(out))
    assert result.exit_code == 0
    assert f"out of memory: {most} x 16 tokens would fit" in result.output
    (ours,) = read_records(out)
    assert ours.what.endswith("ours-eager")
    assert ("logits are not compared: that does not fit" in result.output) == (most == 1)
    assert (ours.error is None) == (most == 1)


def test_logits_of_one_position_are_compared_where_more_do_not_fit(tmp_path, monkeypatch):
    limit_forward(monkeypatch, lambda model, sequences, keep: keep > 1 and sequences > 2)
    out = tmp_path / "records.jsonl"
    result = run("inference", "--shape", "8x16", "--workload", "forward", *QUICK, "--out", str(out))
    assert result.exit_code == 0
    assert [one.details["same_tokens_as_dense"] for one in read_records(out)] == [1, 1]


def test_what_would_fit_counts_the_cache_of_new_tokens(tmp_path, monkeypatch):
    """Two sequences of 4 + 16 + 2 tokens fit, a third does not; prompts alone would fit ten times."""
    from transformers import LlamaForCausalLM

    stock = LlamaForCausalLM.generate

    def limited(self, ids, max_new_tokens, **options):
        if ids.shape[0] * (ids.shape[1] + max_new_tokens) > 50:
            raise torch.OutOfMemoryError(NO_MEMORY)
        return stock(self, ids, max_new_tokens=max_new_tokens, **options)

    monkeypatch.setattr(LlamaForCausalLM, "generate", limited)
    sizes = ("--prompts", "8", "--prompt-length", "4", "--new-tokens", "2", "--workload", "generation")
    result = run("inference", *sizes, *QUICK)
    assert "dense-eager: out of memory: 2 x 4 tokens would fit" in result.output


def test_rounds_before_memory_runs_out_are_kept(tmp_path, monkeypatch):
    from twell.measure import contest

    compare, calls = contest.compare, []

    def limited(*given, **options):
        calls.append(given)
        if len(calls) == 4:
            raise torch.OutOfMemoryError(NO_MEMORY)
        return compare(*given, **options)

    monkeypatch.setattr(contest, "compare", limited)
    out = tmp_path / "records.jsonl"
    rounds = ("--rounds", "6", *QUICK[2:])
    result = run("inference", "--shape", "2x16", "--workload", "forward", *rounds, "--out", str(out))
    assert result.exit_code == 0
    assert "out of memory while contenders took turns" in result.output
    assert "3 of 6 rounds count" in result.output
    dense, ours = read_records(out)
    assert [len(one.rounds[0]) for one in (dense, ours)] == [3, 3]
    assert ours.details["peak_bytes"] > 0


def small_step(contender: str):
    from twell.measure.training import TrainingCase

    case = TrainingCase(
        size=SMALL, name="tiny", batch=2, sequence=16, precision="float32", device=torch.device("cpu")
    )
    trained = case.build()
    return trained.step(contender, case.ids(), False)


def test_an_optimiser_without_memory_can_go_on(monkeypatch):
    """AdamW notes a parameter before it has both of its moments."""
    step, zeros, made = small_step("ours-eager"), torch.zeros_like, []

    def limited(*given, **options):
        made.append(given)
        if len(made) == 4:
            raise torch.OutOfMemoryError(NO_MEMORY)
        return zeros(*given, **options)

    prepare = step._optimiser._init_group

    def with_little_memory(*given, **options):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "zeros_like", limited)
            return prepare(*given, **options)

    monkeypatch.setattr(step._optimiser, "_init_group", with_little_memory)
    with pytest.raises(torch.OutOfMemoryError):
        step()
    assert len(made) == 4
    assert step().isfinite()
    states = step._optimiser.state
    assert len(states) == len(list(step.model.parameters()))
    assert all({"exp_avg", "exp_avg_sq"} <= state.keys() for state in states.values())


def test_hidden_states_without_memory_hold_nothing():
    step = small_step("ours-eager")
    step()
    layers = step.model.model.layers

    def limited(*given):
        raise torch.OutOfMemoryError(NO_MEMORY)

    hook = layers[-1].register_forward_pre_hook(limited)
    with pytest.raises(torch.OutOfMemoryError):
        step.hidden_states()
    hook.remove()
    assert [layer.mlp.last_stats for layer in layers] == [None] * len(layers)
    assert step.hidden_states().isfinite().all()
