"""The benchmark of defaults: a tiny run on the CPU, and tables made of its records."""

from __future__ import annotations

import pytest

from twell.measure import read_records

from ..scripts import benchmark_modules

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def modules():
    """benchmarks/defaults.py and tables_defaults.py."""
    with benchmark_modules("defaults", "tables_defaults") as modules:
        yield modules


def test_a_tiny_run_fills_every_table(modules, tmp_path, monkeypatch):
    defaults, tables = modules
    path = tmp_path / "defaults.jsonl"
    defaults.main(["--device", "cpu", "--tiny", "--quick", "--out", str(path), "--commit", "abc1234"])
    records = read_records(path)
    sections = {record.what.split("/")[1] for record in records}
    assert sections == set(defaults.SECTIONS)
    assert all(record.baseline_value > 0 and record.commit == "abc1234" for record in records)
    for record in records:
        assert record.error is None or record.error < 1e-4, record.what
    (generated,) = (record for record in records if record.what == "defaults/generate/auto")
    assert generated.sparsity["same_tokens"] == 1.0

    monkeypatch.setattr(tables, "RECORDS", path)
    assert "| 16 |" in tables.eager()
    assert "nnz 24" in tables.eager()
    assert tables.host().count("\n") == 3
    assert "prefill, 16 tokens" in tables.models()
    assert "compiled and checkpointed" in tables.models()
    assert "| 16 | 24 |" in tables.steps()
    assert "abc1234" in tables.measured_on()


def test_a_tiny_run_never_lands_in_the_results(modules):
    with pytest.raises(SystemExit):
        modules[0].main(["--device", "cpu", "--tiny"])
