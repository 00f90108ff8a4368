"""The tables of generation and of a pruned model, for tables.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from twell.measure import read_records

RESULTS = Path(__file__).resolve().parent / "results"
GENERATION, PRUNED = RESULTS / "generation.jsonl", RESULTS / "pruned_model.jsonl"


def generation() -> str:
    """A row for each batch and baseline."""
    lines = [
        "| sequences | ms per token | over | its ms | | equal tokens |",
        "|---:|---:|---|---:|---:|---:|",
    ]
    for record in read_records(GENERATION):
        shape, ours, theirs = record.shape, record.value * 1e3, record.baseline_value * 1e3
        lines.append(
            f"| {shape['M']} | {ours:.2f} | {record.baseline} | {theirs:.2f} | {theirs / ours:.2f}x "
            f"| {float(shape['same_tokens']):.0%} |"
        )
    return "\n".join(lines)


def generation_measured_on() -> str:
    record = read_records(GENERATION)[-1]
    versions, device = record.versions, record.hardware.get("gpu", "CPU")
    return (
        f"One {device}, torch {versions['torch']}, triton {versions.get('triton')}, commit {record.commit}, "
        f"{record.date[:10]}."
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
    "generation-measured-on": generation_measured_on,
    "pruned-model": pruned_model,
}
