"""The commands of a report measure what its records say: every option arrives where `twell bench` begins."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from twell.cli import bench
from twell.cli.app import app
from twell.measure.inference import FORWARD, generation_contenders
from twell.measure.models import preset_size
from twell.measure.records import Record, read_records
from twell.report.origin_sections import bench_command
from twell.report.record_names import comparison, is_real

from .conftest import bench_records

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture
def options_of(monkeypatch):
    """A command -> the options that it would run with, whatever this machine has."""
    found: list[Any] = []
    monkeypatch.setattr(bench, "_device", lambda given: given)
    monkeypatch.setattr("twell.measure.training.has_liger", lambda: True)
    monkeypatch.setattr(bench, "_run", lambda what, job, options, **shared: found.append((options, shared)))

    def run(command: str) -> tuple[Any, dict[str, Any]]:
        found.clear()
        done = CliRunner().invoke(app, shlex.split(command)[1:])
        assert done.exit_code == 0, (command, done.output, done.exception)
        return found[0]

    return run


def groups_of(records: list[Record]) -> list[list[Record]]:
    found: dict[tuple, list[Record]] = {}
    for record in records:
        found.setdefault(comparison(record), []).append(record)
    return list(found.values())


def committed() -> list[list[Record]]:
    return [
        group
        for name in ("bench_inference", "bench_training")
        for group in groups_of(read_records(RESULTS / f"{name}.jsonl"))
    ]


def some(workload: str, *contenders: str, device: str = "cpu", **changes: Any) -> list[Record]:
    """A comparison of made-up records: of `bench_records`, with other names and shapes."""
    first = bench_records()[0]
    shape = {**first.shape, **changes.pop("shape", {})}
    if workload.startswith("bench_training"):
        for name in ("dtype", "text"):
            del shape[name]
        shape = {"precision": "float32", "checkpointing": workload.endswith("checkpointed"), **shape}
    elif workload.endswith("generation"):
        del shape["sequence"]
        shape |= {"prompt": 16, "new_tokens": 8}
    if workload.endswith("micro-batch"):
        del shape["batch"]
    return [
        dataclasses.replace(
            first,
            what=f"{workload}/{one}",
            shape=shape,
            hardware={**first.hardware, "device": device},
            **changes,
        )
        for one in contenders
    ]


FORWARD_WORK, GENERATION = "bench_inference/forward", "bench_inference/generation"
STEP, SEARCH = "bench_training/step", "bench_training/micro-batch"
MADE_UP = [
    some(FORWARD_WORK, "dense-eager", "ours-eager"),
    some(FORWARD_WORK, "dense-compiled", "ours-compiled"),
    some(FORWARD_WORK, *FORWARD, device="cuda"),
    some(FORWARD_WORK, "dense-eager", "ours-compiled", device="cuda"),
    some(FORWARD_WORK, "dense-eager", "ours-eager", sparsity={"nnz": 0.4}),
    some(FORWARD_WORK, "dense-eager", "ours-eager", sparsity={"nnz": 11.7, "wanted_nnz": 11.25}),
    some(FORWARD_WORK, "dense-eager", "ours-eager", sparsity={"nnz": 14.0, "wanted_nnz": 12}),
    some(GENERATION, "dense-eager", "ours-eager"),
    some(GENERATION, "dense-captured", "ours-captured", device="cuda"),
    some(STEP, "dense-compiled", "ours-compiled"),
    some(STEP, "dense-eager", "dense-compiled", "ours-eager", "ours-compiled", device="cuda"),
    some(STEP, "dense-autotuned", "dense-liger", "ours-compiled", device="cuda"),
    some("bench_training/checkpointed", "dense-eager", "ours-eager"),
    some(SEARCH, "dense-eager", "ours-eager", shape={"memory_gib": "0.25"}, sparsity={"wanted_nnz": 3.5}),
    some(SEARCH, "dense-eager", "ours-eager", device="cuda", sparsity={}),
    some(SEARCH, "ours-eager", device="cuda", sparsity={}),
]


@pytest.mark.parametrize("group", [*committed(), *MADE_UP], ids=lambda group: group[0].what)
def test_a_command_repeats_its_comparison(options_of, group):
    record, shape = group[0], group[0].shape
    kind, workload, _ = record.what.split("/")
    options, shared = options_of(bench_command(group))
    assert options.device == record.hardware["device"]
    assert shared["processes"] == record.details["processes"]
    assert options.rounds == record.details["rounds"] or workload == "micro-batch"
    assert options.seed == record.seed

    ran = {one.what.rsplit("/", 1)[-1] for one in group}
    if workload == "micro-batch":  # only these are searched for
        assert {name for name in options.contenders if name.endswith("eager")} == ran
        assert options.search
        wanted = shape.get("memory_gib")
        assert options.memory == (None if wanted is None else int(float(wanted) * 2**30))
    elif kind == "bench_training":
        assert {*options.contenders} == ran
        assert (options.batch, options.search) == (shape["batch"], False)
    else:
        known = FORWARD if workload == "forward" else generation_contenders(torch.device(options.device))
        assert {*options.contenders} & known.keys() == ran
        assert options.workloads == (workload,)
        assert options.dtype == shape["dtype"]
    if kind == "bench_training":
        assert (options.sequence, options.precision) == (shape["sequence"], shape["precision"])
        assert options.checkpointing == (shape["checkpointing"],)
    elif workload == "forward":
        assert options.shapes == ((shape["batch"], shape["sequence"]),)
    else:
        found = options.prompts, options.prompt_length, options.new_tokens
        assert found == ((shape["batch"],), shape["prompt"], shape["new_tokens"])

    if kind == "bench_inference" and is_real(record):
        assert (options.model, options.text, options.preset) == ("MODEL", ("FILE",), None)
        return
    assert (options.preset, options.layers) == (shape["model"], shape["layers"])
    built = preset_size(options.preset, nnz=options.nnz).nnz
    if "wanted_nnz" in record.sparsity:
        assert built == record.sparsity["wanted_nnz"]
    elif "nnz" in record.sparsity:
        assert built == pytest.approx(record.sparsity["nnz"], rel=0.04)


@pytest.mark.parametrize(
    ("sparsity", "said"),
    [
        ({"nnz": 0.4}, "--nnz 0.4 "),
        ({"nnz": 1499.989}, "--nnz 1500 "),
        ({"nnz": 24.16, "wanted_nnz": 24.03125}, "--nnz 24.03125 "),
        ({"nnz": 24.16, "wanted_nnz": 24}, "--nnz 24 "),
        ({"nnz": 14.1, "wanted_nnz": 12.0}, ""),  # the preset's own
        ({"nnz": 12.377}, ""),  # reached when that was asked for
        ({}, ""),
    ],
)
def test_the_sparsity_is_what_was_asked_for(sparsity, said):
    command = bench_command(some(FORWARD_WORK, "dense-eager", "ours-eager", sparsity=sparsity))
    assert said in command
    assert ("--nnz" in command) is bool(said)


def test_contenders_are_named_where_they_are_not_the_usual_ones():
    usual = bench_command(some(FORWARD_WORK, "dense-eager", "ours-eager"))
    assert "--contenders" not in usual
    others = bench_command(some(STEP, "dense-autotuned", "ours-compiled", device="cuda"))
    assert "--contenders dense-autotuned,ours-compiled " in others
