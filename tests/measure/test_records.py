"""Records: round trips, every rejection, and files that are written whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from twell._files import locked
from twell.measure import (
    Record,
    RunRecord,
    Timing,
    commit,
    hardware,
    make_record,
    read_records,
    versions,
    write_records,
)
from twell.measure.records import source, write_run

ENTRIES = {
    "what": "ffn_cpu/prefill/auto",
    "baseline": "dense eager",
    "baseline_value": 0.5,
    "value": 0.25,
    "unit": "s",
    "quantiles": {"p10": 0.2, "p50": 0.25, "p90": 0.3},
    "shape": {"M": 64, "D": 128, "H": 512, "dtype": "float32", "gated": True},
    "sparsity": {"nnz": 30, "density": 0.06},
    "error": 1e-6,
    "hardware": {"device": "cpu", "logical_cores": 2, "memory_gib": 7.5, "driver": None},
    "versions": {"python": "3.12.1", "triton": None},
    "commit": "1b94b97+dirty",
    "seed": 0,
    "date": "2026-01-31T12:00:00+00:00",
}


def record(**changes) -> Record:
    return Record(**{**ENTRIES, **changes})


PLAIN = {"baseline": None, "baseline_value": None, "quantiles": {}, "error": None, "seed": None}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        PLAIN,
        {**PLAIN, "unit": "bytes", "value": 12345678901},
        {**PLAIN, "unit": "x", "value": -0.5},
        {"what": "a", "shape": {}, "sparsity": {}, "hardware": {}, "versions": {}},
        {"what": "gpu/h200.sxm/top-8/2b_4"},
        {"baseline": "café ✓", "shape": {"note": 'line\nbreak, "quote" and \u2028'}},
        {"date": "2026-01-31T12:00:00Z"},
    ],
)
def test_round_trip(changes):
    original = record(**changes)
    line = original.to_json()
    assert "\n" not in line
    assert Record.from_json(line) == original
    assert list(json.loads(line)) == [field.name for field in dataclasses.fields(Record)]


def test_record_keeps_copies_and_floats():
    shape = {"M": 1}
    made = record(shape=shape, value=3, baseline_value=6, error=0, quantiles={"p90": 4, "p10": 2, "p50": 3})
    shape["M"] = 2
    assert made.shape == {"M": 1}
    assert [type(number) for number in (made.value, made.baseline_value, made.error)] == [float] * 3
    assert list(made.quantiles) == ["p10", "p50", "p90"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.value = 1.0


def test_ratio():
    assert record().ratio == 2.0
    assert record(**PLAIN).ratio is None
    assert record(unit="x", value=0, quantiles={}).ratio is None


REJECTED = [
    *(("what", bad) for bad in ("", "Ffn", "a b", "a//b", "/a", "a/", "a_/b", "a\n", "é", None, 3)),
    *(("unit", bad) for bad in ("", " ", None, 1)),
    *(("baseline", bad) for bad in ("", 1)),
    ("baseline_value", None),
    *(("baseline_value", bad) for bad in (0, -1.0, math.nan, "1", True)),
    *(("value", bad) for bad in (0, -1.0, math.nan, math.inf, 10**400, "1", True, None)),
    *(("quantiles", bad) for bad in (None, [], {"p10": 1.0}, {"p10": 3, "p50": 2, "p90": 4})),
    ("quantiles", {"p10": 1, "p50": 2, "p90": 3, "p99": 4}),
    *(("quantiles", {"p10": bad, "p50": 2, "p90": 3}) for bad in (0, math.nan, None, "1", True)),
    *(("shape", bad) for bad in (None, [], {"M": 1.5}, {"M": None}, {1: 1}, {"M": [1]})),
    *(("sparsity", bad) for bad in (None, {"nnz": "1"}, {"nnz": True}, {"nnz": math.inf}, {"nnz": None})),
    *(("error", bad) for bad in (-1e-9, math.nan, math.inf, "0", False)),
    *(("hardware", bad) for bad in (None, "cpu", {"gpu": {}}, {"memory_gib": math.nan})),
    *(("versions", bad) for bad in (None, {"torch": 2})),
    *(("commit", bad) for bad in ("", None)),
    *(("seed", bad) for bad in (1.0, "0", True)),
    *(("date", bad) for bad in ("", "today", None, "2026-01-31T12:00:00", "2026-01-31T12:00:00+01:00")),
]


@pytest.mark.parametrize(("field", "bad"), REJECTED)
def test_rejection_names_field_value_and_accepted(field, bad):
    with pytest.raises(ValueError, match=rf"^{field}.*: got [\s\S]*; accepted: "):
        record(**{field: bad})


def test_a_baseline_value_needs_a_name():
    with pytest.raises(ValueError, match=r"baseline_value: got 0\.5 with baseline None; accepted: both"):
        record(baseline=None)


def test_units_of_time_and_memory_are_positive():
    for unit in ("s", "ms", "us", "ns", "bytes", "KiB", "MiB", "GiB"):
        with pytest.raises(ValueError, match=rf"value: got 0; accepted: a number > 0 for unit '{unit}'"):
            record(**PLAIN, unit=unit, value=0)


def without(field: str) -> str:
    return json.dumps({name: value for name, value in ENTRIES.items() if name != field})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "record: got invalid JSON"),
        ("[1]", "record: got a JSON list"),
        (json.dumps({**ENTRIES, "colour": 1}), r"record: got unknown fields \['colour'\]"),
        (without("seed"), r"record: got no fields \['seed'\]"),
        (without("what"), r"record: got no fields \['what'\]"),
        (json.dumps({**ENTRIES, "value": math.nan}), "value: got nan"),
    ],
)
def test_bad_json_is_refused(line, message):
    with pytest.raises(ValueError, match=message):
        Record.from_json(line)


def test_nothing_is_optional():
    for name in ENTRIES:
        with pytest.raises(ValueError, match="record: got no fields"):
            Record.from_json(without(name))


def test_write_and_read(tmp_path):
    path = tmp_path / "new" / "folder" / "results.jsonl"
    records = [record(seed=seed) for seed in range(3)]
    write_records(path, iter(records))
    assert read_records(path) == records
    assert len(path.read_text().splitlines()) == 3
    write_records(str(path), records[:1])
    assert read_records(str(path)) == records[:1]
    assert os.listdir(path.parent) == ["results.jsonl"]


def test_append(tmp_path):
    path = tmp_path / "results.jsonl"
    write_records(path, [record(seed=1)], append=True)
    before = path.read_bytes()
    write_records(path, [record(seed=2)], append=True)
    assert path.read_bytes().startswith(before)
    assert [r.seed for r in read_records(path)] == [1, 2]


def test_append_to_a_file_without_final_newline_and_with_blank_lines(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text("\n" + record(seed=1).to_json())
    write_records(path, [record(seed=2)], append=True)
    assert [r.seed for r in read_records(path)] == [1, 2]


def test_append_to_a_file_with_an_invalid_line_raises_and_changes_nothing(tmp_path):
    path = tmp_path / "results.jsonl"
    good = record(seed=1).to_json().encode()
    before = good + b"\n" + good[:50] + b"\n"
    path.write_bytes(before)
    with pytest.raises(ValueError, match="line 2"):
        write_records(path, [record(seed=2)], append=True)
    assert path.read_bytes() == before


def test_read_error_names_file_and_line(tmp_path):
    path = tmp_path / "results.jsonl"
    good = record().to_json()
    path.write_text(f"{good}\n\n{good.replace('0.25', '-1', 1)}\n")
    with pytest.raises(ValueError, match=r"results\.jsonl, line 3: value: got -1"):
        read_records(path)
    path.write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match=r"results\.jsonl, line 1: "):
        read_records(path)


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("append", [False, True])
def test_a_failing_write_leaves_the_old_file(tmp_path, monkeypatch, step, append):
    path = tmp_path / "results.jsonl"
    write_records(path, [record(seed=1)])
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="disk full"):
        write_records(path, [record(seed=2)], append=append)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["results.jsonl"]


def test_a_failing_iterable_or_a_stranger_leaves_the_old_file(tmp_path):
    path = tmp_path / "results.jsonl"
    write_records(path, [record(seed=1)])

    def failing():
        yield record(seed=2)
        raise RuntimeError("benchmark failed")

    with pytest.raises(RuntimeError, match="benchmark failed"):
        write_records(path, failing())
    with pytest.raises(ValueError, match="records: got a dict; accepted: Record objects"):
        write_records(path, [record(seed=2), ENTRIES])
    assert [r.seed for r in read_records(path)] == [1]


def test_permissions_are_those_of_an_ordinary_file(tmp_path):
    path, ordinary = tmp_path / "results.jsonl", tmp_path / "ordinary"
    ordinary.write_text("")
    write_records(path, [record()])
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)


def test_make_record_of_a_timing():
    made = make_record(
        "ffn_cpu/decode/row",
        Timing((1.0, 2.0, 3.0)),
        unit="s",
        baseline="dense eager",
        baseline_timing=Timing((4.0,)),
        shape={"M": 1},
        sparsity={"density": 0.1},
        error=0.0,
        seed=7,
    )
    assert (made.value, made.baseline_value, made.ratio) == (2.0, 4.0, 2.0)
    assert made.quantiles == pytest.approx({"p10": 1.2, "p50": 2.0, "p90": 2.8})
    assert (made.shape, made.sparsity, made.error, made.seed) == ({"M": 1}, {"density": 0.1}, 0.0, 7)
    assert (made.hardware, made.versions, made.commit) == (hardware("cpu"), versions(), commit())
    age = datetime.now(UTC) - datetime.fromisoformat(made.date)
    assert timedelta(seconds=-1) < age < timedelta(minutes=5)
    assert Record.from_json(made.to_json()) == made


def test_make_record_of_a_value(tmp_path):
    made = make_record("formats/twell", 1024, unit="bytes", repository=tmp_path / "x")
    assert (made.value, made.unit, made.quantiles) == (1024.0, "bytes", {})
    assert (made.baseline, made.baseline_value, made.ratio, made.seed) == (None, None, None, None)
    compared = make_record("formats/twell", 1024, unit="bytes", baseline="dense", baseline_timing=4096)
    assert compared.ratio == 4.0


def test_make_record_refuses_a_timing_in_another_unit():
    with pytest.raises(ValueError, match="unit: got 'ms'; accepted: 's', since measured is a Timing"):
        make_record("a", Timing((1.0,)), unit="ms")
    with pytest.raises(ValueError, match="unit: got 'ms'; accepted: 's', since baseline_timing is a Timing"):
        make_record("a", 1.0, unit="ms", baseline="b", baseline_timing=Timing((1.0,)))


RUN = {
    "what": "training_runs/wide/auto",
    "preset": "paper-0.5b",
    "settings": ["train.steps=350"],
    "seconds": 104.3,
    "summary": {"steps": 350, "held_out_ce_loss": 4.0, "held_out_nnz": None},
    "last": {"step": 350, "loss": 4.04},
    "curve": {"tokens": [1, 2], "ce_loss": [5.0, 4.0], "nnz": [None, 30.5]},
    "layers": [[True, 0.34, 1]],
    **{name: ENTRIES[name] for name in ("hardware", "versions", "commit", "date")},
}


class TestRuns:
    def test_round_trip_through_a_file(self, tmp_path):
        runs = [RunRecord(**RUN), RunRecord(**RUN | {"layers": [], "curve": {}})]
        path = tmp_path / "runs.jsonl"
        for run in runs:
            write_records(path, [run], append=True)
        assert read_records(path, RunRecord) == runs
        with pytest.raises(ValueError, match=r"runs\.jsonl, line 1: record: got unknown fields"):
            read_records(path)
        with pytest.raises(ValueError, match="records: got a Record; accepted: RunRecord objects"):
            write_records(path, [runs[0], record()])

    @pytest.mark.parametrize(
        ("field", "bad"),
        [
            ("what", "Wide"),
            ("preset", ""),
            ("settings", "train.steps=350"),
            ("settings", [1]),
            *(("seconds", bad) for bad in (0, math.nan, "1")),
            *(("summary", bad) for bad in (None, {"loss": math.nan}, {"loss": "4"})),
            ("last", {"loss": None}),
            *(("curve", bad) for bad in ([], {"a": 1}, {"a": [math.inf]}, {"a": [1], "b": [1, 2]})),
            *(("layers", bad) for bad in (None, [1], [["sparse"]])),
            ("commit", ""),
            ("date", "2026-01-31T12:00:00"),
        ],
    )
    def test_rejection_names_field_value_and_accepted(self, field, bad):
        with pytest.raises(ValueError, match=rf"^{field}.*: got [\s\S]*; accepted: "):
            RunRecord(**RUN | {field: bad})


def run_of(day: int, *values: float) -> list[Record]:
    date = f"2026-01-{day:02}T12:00:00+00:00"
    return [dataclasses.replace(record(), value=value, date=date) for value in values]


def test_a_run_is_written_in_place_of_its_own_records_only(tmp_path):
    path = tmp_path / "new" / "records.jsonl"
    write_run(path, run_of(1, 1.0))
    write_run(path, run_of(2, 4.0))
    write_run(path, run_of(1, 1.0, 2.0))
    assert read_records(path) == [*run_of(2, 4.0), *run_of(1, 1.0, 2.0)]


def test_runs_that_write_at_once_keep_each_others_records(tmp_path):
    path = tmp_path / "records.jsonl"

    def write(day: int) -> None:
        for count in range(1, 9):
            write_run(path, run_of(day, *range(1, 1 + count)))

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, range(1, 5)))
    assert len(read_records(path)) == 4 * 8


def test_a_run_does_not_wait_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("twell.measure.records._LOCK_SECONDS", 0)
    path = tmp_path / "records.jsonl"
    with locked(path.with_name(".records.jsonl.lock")), pytest.raises(TimeoutError, match="another process"):
        write_run(path, run_of(1, 1.0))
    assert not path.exists()


def test_runs_have_dates_of_their_own():
    """To the microsecond: two may begin in one second."""
    assert len(source("cpu", None)["date"]) == len("2026-01-31T12:00:00.000000+00:00")
