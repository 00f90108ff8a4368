"""The benchmark of sparsified stock models: a tiny run on the CPU."""

from __future__ import annotations

import pytest

from twell.measure import read_records

from ..scripts import benchmark_modules

pytest.importorskip("transformers")


def test_a_tiny_run_compares_every_model(tmp_path):
    with benchmark_modules("sparsified_models") as (script,):
        path = tmp_path / "records.jsonl"
        script.main(["--device", "cpu", "--tiny", "--out", str(path), "--commit", "abc1234"])
        records = read_records(path)
        assert {record.shape["model"] for record in records} == set(script.TINY)
    assert len(records) == 6
    for record in records:
        assert record.error < 1e-4
        assert record.sparsity["nnz"] == pytest.approx(0.05 * 256, rel=0.3)  # as it was set
