"""Whole runs on the CPU: what they write, exact resumption, interruptions, damage, refusals."""

from __future__ import annotations

import errno
import io
import json
import multiprocessing
import os
import signal
import time
from importlib.util import find_spec

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from typer.testing import CliRunner

from twell import hf
from twell.cli.app import app
from twell.shares import SIZES, stored_shares
from twell.train import run as run_module
from twell.train.model import build_model
from twell.train.recipe import Recipe
from twell.train.run import RunResult, train

from .runs import QUIET, logged, small_run, write_corpus

VALUES = ("loss", "ce_loss", "l1_loss", "nnz", "dead", "grad_norm")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """An undisturbed run, to compare with."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    result = train(small_run(corpus), folder, console=QUIET)
    assert result.finished
    return folder


def same_weights(one, other):
    a, b = (load_file(folder / "model" / "model.safetensors") for folder in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class At(TrainerCallback):
    """Do something after a step, once."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action()


def disturbed(monkeypatch, step, action):
    real = run_module.SparseTrainer.train

    def with_callback(self, **options):
        self.callback_handler.callbacks.insert(0, At(step, action))
        return real(self, **options)

    monkeypatch.setattr(run_module.SparseTrainer, "train", with_callback)


def test_what_a_run_leaves(whole, corpus):
    names = {path.name for path in whole.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "environment.json", "summary.json", "model"} <= names
    assert {"checkpoint-4", "checkpoint-8", "checkpoint-12"} <= names
    steps = logged(whole, *VALUES, "tokens_per_second", "l1_weight")
    assert [line[0] for line in steps] == list(range(1, 13))
    assert [line[-1] for line in steps[:5]] == [0.0, 0.0, 0.0, 5e-4, 1e-3]
    assert steps[-1][2] < steps[0][2] - 0.2
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["steps"] == 12
    assert summary["tokens"] == 12 * 4 * 32
    assert 0 < summary["held_out_nnz"] < 96
    assert summary["dead_window"] == summary["tokens"]
    assert summary["held_out_dead_window"] // 32 == summary["held_out_dead_window"] / 32 > 1
    model = AutoModelForCausalLM.from_pretrained(whole / "model")
    shares = stored_shares(model.config)  # for engines that cannot find out
    assert [list(layer) for layer in shares] == [list(SIZES)] * 2
    mean = sum(layer[1] for layer in shares) / 2
    assert mean == pytest.approx(summary["held_out_nnz"] / 96, rel=0.02)
    tokenizer = AutoTokenizer.from_pretrained(whole / "model")
    tokens = tokenizer("import torch", return_tensors="pt").input_ids
    assert model.generate(tokens, max_new_tokens=3, do_sample=False).shape[1] == tokens.shape[1] + 3


def test_a_run_shows_itself_in_a_notebook(whole, corpus):
    found = train(small_run(corpus), whole, resume=True, console=QUIET)
    html = found._repr_html_()
    assert f"{whole}: finished" in html
    assert f">{found.summary['parameters']:,}<" in html
    assert html.count("<table>") == 2
    assert html.count('src="data:image/png;base64,') == (find_spec("matplotlib") is not None)
    stopped = RunResult(folder=whole / "nowhere", finished=False, summary={"step": 7})._repr_html_()
    assert "stopped; it can be resumed" in stopped
    assert "0 lines, none of training" in stopped


