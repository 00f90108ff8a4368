"""Tables and the figure of the training benchmark, for tables.py; without records they say so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tables_gpu import by_nnz, grid, ms, nnz_name
from twell.measure import Record, read_records
from twell.plots import speedup_curves

RECORDS = Path(__file__).resolve().parent / "results" / "ffn_training.jsonl"
CPU_RECORDS = RECORDS.with_name("ffn_training_cpu.jsonl")
NOT_MEASURED = "Not measured yet."
PARTS = ("forward", "backward", "total")
CANDIDATES = {"compiled": "dense compiled", "sparse": "ours, block path", "auto": "ours, automatic"}


def training_records(what: str = "") -> list[Record]:
    """Records whose name starts with ffn_training/`what`; none before the first run."""
    records = read_records(RECORDS) if RECORDS.exists() else []
    return [r for r in records if r.what.startswith(f"ffn_training/{what}")]


def training_total() -> str:
    """Forward and backward, automatic plan over eager dense, tokens x nnz."""
    cells = by_nnz(training_records("total/auto"))
    if not cells:
        return NOT_MEASURED
    return grid(cells, ms, lambda tokens, nnz: f"{cells[tokens][nnz].ratio:.2f}x")


def training_cpu() -> str:
    """Forward and backward on a CPU, automatic plan over eager dense, tokens x share of active neurons."""
    records = read_records(CPU_RECORDS) if CPU_RECORDS.exists() else []
    cells = by_nnz([r for r in records if r.what == "ffn_training/total/auto"])
    if not cells:
        return NOT_MEASURED
    first = records[0]
    neurons, hardware = first.shape["H"], first.hardware
    shares = sorted(next(iter(cells.values())))
    lines = [
        "| tokens | dense | " + " | ".join(f"{100 * nnz / neurons:.2g}%" for nnz in shares) + " |",
        "|---:|---:|" + "---:|" * len(shares),
    ]
    for tokens, row in sorted(cells.items()):
        ratios = " | ".join(f"{row[nnz].ratio:.2f}x" for nnz in shares)
        lines.append(f"| {tokens:,} | {ms(row[shares[0]].baseline_value)} | {ratios} |")
    worst = max(r.sparsity.get("error_over_dense", 0.0) for r in records)
    lines += [
        "",
        f"Measured on {hardware['cpu']}, {hardware['torch_threads']} threads, torch "
        f"{first.versions['torch']}, commit {first.commit}; output and gradients have at most {worst:.2f} "
        "times the error of dense, against float64.",
    ]
    return "\n".join(lines)


def training_parts() -> str:
    """Forward, backward and both at the middle number of tokens, dense and the automatic plan."""
    cells = {part: by_nnz(training_records(f"{part}/auto")) for part in PARTS}
    if not all(cells.values()):
        return NOT_MEASURED
    tokens = sorted(cells["total"])
    middle = tokens[len(tokens) // 2]
    lines = [
        f"| {middle:,} tokens | forward: dense | ours | | backward: dense | ours | | both: dense | ours | |",
        "|---|" + "---:|" * 9,
    ]
    for nnz in sorted(cells["total"][middle]):
        records = [cells[part][middle][nnz] for part in PARTS]
        row = " | ".join(f"{ms(r.baseline_value)} | {ms(r.value)} | {r.ratio:.2f}x" for r in records)
        lines.append(f"| {nnz_name(nnz)} | {row} |")
    return "\n".join(lines)


def training_memory() -> str:
    """Memory kept for the backward and peak of a step, in MiB."""
    rows: dict[tuple[int, str], dict[str, Record]] = {}
    for name in CANDIDATES:
        for part in ("saved", "peak"):
            for record in training_records(f"{part}/{name}"):
                rows.setdefault((round(record.sparsity["wanted_nnz"]), part), {})[name] = record
    if not rows:
        return NOT_MEASURED
    tokens = next(iter(next(iter(rows.values())).values())).shape["M"]
    titles = {"saved": "kept for the backward", "peak": "peak of forward and backward"}
    lines = [
        f"| {tokens:,} tokens | MiB | dense eager | " + " | ".join(CANDIDATES.values()) + " |",
        "|---|---|" + "---:|" * (1 + len(CANDIDATES)),
    ]
    for nnz in sorted({nnz for nnz, _ in rows}):
        for part, title in titles.items():
            found = rows.get((nnz, part), {})
            if found:
                dense = _mib(next(iter(found.values())).baseline_value)
                cells = (_mib(found[name].value) if name in found else "" for name in CANDIDATES)
                lines.append(f"| {nnz_name(nnz)} | {title} | {dense} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def training_figure() -> str:
    """The figure, for a document in docs/."""
    if not curves_data():
        return NOT_MEASURED
    return "![Speed-up of forward and backward over dense PyTorch by nnz](figures/gpu_training.png)"


def training_measured_on() -> str:
    """The GPU, versions and commit behind the training figures, and the largest error."""
    records = training_records()
    if not records:
        return NOT_MEASURED
    record = records[-1]
    hardware, versions = record.hardware, record.versions
    text = (
        f"Measured on one {hardware.get('gpu') or hardware['cpu']}, torch {versions['torch']}, triton "
        f"{versions['triton']}, commit {record.commit}, {record.date[:10]}; medians of interleaved runs"
    )
    checked = [r for r in training_records("total/") if "error_over_dense" in r.sparsity]
    ours = [r.sparsity["error_over_dense"] for r in checked if not r.what.endswith("/compiled")]
    if ours:
        text += (
            ". Outputs and gradients were compared with float32 in the same run: "
            f"our errors are at most {max(ours):.2f} times those of eager dense"
        )
    return f"{text}."


def curves_data() -> dict[str, list[tuple[float, float]]]:
    """tokens -> (active neurons, speed-up of forward and backward)."""
    return {
        f"{tokens:,} tokens": [(record.sparsity["nnz"], record.ratio) for record in row.values()]
        for tokens, row in sorted(by_nnz(training_records("total/auto")).items())
    }


def draw_curves(data: object, path: Path, metadata: dict[str, str]) -> None:
    speedup_curves(
        data,
        path,
        title="Training a sparse feed-forward block on an H200: forward and backward",
        subtitle="bf16, D 2048, H 5632, automatic plan over eager PyTorch, gradients of x and all weights",
        shares=False,
        metadata=metadata,
    )


def _mib(count: float) -> str:
    return f"{count / 2**20:,.0f}" if count >= 2**20 else f"{count / 2**20:.2g}"


TABLES: dict[str, Callable[[], str]] = {
    "training-total": training_total,
    "training-cpu": training_cpu,
    "training-parts": training_parts,
    "training-memory": training_memory,
    "training-figure": training_figure,
    "training-measured-on": training_measured_on,
}
