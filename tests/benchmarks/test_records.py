"""Records of a section that was measured again replace its own and no others."""

from __future__ import annotations

import dataclasses

import pytest

from twell.measure import make_record, read_records, write_records

from ..scripts import benchmark_modules


@pytest.fixture(scope="module")
def scripts():
    """benchmarks/_records.py and _ffn.py."""
    with benchmark_modules("_records", "_ffn") as modules:
        yield modules


@pytest.fixture(scope="module")
def record():
    blank = make_record("bench/none", 1.0, unit="s")
    return lambda what, value: dataclasses.replace(blank, what=f"bench/{what}", value=value)


def found(path):
    return [(record.what.removeprefix("bench/"), record.value) for record in read_records(path)]


def test_other_sections_keep_their_records_and_places(scripts, record, tmp_path):
    _, ffn = scripts
    path = tmp_path / "bench.jsonl"
    write_records(path, [record("a/x", 1.0), record("b/x", 2.0), record("b/y", 3.0), record("c/x", 4.0)])
    ffn.save([record("b/z", 5.0)], path, None)
    assert found(path) == [("a/x", 1.0), ("b/z", 5.0), ("c/x", 4.0)]
    ffn.save([record("b/z", 5.0), record("d/x", 6.0)], path, "abc")  # the next section of the same run
    assert found(path) == [("a/x", 1.0), ("b/z", 5.0), ("d/x", 6.0), ("c/x", 4.0)]
    assert [r.commit == "abc" for r in read_records(path)] == [False, True, True, False]


def test_a_full_run_replaces_everything(scripts, record, tmp_path):
    _, ffn = scripts
    path = tmp_path / "results" / "bench.jsonl"
    run = []
    for value in (1.0, 2.0):  # the second run over the records of the first
        run = []
        for section in "abc":
            run += [record(f"{section}/{name}", value) for name in "xy"]
            ffn.save(run, path, None)
        assert read_records(path) == run


def test_records_may_be_chosen_by_anything(scripts, record, tmp_path):
    records, _ = scripts
    path = tmp_path / "bench.jsonl"
    write_records(path, [record("a", value) for value in (1.0, 2.0, 3.0)])
    assert records.replace_records(path, [record("b", 9.0)], lambda old: old.value == 2.0) == 3
    assert found(path) == [("a", 1.0), ("b", 9.0), ("a", 3.0)]


def test_an_unreadable_file_stays_as_it_is(scripts, record, tmp_path):
    _, ffn = scripts
    path = tmp_path / "bench.jsonl"
    path.write_text("no record\n")
    with pytest.raises(ValueError, match="line 1"):
        ffn.save([record("a/x", 1.0)], path, None)
    assert path.read_text() == "no record\n"


@pytest.mark.parametrize("only", [["times"], ["memory"]])
def test_one_section_of_a_benchmark_keeps_the_other(only, record, tmp_path, monkeypatch):
    path = tmp_path / "bench.jsonl"
    parts = {"times": ("forward", "total"), "memory": ("saved",)}
    with benchmark_modules("ffn_training") as (benchmark,):
        for name, written in parts.items():
            new = [record(f"{part}/auto", 2.0) for part in written]
            monkeypatch.setitem(benchmark.SECTIONS, name, lambda bench, new=new: bench.records.extend(new))
        write_records(path, [record(f"{part}/auto", 1.0) for part in ("forward", "total", "saved")])
        monkeypatch.setattr(benchmark, "RESULTS", path)  # what --out is by default
        benchmark.main(["--only", *only])
    values = {what.removesuffix("/auto"): value for what, value in found(path)}
    assert values == {part: 2.0 if name in only else 1.0 for name in parts for part in parts[name]}
