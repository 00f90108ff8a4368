"""Tables of `twell bench`, made of its records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twell.measure import write_records
from twell.measure.records import source
from twell.measure.results import Measured, records_of

from ..scripts import benchmark_modules

SHAPE = {"model": "paper-2b", "layers": 38, "H": 5632, "batch": 32, "sequence": 2048, "dtype": "bfloat16"}
GPU = {
    "device": "cuda",
    "gpu": "NVIDIA H200",
    "sm_clock_mhz": 1700,
    "power_w": 640.0,
    "power_limit_w": 700.0,
    "temperature_c": 60,
    "idle_power_w": 80.0,
    "energy_from": "NVML energy counter",
}


@pytest.fixture
def tables(tmp_path, monkeypatch):
    with benchmark_modules("tables_bench") as (module,):
        monkeypatch.setattr(module, "INFERENCE", tmp_path / "inference.jsonl")
        monkeypatch.setattr(module, "TRAINING", tmp_path / "training.jsonl")
        yield module


def measured(workload: str, contender: str, seconds: float, **shape: object) -> Measured:
    return Measured(
        workload=workload,
        contender=contender,
        meaning=f"{contender} in words",
        shape={**SHAPE, **shape},
        tokens=65536,
        seconds=(seconds, seconds),
        joules=(seconds * 600,),
        power=GPU,
        sparsity={"nnz": 24.1},
        details={
            "peak_bytes": 12 * 2**30,
            "same_tokens_as_dense": 0.991,
            "largest_difference": 4e-3,
            "loss": 10.8,
            "block_error": 3e-3,
        },
        error=2e-3,
    )


def records(what: str, *found: Measured) -> list:
    return records_of(what, found, source=source("cpu", None) | {"commit": "abc1234"}, seed=0)


def test_without_records_every_table_says_so(tables):
    assert {table() for table in tables.TABLES.values()} == {tables.NOT_MEASURED}


def test_inference(tables):
    old = records("bench_inference", measured("forward", "dense-eager", 9.0))
    new = records(
        "bench_inference",
        measured("forward", "dense-eager", 0.6),
        measured("forward", "best-dense", 0.5),
        measured("forward", "ours-compiled", 0.4),
    )
    write_records(tables.INFERENCE, [*old, *new])
    rows = tables.forward().splitlines()[2:]
    assert rows[0] == "| 2B | 24 | 32 | 2048 | dense eager | 109.2 |  | 5.49 | 12.0 GiB | 4e-03 | 99.1% |"
    assert len(rows) == 3  # the one that was measured again counts
    assert "| ours compiled | 163.8 | **1.50x** (1.50-1.50) | 3.66 |" in rows[2]
    assert "| 2B, 24 active, forward | best dense | **1.25x** | 1.25 to 1.25 | 0.80x |" in tables.gains()
    assert tables.best_dense() == "- 2B: best-dense in words."
    assert "NVIDIA H200" in tables.measured_on()
    assert "640 W of 700 W, up to 60 C, idle 80.0 W" in tables.measured_on()
    assert tables.forward("cpu") == tables.NOT_MEASURED


def test_the_best_dense_way_of_every_process_is_named(tables):
    ways = [
        measured("forward", "best-dense", 0.5).plus(process=process, meaning=f"{way}: in words")
        for process, way in enumerate(("merged gate-up", "max-autotune"))
    ]
    write_records(tables.INFERENCE, records("bench_inference", *ways))
    assert (
        tables.best_dense() == "- 2B: process 1: merged gate-up: in words; process 2: max-autotune: in words."
    )


def test_models_that_fire_other_numbers_of_neurons_are_others(tables):
    names = ("dense-eager", "dense-compiled", "ours-eager", "ours-compiled")
    found = [measured("forward", one, 0.6) for one in names]
    sparse = records("bench_inference", *found)
    less = records("bench_inference", *(one.plus(sparsity={"nnz": 1500.2}) for one in found))
    write_records(tables.INFERENCE, [*sparse, *less])
    active = [row.split(" | ")[1] for row in tables.forward().splitlines()[2:]]
    assert active == ["24"] * 4 + ["1500"] * 4
    with benchmark_modules("tables_headline") as (headline,):
        found = headline._latest_run(tables.INFERENCE, "forward")
    assert found["ours-compiled"].sparsity["nnz"] == 24.1


def test_the_headline_compares_like_with_like_in_the_newest_run(tables, monkeypatch):
    names = ("dense-eager", "dense-compiled", "best-dense", "ours-eager", "ours-compiled")
    found = [measured("forward", *one) for one in zip(names, (0.8, 0.6, 0.5, 0.6, 0.4), strict=True)]

    def run(month: int, *of_it: Measured) -> list:
        date = f"2026-{month:02}-01T12:00:00+00:00"
        return [replace(record, date=date) for record in records("bench_inference", *of_it)]

    old, newest = run(1, measured("forward", "ours-compiled", 9)), run(2, *found)
    without_ours = run(3, *(one.plus(seconds=(7.0, 7.0), joules=(9e3,)) for one in found[:2]))
    wrong = [one.plus(seconds=(0.1, 0.1)) for one in found]
    doubtful = run(4, *wrong[:-1], wrong[-1].plus(details={**wrong[-1].details, "doubtful": 1}))
    training = [
        measured("step", name, s, batch=8) for name, s in zip(names, (0.8, 0.6, 0.5, 0.6, 0.4), strict=True)
    ]
    with benchmark_modules("tables_headline") as (headline,):
        monkeypatch.setattr(headline, "tables_bench", tables)
        for later in ([], without_ours, doubtful):
            write_records(tables.INFERENCE, [*old, *newest, *later])
            assert headline.headline().splitlines()[2:5] == [
                "| forward pass, 32 x 2,048 tokens | **1.50x** | **1.33x** |",
                "| the same, against the best dense way | **1.25x** |  |",
                "| its energy per token | -33% | -25% |",
            ]
        interrupted = run(5, *(one.plus(seconds=(0.1,), joules=()) for one in found))
        write_records(tables.INFERENCE, [*old, *newest, *interrupted])
        assert "| forward pass, 32 x 2,048 tokens | **1.50x** | **1.33x** |" in headline.headline()
        assert "| ours compiled | 163.8 |" in tables.forward()
        assert headline.bars_data() == {}  # training was not measured
        write_records(tables.TRAINING, records("bench_training", *training))
        pace = headline.bars_data()["Forward pass, tokens per ms\n(more is better)"]
        assert {name: round(value, 2) for name, value in pace.items()} == {
            "PyTorch": 81.92,
            "PyTorch, torch.compile": 109.23,
            "twell, torch.compile": 163.84,
        }
        write_records(tables.INFERENCE, [*newest, *without_ours])
        # Energy is that of the same run.
        assert "| 2B, 24 active, forward | dense eager | **2.00x** | 2.00 to 2.00 | 0.50x |" in tables.gains()


def test_the_headline_needs_the_best_dense_way_to_compute_the_same(tables, monkeypatch):
    names = ("dense-eager", "dense-compiled", "best-dense", "ours-eager", "ours-compiled")
    found = [measured("forward", *one) for one in zip(names, (0.8, 0.6, 0.5, 0.6, 0.4), strict=True)]
    found[2] = found[2].plus(details={**found[2].details, "doubtful": 1})
    write_records(tables.INFERENCE, records("bench_inference", *found))
    with benchmark_modules("tables_headline") as (headline,):
        monkeypatch.setattr(headline, "tables_bench", tables)
        rows = headline.headline().splitlines()[2:]
    assert rows[0] == "| forward pass, 32 x 2,048 tokens | **1.50x** | **1.33x** |"
    assert not any("best dense" in row for row in rows)


def test_what_computes_something_else_gains_nothing(tables):
    dense, ours = (measured("forward", one, s) for one, s in (("dense-eager", 0.6), ("ours-compiled", 0.3)))
    wrong = ours.plus(details={**ours.details, "doubtful": 1})
    write_records(tables.INFERENCE, records("bench_inference", dense, wrong))
    assert "ours compiled (computes something else)" in tables.forward()
    assert tables.gains() == tables.NOT_MEASURED


def test_training(tables):
    found = [
        measured(workload, contender, seconds, checkpointing=workload == "checkpointed")
        for workload in ("step", "checkpointed")
        for contender, seconds in (("dense-eager", 0.4), ("ours-compiled", 0.2))
    ]
    write_records(tables.TRAINING, records("bench_training", *found))
    assert [row.split(" | ")[3] for row in tables.training().splitlines()[2:]] == ["off", "off", "on", "on"]
    assert "| 2B, 24 active, checkpointed training step | dense eager | **2.00x** |" in tables.gains()


def test_training_of_models_that_are_not_sparse_has_a_table_of_its_own(tables):
    some_layers = {"layers": 8, "checkpointing": False}
    dense, ours = (
        measured("step", one, s, **some_layers) for one, s in (("dense-eager", 0.4), ("ours-compiled", 0.5))
    )
    active = {"sparsity": {"nnz": 1500.2}}
    write_records(tables.TRAINING, records("bench_training", dense.plus(**active), ours.plus(**active)))
    assert tables.training() == tables.gains() == tables.NOT_MEASURED
    rows = tables.TABLES["bench-training-not-sparse"]().splitlines()[2:]
    assert [row.split(" | ")[:2] for row in rows] == [["| 2B's width", "1500"]] * 2
    assert "**0.80x** (0.80-0.80)" in rows[1]
