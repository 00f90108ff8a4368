"""Same command, same machine, same bits: a run keeps the measurements it began with."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from safetensors.torch import load_file

from twell import crossover, policy, recorded_paths
from twell.kernels.cpu import measurements
from twell.train.run import train

from .runs import QUIET, ROOT, logged, small_run, write_corpus

pytestmark = pytest.mark.real_cpu


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine(limit): pretend to be an unknown CPU whose row path has this limit."""
    monkeypatch.setattr(policy.cpu, "_WORTH_LOOKING_SECONDS", 0.0)
    monkeypatch.setattr(policy.cpu, "_MANY_WORTH_LOOKING_SECONDS", 0.0)
    monkeypatch.setattr("twell.policy.cpu._MIN_HIDDEN", 1)
    monkeypatch.setattr("twell.policy.cpu._MAX_DENSITY", {torch.float32: 1.0})

    def become(limit: float) -> None:
        monkeypatch.setenv("TWELL_CACHE", str(tmp_path / f"cache-{limit}"))
        monkeypatch.setattr(crossover, "_measure_row_limit", lambda site: limit)
        monkeypatch.setattr(crossover, "_measure_block_gain", lambda site: 0.0)
        measurements._known.clear()

    yield become
    measurements._known.clear()


def same_weights(one, other) -> bool:
    a, b = (load_file(folder / "model" / "model.safetensors") for folder in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_resumed_run_keeps_its_measurements(corpus, tmp_path, machine, monkeypatch):
    config = small_run(corpus, "train.steps=8", "recipe.l1=0")
    machine(1.0)
    with recorded_paths() as ran:
        train(config, tmp_path / "row", console=QUIET)
    assert {piece.path for piece in ran if piece.phase == "forward" and piece.tokens == 128} == {"row"}
    machine(0.0)
    train(config, tmp_path / "dense", console=QUIET)
    assert not same_weights(tmp_path / "row", tmp_path / "dense")  # the choice shows in the bits

    class EndedError(Exception):
        pass

    def end(*_):
        raise EndedError

    machine(1.0)
    with monkeypatch.context() as context:
        context.setattr("twell.train.run._finish", end)
        with pytest.raises(EndedError):
            train(config, tmp_path / "resumed", console=QUIET)
    (tmp_path / "resumed" / "checkpoint-8" / "manifest.json").unlink()  # as if killed while saving it
    machine(0.0)  # the machine measures something else now
    train(config, tmp_path / "resumed", resume=True, console=QUIET)
    assert same_weights(tmp_path / "row", tmp_path / "resumed")
    stored = json.loads((tmp_path / "resumed" / "choices.json").read_text())
    assert set(stored[measurements._machine()].values()) == {1.0}


def test_a_busy_moment_does_not_turn_a_run_dense(corpus, tmp_path, machine, monkeypatch):
    """The usual limit counts, for the whole run, also where it is resumed on a quiet machine."""
    config = small_run(corpus, "train.steps=4", "train.save_every=2", "recipe.l1=0")
    monkeypatch.setattr(crossover, "_USUAL_LIMIT", 1.0)
    for name in ("whole", "resumed"):
        monkeypatch.setattr(measurements, "is_busy", lambda: True)
        machine(0.0)
        with recorded_paths() as ran:
            train(config, tmp_path / name, console=QUIET)
        assert {piece.path for piece in ran if piece.phase == "forward" and piece.tokens == 128} == {"row"}
    shutil.rmtree(tmp_path / "resumed" / "checkpoint-4")
    shutil.rmtree(tmp_path / "resumed" / "model")
    before = (tmp_path / "resumed" / "choices.json").read_text()
    monkeypatch.setattr(measurements, "is_busy", lambda: False)
    machine(0.0)
    train(config, tmp_path / "resumed", resume=True, console=QUIET)
    assert (tmp_path / "resumed" / "choices.json").read_text() == before
    assert same_weights(tmp_path / "whole", tmp_path / "resumed")


def test_the_same_command_twice_and_killed_in_between(corpus, tmp_path):
    """Processes of their own, real measurements, real SIGKILL."""
    config = tmp_path / "config.yaml"
    from twell.train.settings import to_yaml

    config.write_text(
        to_yaml(
            small_run(
                corpus,
                "model.hidden_size=256",
                "model.intermediate_size=1024",
                "train.steps=10",
                "train.batch=8",
                "train.save_every=2",
            )
        )
    )
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    environment = os.environ | fixed | {"TWELL_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "twell.cli", "train"]

    def start(*arguments):
        return subprocess.Popen([*command, *map(str, arguments)], env=environment, stdout=subprocess.DEVNULL)

    for name in ("one", "two"):
        assert start("--config", config, "--out", tmp_path / name).wait(timeout=200) == 0
    assert same_weights(tmp_path / "one", tmp_path / "two")
    assert logged(tmp_path / "one", "loss", "nnz") == logged(tmp_path / "two", "loss", "nnz")

    killed = tmp_path / "killed"
    process = start("--config", config, "--out", killed)
    deadline = time.monotonic() + 200
    while not (killed / "checkpoint-4" / "manifest.json").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    assert start("--resume", killed).wait(timeout=200) == 0
    assert same_weights(tmp_path / "one", killed)
    assert logged(tmp_path / "one", "loss", "nnz") == logged(killed, "loss", "nnz")
