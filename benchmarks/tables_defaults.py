"""Tables of default settings, for tables.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tables_gpu import by_nnz, grid
from twell.measure import Record, read_records

RECORDS = Path(__file__).resolve().parent / "results" / "defaults.jsonl"


def records(section: str) -> list[Record]:
    return [r for r in read_records(RECORDS) if r.what.startswith(f"defaults/{section}")]


def eager() -> str:
    """Eager modules with an automatic plan over nn.Linear modules, tokens x nnz."""
    cells = by_nnz(records("forward/auto"))
    return grid(cells, _time, lambda tokens, nnz: f"{cells[tokens][nnz].ratio:.2f}x")


def host() -> str:
    """Host microseconds per call, by tokens."""
    lines = [
        '| tokens | nn.Linear modules | automatic plan | `Plan(path="dense")` | `Plan(path="block")` |',
        "|---:|---:|---:|---:|---:|",
    ]
    found: dict[int, dict[str, Record]] = {}
    for record in records("host/"):
        name = record.what.rsplit("/", 1)[1]
        if name != "unseen":
            found.setdefault(record.shape["M"], {})[name] = record
    for tokens, row in sorted(found.items()):
        cells = " | ".join(f"{row[name].value * 1e6:.0f} us" for name in ("auto", "dense", "block"))
        lines.append(f"| {tokens:,} | {row['auto'].baseline_value * 1e6:.0f} us | {cells} |")
    for record in records("host/unseen"):
        first = 2 if record.shape["M"] <= 64 else 256
        lines.append(
            f"| {first:,} to {record.shape['M']:,}, each for the first time "
            f"| {record.baseline_value * 1e6:.0f} us | | | {record.value * 1e6:.0f} us |"
        )
    return "\n".join(lines)


def steps() -> str:
    """Training steps, synchronised after each: their time and the host's part."""
    lines = [
        "| tokens | nnz | nn.Linear modules | ours | | host: modules | host: ours |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    launched = {(r.shape["M"], r.sparsity["wanted_nnz"]): r for r in records("steps/host")}
    for record in records("steps/waited"):
        tokens, nnz = record.shape["M"], record.sparsity["wanted_nnz"]
        host = launched[tokens, nnz]
        lines.append(
            f"| {tokens:,} | {nnz:.0f} | {_time(record.baseline_value)} | {_time(record.value)} "
            f"| {record.ratio:.2f}x | {_time(host.baseline_value)} | {_time(host.value)} |"
        )
    return "\n".join(lines)


def models() -> str:
    """Whole models: prefill, generation, training. Of several runs, from the least to the most."""
    runs: dict[str, list[Record]] = {}
    for r in records("prefill/auto"):
        runs.setdefault(f"prefill, {r.shape['M']:,} tokens, 24 layers, eager", []).append(r)
    for r in records("generate/auto"):
        runs.setdefault("`generate`, one token, 24 layers, batch 1", []).append(r)
    for r in records("checkpointed/auto"):
        name = f"forward and backward, {r.shape['M']:,} tokens, 8 layers, compiled and checkpointed"
        runs.setdefault(name, []).append(r)
    lines = ["| | stock Llama | ours | | runs |", "|---|---:|---:|---:|---:|"]
    for name, found in runs.items():
        stock = _range([r.baseline_value for r in found], _time)
        ours = _range([r.value for r in found], _time)
        ratio = _range([r.ratio for r in found], lambda value: f"{value:.2f}x")
        lines.append(f"| {name} | {stock} | {ours} | {ratio} | {len(found)} |")
    return "\n".join(lines)


def _range(values: list[float], shown: Callable[[float], str]) -> str:
    least, most = shown(min(values)), shown(max(values))
    return least if least == most else f"{least} to {most}"


def measured_on() -> str:
    found = read_records(RECORDS)
    record = found[-1]
    commits = ", ".join(sorted({r.commit for r in found}))
    hardware, versions = record.hardware, record.versions
    where = hardware.get("gpu", "CPU")
    return (
        f"Measured on one {where}, torch {versions['torch']}, triton {versions['triton']}, commit "
        f"{commits}, {record.date[:10]}; medians of interleaved calls, outputs compared with dense in the "
        "same run."
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


TABLES: dict[str, Callable[[], str]] = {
    "defaults-eager": eager,
    "defaults-host": host,
    "defaults-steps": steps,
    "defaults-models": models,
    "defaults-measured-on": measured_on,
}
