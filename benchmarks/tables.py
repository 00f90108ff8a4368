"""Regenerate every table and figure that README and docs show from benchmarks/results.

    python benchmarks/tables.py           rewrite them
    python benchmarks/tables.py --check   exit 1 if a committed one differs from its records

A table stands between `<!-- generated: NAME -->` and `<!-- end -->`. A figure carries a digest of its data in
its PNG metadata, so that checking it compares no pixels.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

import tables_bench
import tables_defaults
import tables_families
import tables_generation
import tables_gpu
import tables_headline
import tables_profile
import tables_reproduction
import tables_runs
import tables_sparsified
import tables_training
from tables_gpu import ms
from twell.measure import Record, read_records
from twell.plots import speedup_curves

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_MARKED = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_DIGEST = "twell-data"


def cpu_records(**shape: object) -> list[Record]:
    """Records of the CPU benchmark whose shape has all the given entries."""
    records = read_records(RESULTS / "ffn_cpu.jsonl")
    return [r for r in records if shape.items() <= r.shape.items()]


def wanted_density(record: Record) -> float:
    """The density that the workload asked for; the measured one differs by a few percent."""
    steps = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    return min(steps, key=lambda step: abs(step - record.sparsity["density"]) / step)


def cpu_headline() -> str:
    """Tokens x (dense, compiled dense, row, block, auto) at 1% active, fp32."""
    lines = [
        "| block | tokens | dense eager | dense compiled | ours | over eager | over compiled | error |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for gated in (True, False):
        for tokens, row in _cpu_rows(gated):
            auto, compiled = row["auto"], row["compiled"]
            lines.append(
                f"| {'gated' if gated else 'non-gated'} | {tokens} | {ms(auto.baseline_value)} "
                f"| {ms(compiled.value)} | {ms(auto.value)} | **{auto.ratio:.2f}x** "
                f"| {compiled.value / auto.value:.2f}x | {auto.error:.0e} |"
            )
    return "\n".join(lines)


def cpu_paths() -> str:
    """Row against block against auto at 1% active."""
    lines = ["| tokens | row | block | auto |", "|---:|---:|---:|---:|"]
    for tokens, row in _cpu_rows(gated=True):
        ratios = [row[path].ratio for path in ("row", "block", "auto")]
        lines.append(f"| {tokens} | " + " | ".join(f"{ratio:.2f}x" for ratio in ratios) + " |")
    return "\n".join(lines)


def _cpu_rows(gated: bool) -> list[tuple[int, dict[str, Record]]]:
    """(tokens, candidate -> record) at 1% active, fp32."""
    rows: dict[int, dict[str, Record]] = {}
    for record in cpu_records(dtype="float32", gated=gated):
        if wanted_density(record) == 0.01:
            rows.setdefault(record.shape["M"], {})[record.what.removeprefix("ffn_cpu/")] = record
    return sorted(rows.items())


def cpu_density() -> str:
    """Speed-up of the automatic plan over eager dense, by dtype, tokens and density."""
    columns = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    lines = [
        "| dtype | tokens | " + " | ".join(f"{100 * c:g}%" for c in columns) + " |",
        "|---|---:|" + "---:|" * len(columns),
    ]
    for dtype in ("float32", "bfloat16", "float16"):
        rows: dict[int, dict[float, float]] = {}
        for record in cpu_records(dtype=dtype, gated=True):
            if record.what == "ffn_cpu/auto":
                rows.setdefault(record.shape["M"], {})[wanted_density(record)] = record.ratio
        for tokens, ratios in sorted(rows.items()):
            cells = (f"{ratios[c]:.2f}x" if c in ratios else "" for c in columns)
            lines.append(f"| {dtype} | {tokens} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def format_memory() -> str:
    """Bytes of each format as a share of dense bf16."""
    names = {
        "twell_c8": "TwELL, C 8",
        "twell_c4": "TwELL, C 4",
        "block_128": "BlockTwELL, 128 rows",
        "block_64": "BlockTwELL, 64 rows",
        "hybrid_128": "Hybrid, cap 128, backup 1/8",
    }
    cells: dict[str, dict[int, float]] = {}
    for record in read_records(RESULTS / "format_memory.jsonl"):
        name = record.what.split("/")[1]
        cells.setdefault(name, {})[int(record.sparsity["wanted_nnz"])] = record.value / record.baseline_value
    columns = sorted(next(iter(cells.values())))
    lines = [
        "| format | " + " | ".join(f"nnz {nnz}" for nnz in columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for name, title in names.items():
        lines.append(f"| {title} | " + " | ".join(f"{cells[name][nnz]:.1%}" for nnz in columns) + " |")
    return "\n".join(lines)


def measured_on() -> str:
    """The machine, versions and commit behind the CPU figures."""
    records = cpu_records()
    record = records[-1]
    commits = ", ".join(sorted({r.commit for r in records}))
    hardware, versions = record.hardware, record.versions
    return (
        f"Measured on {hardware['cpu']}, {hardware['torch_threads']} threads, torch {versions['torch']}, "
        f"Python {versions['python']}, commit {commits}, {record.date[:10]}; "
        "medians of interleaved runs."
    )


TABLES: dict[str, Callable[[], str]] = {
    "cpu-headline": cpu_headline,
    "cpu-paths": cpu_paths,
    "cpu-density": cpu_density,
    "format-memory": format_memory,
    "measured-on": measured_on,
    **tables_bench.TABLES,
    **tables_defaults.TABLES,
    **tables_families.TABLES,
    **tables_generation.TABLES,
    **tables_headline.TABLES,
    **tables_sparsified.TABLES,
    **tables_gpu.TABLES,
    **tables_training.TABLES,
    **tables_runs.TABLES,
    **tables_profile.TABLES,
    **tables_reproduction.TABLES,
}


@dataclass(frozen=True)
class Figure:
    """A plot and its data; `draw` takes the target path and the metadata to store. No data, no plot."""

    path: Path
    data: Callable[[], object]
    draw: Callable[[object, Path, dict[str, str]], None]

    def digest(self) -> str | None:
        data = self.data()
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest() if data else None

    def stored_digest(self) -> str | None:
        if not self.path.exists():
            return None
        with Image.open(self.path) as image:
            return image.text.get(_DIGEST)


def _speedup_curves_data() -> dict[str, list[tuple[float, float]]]:
    curves: dict[str, list[tuple[float, float]]] = {}
    for record in cpu_records(dtype="float32", gated=True):
        if record.what == "ffn_cpu/auto":
            tokens = record.shape["M"]
            name = f"{tokens} token{'s' if tokens > 1 else ''}"
            curves.setdefault(name, []).append((record.sparsity["density"], record.ratio))
    return curves


def _draw_speedup_curves(data: object, path: Path, metadata: dict[str, str]) -> None:
    speedup_curves(
        data,
        path,
        title="Sparse feed-forward on a CPU: exact, and dense where that is faster",
        subtitle="fp32, D 1024, H 4096, automatic plan over eager PyTorch, outputs compared in the same run",
        metadata=metadata,
    )


FIGURES = [
    Figure(ROOT / "docs/figures/whole_model.png", tables_headline.bars_data, tables_headline.draw_bars),
    Figure(ROOT / "docs/figures/cpu_speedup.png", _speedup_curves_data, _draw_speedup_curves),
    Figure(ROOT / "docs/figures/gpu_speedup.png", tables_gpu.curves_data, tables_gpu.draw_curves),
    Figure(ROOT / "docs/figures/gpu_training.png", tables_training.curves_data, tables_training.draw_curves),
    Figure(ROOT / "docs/figures/runs_small.png", tables_runs.small_curves, tables_runs.draw_small),
    Figure(ROOT / "docs/figures/runs_wide.png", tables_runs.wide_curves, tables_runs.draw_wide),
]


def render(text: str) -> str:
    """`text` with every generated section replaced by its table."""

    def replace(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in TABLES:
            raise ValueError(f"generated section: got {name!r}; accepted: {', '.join(TABLES)}")
        return f"{match[1]}{TABLES[name]()}\n{match[3]}"

    return _MARKED.sub(replace, text)


def drifted() -> list[str]:
    """Names of documents and figures that do not show what the records say."""
    names = [str(d.relative_to(ROOT)) for d in DOCUMENTS if render(d.read_text()) != d.read_text()]
    return names + [str(f.path.relative_to(ROOT)) for f in FIGURES if f.digest() != f.stored_digest()]


def regenerate() -> None:
    for document in DOCUMENTS:
        document.write_text(render(document.read_text()))
    for figure in FIGURES:
        if data := figure.data():
            figure.path.parent.mkdir(parents=True, exist_ok=True)
            figure.draw(data, figure.path, {_DIGEST: figure.digest()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="report drift, write nothing")
    if parser.parse_args().check:
        stale = drifted()
        if stale:
            sys.exit(f"out of date, run `make tables`: {', '.join(stale)}")
    else:
        regenerate()


if __name__ == "__main__":
    main()
