"""The tables of sparsified stock models, for tables.py; `sparsified_models.py` writes their records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from twell.measure import Record, read_records

RESULTS = Path(__file__).resolve().parent / "results"
RECORDS = RESULTS / "sparsified_models.jsonl"


def sparsified_models() -> str:
    """A row for each model and kind of activity; gains over stock."""
    groups: dict[tuple, dict[tuple[str, int], Record]] = {}
    for record in read_records(RECORDS):
        shape = record.shape
        key = (shape["model"], shape["D"], shape["H"], shape["skewed"], round(record.sparsity["nnz"]))
        groups.setdefault(key, {})[record.what.rpartition("/")[2], shape["M"]] = record
    lines = [
        "| | active | union of 128 | 8,192 tokens, compiled | eager | decode, 1 token | 8 tokens |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for (model, hidden, neurons, skewed, nnz), found in groups.items():
        activity = f"{nnz / neurons:.0%} {'skewed' if skewed else 'even'}"
        prefill = found.get(("eager", 8192))
        union = "" if prefill is None else f"{float(prefill.shape['union']):.0%}"
        kinds = (("prefill", 8192), ("eager", 8192), ("decode", 1), ("decode", 8))
        gains = " | ".join(_gain(found[kind]) if kind in found else "" for kind in kinds)
        lines.append(f"| {model} ({hidden} x {neurons}) | {activity} | {union} | {gains} |")
    return "\n".join(lines)


def measured_on() -> str:
    record = read_records(RECORDS)[-1]
    versions = record.versions
    return (
        "Gains over stock transformers in the same run: layers compiled one by one, eager, and the blocks of "
        f"all layers in one CUDA graph. One {record.hardware['gpu']}, torch {versions['torch']}, triton "
        f"{versions['triton']}, commit {record.commit}, {record.date[:10]}; medians of interleaved runs, "
        "outputs compared."
    )


def _gain(record: Record) -> str:
    return f"{record.baseline_value / record.value:.2f}x"


TABLES: dict[str, Callable[[], str]] = {
    "sparsified-models": sparsified_models,
    "sparsified-models-measured-on": measured_on,
}
