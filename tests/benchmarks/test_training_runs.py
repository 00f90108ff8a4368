"""The benchmark of whole training runs: a tiny run on the CPU, and its record."""

from __future__ import annotations

import sys

import pytest

from twell.measure import RunRecord, read_records

for module in ("transformers", "accelerate", "tokenizers", "datasets", "yaml"):
    pytest.importorskip(module)

from ..scripts import benchmark_modules
from ..train.runs import write_corpus

SETTINGS = (
    "model.hidden_size=32",
    "model.intermediate_size=96",
    "model.heads=2",
    "model.layers=2",
    "model.positions=64",
    "data.vocab_size=384",
    "data.sequence_length=32",
    "train.steps=4",
    "train.batch=4",
    "train.log_every=1",
)


@pytest.fixture(scope="module")
def benchmark():
    with benchmark_modules("training_runs") as (module,):
        yield module


def test_a_run_becomes_a_record(benchmark, tmp_path, monkeypatch):
    from twell.train.data import DataConfig, prepare

    corpus = write_corpus(tmp_path / "corpus")
    sizes = {"vocab_size": 384, "sequence_length": 32, "held_out": 0.1}
    prepare(DataConfig(source=str(corpus), cache=str(tmp_path / "cache"), **sizes), quiet=True)
    (data,) = (path for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir())
    monkeypatch.setitem(benchmark.SUITES, "wide", ("tiny", SETTINGS, {"auto": ()}))
    arguments = ("wide", "--data", str(data), "--commit", "abc1234", "--out", str(tmp_path / "runs.jsonl"))
    monkeypatch.setattr(sys, "argv", ["training_runs.py", *arguments])
    benchmark.main()
    (run,) = read_records(tmp_path / "runs.jsonl", RunRecord)
    assert (run.what, run.preset, run.commit) == ("training_runs/wide/auto", "tiny", "abc1234")
    assert run.settings == list(SETTINGS)
    assert run.curve["tokens"] == [128 * step for step in (1, 2, 3, 4)]
    assert run.summary["steps"] == run.last["step"] == 4
