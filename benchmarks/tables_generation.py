"""The tables of generation and of a pruned model, for tables.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from twell.measure import Record, read_records

RESULTS = Path(__file__).resolve().parent / "results"
GENERATION, PRUNED = RESULTS / "generation.jsonl", RESULTS / "pruned_model.jsonl"


def generation() -> str:
    """A row for each batch and baseline."""
    lines = [
        "| sequences | ms per token | over | its ms | | first token, ms | its ms | mJ per token | its mJ "
        "| equal tokens |",
        "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    firsts, energies = ({(r.shape["M"], r.baseline): r for r in _part(name)} for name in ("first", "energy"))
    for record in (*_part("captured"), *_part("stock")):
        shape, ours, theirs = record.shape, record.value * 1e3, record.baseline_value * 1e3
        key = shape["M"], record.baseline
        lines.append(
            f"| {shape['M']} | {ours:.2f} | {record.baseline} | {theirs:.2f} | {theirs / ours:.2f}x "
            f"| {_both(firsts.get(key), 1e3)} | {_both(energies.get(key), 1)} "
            f"| {float(shape['same_tokens']):.0%} |"
        )
    return "\n".join(lines)


def _both(record: Record | None, scale: float) -> str:
    """Two cells."""
    return "|" if record is None else f"{record.value * scale:.1f} | {record.baseline_value * scale:.1f}"


def generation_of_text() -> str:
    """With a trained model, on prompts from all over a text."""
    lines = [
        "| sequences | active neurons | ms per token | dense, same engine | | sparse calls | equal tokens |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for record in _part("text"):
        ours, theirs = record.value * 1e3, record.baseline_value * 1e3
        lines.append(
            f"| {record.shape['M']} | {record.sparsity['nnz']:.0f} of {record.shape['H']:,} | {ours:.3f} "
            f"| {theirs:.3f} | {theirs / ours:.2f}x | {float(record.shape['sparse_calls']):.0%} "
            f"| {float(record.shape['same_tokens']):.0%} |"
        )
    return "\n".join(lines)


def generation_start() -> str:
    """One sentence."""
    (record,) = _part("start")
    return (
        f"From process start to the 2B model's first token, with its files cached in memory: "
        f"{record.baseline_value:.0f} s the first time, {record.value:.0f} s afterwards."
    )


def _part(name: str) -> list[Record]:
    return [record for record in read_records(GENERATION) if record.what == f"generation/{name}"]


def generation_measured_on() -> str:
    records = read_records(GENERATION)
    versions, device = records[-1].versions, records[-1].hardware.get("gpu", "CPU")
    commits = ", ".join(sorted({record.commit for record in records}))
    return (
        f"One {device}, torch {versions['torch']}, triton {versions.get('triton')}, commit {commits}, "
        f"{max(record.date for record in records)[:10]}."
    )


def pruned_model() -> str:
    lines = [
        "| neurons | kept by layer | blocks, before | after | | cross-entropy, before | after |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for record in read_records(PRUNED):
        shape, before = record.shape, record.baseline_value
        lines.append(
            f"| {shape['H']} | {shape['kept']} | {before * 1e3:.2f} ms | {record.value * 1e3:.2f} ms "
            f"| {before / record.value:.2f}x | {shape['cross_entropy']} | {shape['cross_entropy_pruned']} |"
        )
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "generation": generation,
    "generation-of-text": generation_of_text,
    "generation-start": generation_start,
    "generation-measured-on": generation_measured_on,
    "pruned-model": pruned_model,
}
