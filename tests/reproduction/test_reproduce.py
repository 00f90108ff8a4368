"""`twell reproduce` with few steps: to the end, killed and continued, interrupted, in a folder of another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
pytest.importorskip("datasets")
from PIL import Image
from typer.testing import CliRunner

from twell.cli.app import app
from twell.reproduction import run as runs
from twell.reproduction.results import tables
from twell.train.run_folder import exclusive

from ..train.runs import ROOT, write_corpus
from ..train.test_run import disturbed

STEPS = 6


def arguments(folder, *more: str) -> list[str]:
    return [
        "reproduce",
        *("--scale", "tiny", "--text", str(folder / "corpus"), "--out", str(folder / "out")),
        f"data.cache={folder / 'cache'}",
        *("data.vocab_size=384", "data.sequence_length=32", "data.held_out=0.1", "data.held_out_tokens=2000"),
        *("model.hidden_size=64", "model.intermediate_size=128", "model.positions=128"),
        *("train.batch=4", "train.warmup=1", "train.log_every=1", "train.save_every=2"),
        f"train.steps={STEPS}",
        *more,
    ]


def reproduce(folder, *more: str):
    return CliRunner().invoke(app, arguments(folder, *more), catch_exceptions=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Shared by the tests, in their order: a corpus, and what the first of them has trained."""
    root = tmp_path_factory.mktemp("reproduce")
    write_corpus(root / "corpus")
    return root


def begun(folder):
    """The folder with what the first test trains, also where another worker ran that test."""
    if not (folder / "out" / "results.json").exists():
        assert reproduce(folder, "--experiments", "activation").exit_code == 0
    return folder / "out"


# In the process that is killed: SIGKILL, after the third step of the run named last on its command line.
KILLED = """
import os, signal, sys
from transformers import TrainerCallback
from twell.train import run
from twell.cli import main

victim = sys.argv.pop()

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if args.output_dir.endswith(victim) and state.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)

real = run.SparseTrainer.train

def train(self, **options):
    self.add_callback(Kill())
    return real(self, **options)

run.SparseTrainer.train = train
main()
"""


