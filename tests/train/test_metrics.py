"""The metrics file: one line per step and kind, whatever has happened to the run or to the file."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")


from twell.train import run as run_module
from twell.train.metrics import check_reporters, cut_after, read_metrics
from twell.train.run import train

from .runs import QUIET, small_run, write_corpus


def write(path, *lines):
    path.write_bytes(b"".join(lines))
    return path


def log(step, **more):
    return json.dumps({"step": step, "ce_loss": 1.0, **more}).encode() + b"\n"


def test_a_bad_line_takes_no_other_with_it(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("twell._log._logged", set())
    bad = [b'{"step": 2, "ce_l\n', b"\xff\xfe\n", b"[]\n", b"{}\n", b'{"step": true}\n', b"\n"]
    path = write(tmp_path / "m.jsonl", log(1), *bad, log(3), b'{"step": 4')
    assert [line["step"] for line in read_metrics(path)] == [1, 3]
    assert [line["step"] for line in read_metrics(path)] == [1, 3]
    assert [r.message for r in caplog.records] == [
        f"twell: {path}: skipped what cannot be read, line 2, 3, 4, 5, 6, 9"
    ]


def test_steps_are_unique_and_the_last_word_counts(tmp_path):
    path = write(tmp_path / "m.jsonl", log(1), log(2, try_=1), log(2, try_=2), log(3))
    assert [(line["step"], line.get("try_")) for line in read_metrics(path)] == [(1, None), (2, 2), (3, None)]


def test_what_comes_after_a_checkpoint_is_cut(tmp_path):
    end = b'{"step": 2, "train_runtime": 1.0}\n'
    evaluation = b'{"step": 2, "eval_loss": 1.0}\n'
    path = write(tmp_path / "m.jsonl", log(1), b"bad\n", log(2), evaluation, end, log(3), b'{"step')
    assert cut_after(path, 2) == read_metrics(path)
    assert path.read_bytes().count(b"\n") == 3
    assert ["eval_loss" in line for line in read_metrics(path)] == [False, False, True]
    cut_after(tmp_path / "none.jsonl", 2)
    assert not (tmp_path / "none.jsonl").exists()


@pytest.mark.parametrize("evaluate", [0, 2])
def test_a_run_that_died_at_its_end_logs_nothing_twice(tmp_path, monkeypatch, evaluate):
    def power_cut(*_arguments, **_options):
        raise RuntimeError("power cut")

    corpus, folder = write_corpus(tmp_path / "corpus"), tmp_path / "run"
    config = small_run(corpus, "train.steps=4", f"train.eval_every={evaluate}", "train.save_every=2")
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_summary", power_cut)
        with pytest.raises(RuntimeError, match="power cut"):
            train(config, folder, console=QUIET)
    assert train(config, folder, resume=True, console=QUIET).finished
    train(config, tmp_path / "whole", console=QUIET)

    def lines(run):
        found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [
            (line["step"], line.get("ce_loss"), line.get("eval_loss"), "train_runtime" in line)
            for line in found
        ]

    assert sorted(lines(folder), key=str) == sorted(lines(tmp_path / "whole"), key=str)
    assert len(set(lines(folder))) == len(lines(folder))


def test_what_else_is_logged_at_a_step_has_a_line_of_its_own(tmp_path):
    from types import SimpleNamespace

    from twell.train.metrics import MetricsFile, read_metrics

    file = MetricsFile(tmp_path / "metrics.jsonl", 10)
    state = SimpleNamespace(is_world_process_zero=True, global_step=3)
    for logs in ({"loss": 1.0, "ce_loss": 1.0}, {"test_loss": 2.0}, {"loss": 1.5, "ce_loss": 1.5}):
        file.on_log(None, state, None, logs=logs)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["test_loss"] for line in lines if "test_loss" in line] == [2.0]
    assert [line["loss"] for line in lines if "loss" in line] == [1.5]


@pytest.mark.parametrize("names", [(), ("none",), ("all",)])
def test_reporters_that_need_nothing(names):
    check_reporters(names)


def test_a_reporter_that_is_installed():
    pytest.importorskip("tensorboard")
    check_reporters(("tensorboard",))