def test_eval_of_a_run_is_what_the_run_found(whole, tmp_path):
    out = tmp_path / "found.json"
    result = CliRunner().invoke(app, ["eval", str(whole), "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0
    found, summary = json.loads(out.read_text()), json.loads((whole / "summary.json").read_text())
    assert found["cross_entropy"] == pytest.approx(summary["held_out_ce_loss"], rel=1e-5)
    assert sum(found["l0"]) / 2 == pytest.approx(summary["held_out_nnz"], rel=1e-5)
    assert sum(found["silent"]) / 2 == pytest.approx(summary["held_out_dead"])
    assert found["tokens"] == summary["held_out_dead_window"]
    assert f"dead in {found['tokens']:,}" in " ".join(result.output.split())
    with pytest.raises(ValueError, match=r"out: got .*; accepted: a new file"):
        CliRunner().invoke(app, ["eval", str(whole), "--out", str(out)], catch_exceptions=False)


def test_a_crashed_run_resumes_to_the_bit(whole, corpus, tmp_path, monkeypatch):
    def crash():
        raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        disturbed(patch, 7, crash)
        with pytest.raises(RuntimeError, match="power cut"):
            train(small_run(corpus), tmp_path / "run", console=QUIET)
    assert not (tmp_path / "run" / "summary.json").exists()
    assert train(small_run(corpus), tmp_path / "run", resume=True, console=QUIET).finished
    assert logged(tmp_path / "run", *VALUES) == logged(whole, *VALUES)
    assert same_weights(tmp_path / "run", whole)


def test_ctrl_c_saves_and_the_run_resumes_to_the_bit(whole, corpus, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        disturbed(patch, 6, lambda: signal.raise_signal(signal.SIGINT))
        result = train(small_run(corpus), tmp_path / "run", console=QUIET)
    assert not result.finished
    assert result.summary == {"step": 6}
    assert (tmp_path / "run" / "checkpoint-6" / "manifest.json").exists()
    assert train(small_run(corpus), tmp_path / "run", resume=True, console=QUIET).finished
    assert logged(tmp_path / "run", *VALUES) == logged(whole, *VALUES)
    assert same_weights(tmp_path / "run", whole)


def test_a_job_that_is_told_to_end_saves_although_its_workers_are_told_too(corpus, tmp_path, monkeypatch):
    def end_all():
        for process in multiprocessing.active_children():
            os.kill(process.pid, signal.SIGTERM)
        time.sleep(0.5)
        signal.raise_signal(signal.SIGTERM)

    config = small_run(corpus, "train.workers=1")
    with monkeypatch.context() as patch:
        disturbed(patch, 3, end_all)
        result = train(config, tmp_path / "run", console=QUIET)
    assert result.summary == {"step": 3}
    assert (tmp_path / "run" / "checkpoint-3" / "manifest.json").exists()


def test_a_damaged_checkpoint_is_skipped(whole, corpus, tmp_path, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        disturbed(patch, 9, lambda: signal.raise_signal(signal.SIGINT))
        train(small_run(corpus), tmp_path / "run", console=QUIET)
    weights = tmp_path / "run" / "checkpoint-9" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    (tmp_path / "run" / "checkpoint-8" / "optimizer.pt").write_bytes(b"cut short")
    assert train(small_run(corpus), tmp_path / "run", resume=True, console=QUIET).finished
    assert "model.safetensors is damaged" in caplog.text
    assert "optimizer.pt has" in caplog.text
    assert same_weights(tmp_path / "run", whole)


def test_a_full_disk_keeps_what_was_saved(corpus, tmp_path, monkeypatch):
    real = Recipe.save

    def save(self, folder, first):
        if folder.name == "checkpoint-8":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, folder, first)

    monkeypatch.setattr(Recipe, "save", save)
    message = r"no space left to write the checkpoint of step 8; the last checkpoint is .*checkpoint-4"
    with pytest.raises(OSError, match=message):
        train(small_run(corpus), tmp_path / "run", console=QUIET)
    assert not (tmp_path / "run" / "checkpoint-8").exists()
    assert (tmp_path / "run" / "checkpoint-4" / "manifest.json").exists()


def test_a_run_that_diverges_ends(corpus, tmp_path):
    with pytest.raises(FloatingPointError, match=r"the loss is nan at step \d+; "):
        train(
            small_run(corpus, "train.lr=1e30", "train.clip=0", "train.warmup=0"),
            tmp_path / "run",
            console=QUIET,
        )


def test_nothing_is_overwritten_or_mixed(whole, corpus, tmp_path):
    before = (whole / "metrics.jsonl").read_bytes()
    with pytest.raises(
        ValueError, match=r"out: got .*; accepted: a new folder, .*; to continue that run: --resume"
    ):
        train(small_run(corpus), whole, console=QUIET)
    with pytest.raises(ValueError, match=r"settings: got train.lr=0.003->0.1"):
        train(small_run(corpus, "train.lr=0.1"), whole, resume=True, console=QUIET)
    with pytest.raises(ValueError, match=r"resume: got .*accepted: the folder of a run"):
        train(small_run(corpus), tmp_path, resume=True, console=QUIET)
    assert (whole / "metrics.jsonl").read_bytes() == before


def test_micro_batches_give_the_same_run(whole, corpus, tmp_path):
    train(small_run(corpus, "train.micro_batch=1", "train.steps=3"), tmp_path / "run", console=QUIET)
    found, wanted = (logged(folder, *VALUES) for folder in (tmp_path / "run", whole))
    # With 3 steps the cosine decay differs from the one of 12 steps, but only after the warm-up.
    for one, other in zip(found[:2], wanted[:2], strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    with pytest.raises(
        ValueError, match=r"train.batch: got 4; accepted: a multiple of micro_batch x processes"
    ):
        train(small_run(corpus, "train.micro_batch=3"), tmp_path / "other", console=QUIET)


def test_dense_and_non_gated_and_qwen2(corpus, tmp_path):
    def last(name, *overrides):
        folder = tmp_path / name
        train(small_run(corpus, "train.steps=2", *overrides), folder, console=QUIET)
        return json.loads((folder / "metrics.jsonl").read_text().splitlines()[1])

    assert "nnz" not in last("silu", "model.activation=silu")
    assert last("plain", "model.gated=false")["nnz"] > 0
    assert last("qwen2", "model.architecture=qwen2", "train.checkpointing=true")["nnz"] > 0


def test_dead_neurons_come_back(corpus, tmp_path, monkeypatch):
    """Half of the gate rows become zero: without revival they stay silent, with it they fire again."""

    def half_dead(*arguments, **options):
        model = build_model(*arguments, **options)
        for layer in model.model.layers:
            with torch.no_grad():
                layer.mlp.gate_proj.weight[::2] = 0
        return model

    monkeypatch.setattr(run_module, "build_model", half_dead)

    def dead(name, *overrides):
        settings = ("train.steps=8", "train.lr=3e-4", *overrides)  # so slow that the others keep firing
        result = train(small_run(corpus, *settings), tmp_path / name, console=QUIET)
        return [line[1:] for line in logged(result.folder, "dead", "revived")]

    assert dead("without") == [(0.5, 0)] * 8
    batch = "recipe.dead_after=128"
    found = dead("with", "recipe.revive_every=4", "recipe.revive_until=8", batch)
    assert found[2] == (0.5, 0)
    # Revived after step 4, before its log.
    assert [line[1] for line in found] == [0, 0, 0, *[2 * 96 / 2] * 5]
    assert found[-1][0] < 0.1


def test_dead_neurons_are_counted_over_the_window_that_is_shown(corpus, tmp_path):
    """Not over the last batch: a neuron that fires in one of the last two is alive."""
    out, found = io.StringIO(), {}
    for batches in (1, 2):
        settings = ("train.steps=4", f"recipe.dead_after={batches * 128}", "model.activation=fatrelu(0.3)")
        result = train(small_run(corpus, *settings), tmp_path / f"{batches}", console=Console(file=out))
        found[batches] = [line[1:] for line in logged(result.folder, "dead", "dead_window")]
    assert [window for _, window in found[1]] == [128] * 4
    assert [window for _, window in found[2]] == [128, 256, 256, 256]
    assert found[1][0] == found[2][0]
    assert all(two < one for (one, _), (two, _) in zip(found[1][1:], found[2][1:], strict=True))
    share = found[2][-1][0]
    assert f"dead {share:.1%} in 256 tokens" in out.getvalue()
    held_out = (
        f"dead {result.summary['held_out_dead']:.1%} in {result.summary['held_out_dead_window']:,} tokens"
    )
    assert held_out in out.getvalue()


def test_a_dense_checkpoint_becomes_sparse(corpus, tmp_path):
    train(small_run(corpus, "train.steps=2", "model.activation=silu"), tmp_path / "dense", console=QUIET)
    start = f"model.init_from={tmp_path / 'dense' / 'model'}"
    result = train(small_run(corpus, "train.steps=2", start), tmp_path / "sparse", console=QUIET)
    assert result.summary["nnz"] > 0
    with pytest.raises(
        ValueError, match=r"data.sequence_length: got 128; accepted: at most the 64 positions"
    ):
        train(small_run(corpus, "data.sequence_length=128", start), tmp_path / "long", console=QUIET)
    with pytest.raises(ValueError, match=r"init_from: got './nowhere'"):
        train(
            small_run(corpus, "model.init_from=./nowhere", "data.tokenizer=train"),
            tmp_path / "x",
            console=QUIET,
        )


def test_a_disk_that_is_full_when_the_model_is_saved(corpus, tmp_path, monkeypatch):
    saved = run_module.SparseTrainer.save_model

    def full(self, folder, _internal_call=False):
        saved(self, folder, _internal_call)
        if not _internal_call:
            raise OSError(errno.ENOSPC, "No space left on device")

    config, folder = small_run(corpus, "train.steps=2"), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(run_module.SparseTrainer, "save_model", full)
        with pytest.raises(OSError, match=r"no space left to write the model; free some, then: .*--resume"):
            train(config, folder, console=QUIET)
    assert not list(folder.glob(".model*"))
    assert not (folder / "model").exists()
    assert train(config, folder, resume=True, console=QUIET).finished


def test_blocks_leave_compiled_graphs_where_that_compiles_more(corpus, monkeypatch):
    def leave(*overrides):
        return run_module.blocks_leave_graphs(small_run(corpus, *overrides))

    assert not leave()
    assert leave("train.compile=true")
    both = "train.compile=true", "train.checkpointing=true"
    assert leave(*both)
    assert not leave(*both, "model.plan=block")  # nothing to decide
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert not leave(*both)
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "true")
    assert not leave("train.compile=true")


def test_compiled_and_checkpointed_runs_compile_layers_inside_their_checkpoints(
    corpus, tmp_path, monkeypatch, fresh_compiler
):
    """Without a compiler behind, which is quick."""
    real, compiled = run_module.training_arguments, []

    def quick(*arguments):
        made = real(*arguments)
        made.torch_compile_backend = "aot_eager"
        return made

    monkeypatch.setattr(run_module, "training_arguments", quick)
    inside = hf.compile_inside_checkpoints
    monkeypatch.setattr(
        hf, "compile_inside_checkpoints", lambda model, **options: compiled.append(inside(model, **options))
    )
    losses = {}
    for compile in ("false", "true"):
        settings = "train.steps=3", "train.checkpointing=true", f"train.compile={compile}"
        folder = tmp_path / compile
        assert train(small_run(corpus, *settings), folder, console=QUIET).finished
        losses[compile] = [value for line in logged(folder, "loss", "l1_loss") for value in line]
    assert len(compiled) == 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert losses["true"] == pytest.approx(losses["false"], rel=1e-4)
