"""The benchmarks of generation and of pruning: tiny runs on the CPU."""

from __future__ import annotations

import pytest

from twell.measure import read_records

from ..scripts import benchmark_modules

pytest.importorskip("transformers")


def test_a_tiny_generation_is_compared_and_shown(tmp_path, monkeypatch):
    with benchmark_modules("generation", "tables_generation") as (script, tables):
        monkeypatch.setattr(script.generate, "DEVICES", script.generate.DEVICES)  # which it changes
        path = tmp_path / "records.jsonl"
        options = ["--tiny", "--layers", "1", "--batch", "1", "2", "--stock", "default"]
        script.main([*options, "--out", str(path), "--commit", "abc1234"])
        records = read_records(path)
        monkeypatch.setattr(tables, "GENERATION", path)
        assert tables.generation().count("\n") == 1 + 3
        assert "abc1234" in tables.generation_measured_on()
    compared = [r for r in records if r.what in ("generation/captured", "generation/stock")]
    assert [(record.shape["M"], record.shape["same_tokens"]) for record in compared] == [
        (1, "1.000"),
        (1, "1.000"),
        (2, "1.000"),
    ]
    assert [r.shape["M"] for r in records if r.what == "generation/first"] == [1, 2]


def test_a_tiny_model_is_trained_and_pruned(tmp_path):
    with benchmark_modules("pruned_model") as (script,):
        text, path = tmp_path / "text.txt", tmp_path / "records.jsonl"
        text.write_text("".join(f"def f{n}(x):\n    return x + {n}\n\n" for n in range(6000)))
        script.main(
            ["--tiny", "--text", str(text), "--steps", "4", "--out", str(path), "--commit", "abc1234"]
        )
        (record,) = read_records(path)
    assert float(record.shape["cross_entropy"]) == pytest.approx(
        float(record.shape["cross_entropy_pruned"]), abs=1e-5
    )
