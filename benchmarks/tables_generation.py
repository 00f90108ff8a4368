"""The tables of generation, for tables.py; `generation.py` writes their records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from twell.measure import read_records

RESULTS = Path(__file__).resolve().parent / "results"
GENERATION = RESULTS / "generation.jsonl"


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


TABLES: dict[str, Callable[[], str]] = {
    "generation": generation,
    "generation-measured-on": generation_measured_on,
}