def test_a_killed_reproduction_is_continued(folder):
    """Killed while the second run trains: the first is not trained again, the second is resumed."""
    out = folder / "out"
    more = ("--experiments", "activation")
    command = [sys.executable, "-c", KILLED, *arguments(folder, *more), "lambda-0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    second = out / "runs" / "lambda-0"
    assert (second / "checkpoint-2" / "manifest.json").exists()
    assert not (second / "summary.json").exists()
    summary = out / "runs" / "silu" / "summary.json"
    written, trained = summary.stat().st_mtime_ns, (out / "runs" / "silu" / "model").stat().st_mtime_ns
    result = reproduce(folder, *more)
    assert result.exit_code == 0, result.output
    assert "run 2 of 2: lambda-0" in result.output
    assert "resuming from checkpoint-2" in result.output
    assert summary.stat().st_mtime_ns == written
    assert (out / "runs" / "silu" / "model").stat().st_mtime_ns == trained
    found = json.loads((out / "results.json").read_text())
    assert {name: run["summary"]["steps"] for name, run in found["runs"].items()} == {
        "silu": STEPS,
        "lambda-0": STEPS,
    }
    assert not list(out.glob("runs/*/checkpoint-*"))


def test_more_experiments_in_the_same_folder_with_a_ctrl_c(folder, monkeypatch):
    """Tables hold what the runs' own files say, plots are there, speed is measured, nothing runs twice."""
    out = begun(folder)
    speed = (out / "runs" / "lambda-0" / "speed.json").read_text()
    with monkeypatch.context() as patch:
        disturbed(patch, 3, lambda: signal.raise_signal(signal.SIGINT))
        result = reproduce(folder, "--experiments", "gate")
    assert result.exit_code == 130
    assert result.output.splitlines()[-1] == "stopped; the same command continues"
    result = reproduce(folder, "--experiments", "gate")
    assert result.exit_code == 0, result.output
    assert "resuming from checkpoint-3" in result.output
    assert (out / "runs" / "lambda-0" / "speed.json").read_text() == speed
    found = json.loads((out / "results.json").read_text())
    assert set(found["runs"]) == {
        *("silu", "lambda-0", "lambda-2e-5"),
        *("non-gated-lambda-0", "non-gated-lambda-2e-5"),
    }
    for name, run in found["runs"].items():
        summary = json.loads((out / "runs" / name / "summary.json").read_text())
        assert run["summary"] == summary
        assert len(run["curve"]) == STEPS
        if name == "silu":
            assert run["speed"] == {}
            continue
        assert sum(run["nnz_by_layer"]) / 2 == pytest.approx(summary["held_out_nnz"])
        for workload in ("forward", "step"):
            one = run["speed"][workload]
            assert one["low"] <= one["gain"] <= one["high"]
            assert one["difference"] < 1e-2
    activation, gate = tables(found)
    loss = found["runs"]["silu"]["summary"]["held_out_ce_loss"]
    base = found["runs"]["lambda-0"]["summary"]["held_out_ce_loss"]
    assert activation.rows[0][2:5] == (f"{loss:.3f}", f"{loss / base - 1:+.1%}", "- / 47.1")
    row = dict(zip(gate.columns, gate.rows[1], strict=True))
    assert row["lambda"] == "2e-3 / 2e-5"
    assert row["active"].endswith(" / 29 (0.51%)")
    assert row["forward"].endswith("x / 1.188x")
    page = (out / "results.md").read_text()
    assert " | ".join(gate.rows[1]) in page
    for plot in ("training.png", "speedup.png"):
        with Image.open(out / plot) as image:
            assert min(image.size) > 300


def test_a_run_that_does_not_fit_does_not_end_the_others(folder, monkeypatch):
    """Whoever raises: a CPU's allocator and cuBLAS have no error class of their own."""
    real = runs.train

    def train(config, *arguments, **options):
        if config.model.activation == "silu":
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes")
        return real(config, *arguments, **options)

    monkeypatch.setattr(runs, "train", train)
    more = ("--experiments", "activation", "--out", str(folder / "no-room"))
    result = reproduce(folder, *more, "train.steps=3")
    assert result.exit_code == 1
    assert "silu failed: [enforce fail] DefaultCPUAllocator" in result.output
    assert result.output.splitlines()[-1] == "failed: silu; the same command tries again"
    assert (folder / "no-room" / "runs" / "lambda-0" / "speed.json").exists()


def test_a_run_with_a_bug_ends_the_command(folder, monkeypatch):
    def train(*_, **__):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(runs, "train", train)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        reproduce(folder, "--experiments", "activation", "--out", str(folder / "bug"))


def test_a_run_that_diverges_does_not_end_the_others(folder):
    """Also: it is tried again."""
    more = ("--experiments", "activation", "--out", str(folder / "diverged"), "train.clip=0")
    for _ in range(2):
        result = reproduce(folder, *more, "train.steps=3", "train.lr=1e30", "train.warmup=0")
        assert result.exit_code == 1
        assert result.output.splitlines()[-1] == "failed: silu, lambda-0; the same command tries again"
        found = json.loads((folder / "diverged" / "results.json").read_text())
        assert all("step" in run["failure"] for run in found["runs"].values())


def test_two_at_once_do_not_share_a_folder(folder):
    out = folder / "out"
    out.mkdir(exist_ok=True)
    with (
        exclusive(out, "out"),
        pytest.raises(ValueError, match=r"^out: got .*; accepted: a folder that no other process is using"),
    ):
        reproduce(folder, "--experiments", "activation")


def test_the_folder_of_something_else_is_refused(folder):
    begun(folder)
    with pytest.raises(ValueError, match="begun with other settings or another text"):
        reproduce(folder, "--experiments", "activation", "train.lr=1e-4")
    with pytest.raises(ValueError, match=r"^out: got .*corpus.*; accepted: a new or empty folder"):
        reproduce(folder, "--out", str(folder / "corpus"))
    assert not any(path.name.startswith(".") for path in (folder / "corpus").iterdir())
