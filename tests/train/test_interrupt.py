"""Runs stopped by signals: a second Ctrl-C, or a kill that their data loaders survive."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from typer.testing import CliRunner

from twell.cli.app import app
from twell.train.checkpoints import newest_whole, step_of
from twell.train.data import token_files
from twell.train.run import train
from twell.train.run_folder import claimed
from twell.train.settings import to_yaml

from .runs import QUIET, ROOT, small_run
from .test_run import disturbed


def run_to_interrupt(corpus, folder, *overrides):
    settings = corpus.parent / "run.yaml"
    settings.write_text(to_yaml(small_run(corpus, *overrides)))
    return CliRunner().invoke(app, ["train", "--config", str(settings), "--out", str(folder)])


def interrupt_twice():
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


def test_a_second_ctrl_c_says_what_is_kept(corpus, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        disturbed(patch, 6, interrupt_twice)
        result = run_to_interrupt(corpus, folder)
    assert result.exit_code == 130
    kept = folder / "checkpoint-4"
    assert result.output.splitlines()[-1] == (
        f"stopped at once; step 4 is saved in {kept}; to continue: twell train --resume {folder}"
    )
    assert newest_whole(folder) == kept
    again = CliRunner().invoke(app, ["train", "--resume", str(folder)])
    assert again.exit_code == 0
    assert "resuming from checkpoint-4" in again.output


def test_ctrl_c_before_anything_is_saved(corpus, tmp_path, monkeypatch):
    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    folder = tmp_path / "run"
    monkeypatch.setattr(token_files, "write_token_files", interrupted)
    result = run_to_interrupt(corpus, folder)
    assert result.exit_code == 130
    assert result.output.splitlines()[-1] == (
        f"stopped at once; no step was saved; to continue: twell train --resume {folder}"
    )


def _children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_a_killed_run_can_be_resumed_while_its_workers_live(corpus, tmp_path, monkeypatch):
    """The workers are stopped, so that they certainly outlive their run."""
    folder, settings = tmp_path / "run", tmp_path / "run.yaml"
    config = small_run(corpus, "train.workers=2", "train.steps=100000", "train.save_every=2", "train.keep=2")
    settings.write_text(to_yaml(config))
    command = [sys.executable, "-m", "twell.cli", "train", "--config", str(settings), "--out", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    workers = []
    try:
        while not list(folder.glob("checkpoint-*/manifest.json")):
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        with pytest.raises(ValueError, match="a folder that no other process is using"):
            train(config, folder, resume=True, console=QUIET)
        workers = _children(process.pid)
        assert len(workers) >= 2
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)
        process.kill()
        process.wait()
        assert all(Path(f"/proc/{worker}").exists() for worker in workers)
        step = step_of(newest_whole(folder)) + 1
        disturbed(monkeypatch, step, lambda: signal.raise_signal(signal.SIGINT))
        result = train(config, folder, resume=True, console=QUIET)
        assert result.summary == {"step": step}
    finally:
        process.kill()
        process.wait()
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_what_a_run_forks_neither_holds_its_folder_nor_lets_others_in(corpus, tmp_path):
    config, folder = small_run(corpus), tmp_path / "run"
    (ready, say_ready), (done, say_done) = os.pipe(), os.pipe()
    with claimed(config, folder, resume=False, first=True):
        child = os.fork()
        if not child:
            os.close(say_done)
            os.write(say_ready, b".")
            os.read(done, 1)  # until the test has closed its end
            os._exit(0)
        try:
            os.read(ready, 1)
            with (
                pytest.raises(ValueError, match="a folder that no other process is using"),
                claimed(config, folder, resume=True, first=True),
            ):
                pass
            held = {os.readlink(path) for path in Path(f"/proc/{child}/fd").iterdir()}
            assert str(folder / ".twell-lock") not in held
        finally:
            os.close(say_done)
            os.waitpid(child, 0)
            for end in (ready, say_ready, done):
                os.close(end)
    with claimed(config, folder, resume=True, first=True):
        pass
