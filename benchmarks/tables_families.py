"""The table of model families, for tables.py; `make families` writes its records."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from twell.measure import Record, read_records

RECORDS = Path(__file__).resolve().parent / "results" / "families.jsonl"
_TITLES = {
    "sparse": "sparse",
    "partly": "sparse in part",
    "refused": "refused",
    "no relu": "no ReLU",
    "cannot run": "not tried",
}


def families() -> str:
    """Model types by what became of them and why, most first."""
    records = read_records(RECORDS)
    groups: dict[tuple[str, str], list[str]] = {}
    for record in records:
        groups.setdefault((record.shape["verdict"], _why(record)), []).append(record.shape["model_type"])
    lines = ["| | how recognised, or why not | types | |", "|---|---|---:|---|"]
    for verdict, title in _TITLES.items():
        rows = [(why, types) for (kind, why), types in groups.items() if kind == verdict]
        for why, types in sorted(rows, key=lambda row: (-len(row[1]), row[0])):
            lines.append(f"| {title} | {why} | {len(types)} | {', '.join(sorted(types))} |")
    return "\n".join(lines)


def families_counted() -> str:
    """How many types were tried, and what became of them."""
    records = read_records(RECORDS)
    counts = {verdict: sum(r.shape["verdict"] == verdict for r in records) for verdict in _TITLES}
    accepting = counts["sparse"] + counts["partly"] + counts["refused"]
    transformers, worst = records[0].versions["transformers"], max(record.error for record in records)
    return (
        f"Of the {len(records)} model types with a causal, sequence-to-sequence or masked language model in "
        f"transformers {transformers}, {accepting} accept ReLU: **{counts['sparse']} run sparse**, "
        f"{counts['partly']} in part, {counts['refused']} are refused. {counts['no relu']} have no "
        f"feed-forward block that does; {counts['cannot run']} could not be built or run. None is wrong: "
        f"outputs differ from stock by {worst:.0e} of the largest value at most."
    )


def _why(record: Record) -> str:
    how, reason = record.shape["how"], record.shape["reason"]
    if record.shape["verdict"] == "sparse":
        return how
    if record.shape["verdict"] == "cannot run":
        return re.sub(r"(not built|no input found).*", r"\1 by the test", reason)
    return reason


TABLES: dict[str, Callable[[], str]] = {"families": families, "families-counted": families_counted}
