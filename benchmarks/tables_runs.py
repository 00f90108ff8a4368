"""Tables and figures of whole training runs, for tables.py; without records they say so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median

from twell.measure import RunRecord, read_records
from twell.plots import training_curves

RECORDS = Path(__file__).resolve().parent / "results" / "training_runs.jsonl"
NOT_MEASURED = "Not measured yet."
SMALL = {
    "silu": "SiLU, dense",
    "relu": "ReLU, lambda 0",
    "l1-3e-5": "lambda 3e-5",
    "l1-1e-4": "lambda 1e-4",
    "l1-3e-4": "lambda 3e-4",
    "l1-3e-4-revival": "lambda 3e-4, revival every 50 steps",
    "l1-1e-3": "lambda 1e-3",
}
WIDE = {
    "dense": "dense",
    "auto": "automatic plan",
    "dense-compiled": "dense, compiled",
    "auto-compiled": "automatic plan, compiled",
}


def runs(suite: str) -> dict[str, RunRecord]:
    """name -> the last record of each run."""
    records = read_records(RECORDS, RunRecord) if RECORDS.exists() else []
    prefix = f"training_runs/{suite}/"
    return {r.what.removeprefix(prefix): r for r in records if r.what.startswith(prefix)}


def small_runs() -> str:
    """Held-out cross-entropy, sparsity and dead neurons, same tokens."""
    found = runs("small")
    if not found:
        return NOT_MEASURED
    base = found["relu"].summary["held_out_ce_loss"]
    lines = [
        "| | held-out cross-entropy | over lambda 0 | active per token | dead | revived |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, title in SMALL.items():
        if name in found:
            s = found[name].summary
            loss = s["held_out_ce_loss"]
            cells = ["", "", ""]
            if s["held_out_nnz"] is not None:
                cells = [f"{s['held_out_nnz']:.1f}", f"{s['dead']:.1%}", f"{s['revived']:,}"]
            lines.append(f"| {title} | {loss:.3f} | {loss / base - 1:+.1%} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def wide_runs() -> str:
    """Dense against the automatic plan at the paper's width, eager and compiled, from one seed."""
    found = runs("wide")
    if not found:
        return NOT_MEASURED
    shown = [name for name in WIDE if name in found]
    dense = [name for name in shown if name.startswith("dense")]
    lines = [
        "| | held-out cross-entropy | active per token | tokens/s | peak memory | "
        + " | ".join(f"over {WIDE[name]}" for name in dense)
        + " |",
        "|---|" + "---:|" * (4 + len(dense)),
    ]
    for name in shown:
        summary = found[name].summary
        rate, memory = (late(found[name], key) for key in ("tokens_per_second", "peak_memory_bytes"))
        ratios = (f"{rate / late(found[other], 'tokens_per_second'):.2f}x" for other in dense)
        lines.append(
            f"| {WIDE[name]} | {summary['held_out_ce_loss']:.4f} | {summary['held_out_nnz']:.1f} "
            f"| {rate:,.0f} | {memory / 2**30:.1f} GiB | {' | '.join(ratios)} |"
        )
    gaps = [f"{WIDE[name]} {_gap(found, 'dense', name)}" for name in shown if name != "dense"]
    lines += [
        "",
        "Speed and memory are medians over the second half of each run's logs (one per 5 steps). Mean and "
        f"largest difference in cross-entropy from the first row, log by log: {'; '.join(gaps)}.",
    ]
    return "\n".join(lines)


def late(record: RunRecord, key: str) -> float:
    values = record.curve[key]
    return median(values[len(values) // 2 :])


def _gap(found: dict[str, RunRecord], one: str, other: str) -> str:
    curves = (found[name].curve["ce_loss"] for name in (one, other))
    gaps = [abs(a - b) for a, b in zip(*curves, strict=True)]
    return f"{fmean(gaps):.4f} and {max(gaps):.3f}"


def measured_on() -> str:
    suites = {"small": "the small runs", "wide": "the runs at the paper's width"}
    last = {title: list(runs(suite).values())[-1] for suite, title in suites.items() if runs(suite)}
    if not last:
        return NOT_MEASURED
    (record, *_) = last.values()
    commits = ", ".join(f"{title} at commit {found.commit}" for title, found in last.items())
    return (
        f"Measured on one {record.hardware.get('gpu')}, torch {record.versions['torch']}, "
        f"{record.date[:10]}: {commits}."
    )


def _lines(record: RunRecord) -> list[dict[str, float]]:
    curve = record.curve
    keys = [key for key in ("tokens", "ce_loss", "nnz") if curve[key][0] is not None]
    return [dict(zip(keys, values, strict=True)) for values in zip(*(curve[k] for k in keys), strict=True)]


def small_curves() -> dict[str, list[dict[str, float]]]:
    found = runs("small")
    shown = ("relu", "l1-3e-5", "l1-1e-4", "l1-3e-4", "l1-1e-3")
    return {SMALL[name]: _lines(found[name]) for name in shown if name in found}


def wide_curves() -> dict[str, list[dict[str, float]]]:
    found = runs("wide")
    return {WIDE[name]: _lines(found[name]) for name in WIDE if name in found}


def draw_small(data: object, path: Path, metadata: dict[str, str]) -> None:
    training_curves(
        data,
        path,
        title="112M parameters on English text: L1 and what it does",
        subtitle="H 2560, same tokens and seed; lambda rises from step 60 to 180 of 600",
        metadata=metadata,
    )


def draw_wide(data: object, path: Path, metadata: dict[str, str]) -> None:
    training_curves(
        data,
        path,
        title="The paper's width: layers switch to the sparse kernels by themselves",
        subtitle="D 2048, H 5632, 8 layers, lambda 6e-4, same seed; the curves lie on each other",
        metadata=metadata,
    )


TABLES: dict[str, Callable[[], str]] = {
    "runs-small": small_runs,
    "runs-wide": wide_runs,
    "runs-measured-on": measured_on,
}
