"""The one table of the README: what is gained where, over which dense run; from other tables' records."""

from __future__ import annotations

from collections.abc import Callable

import tables_bench
import tables_generation
import tables_runs
from twell.measure import read_records


def headline() -> str:
    """Rows whose records are missing are left out."""
    rows = [*_forward(), *_steps(), *_generation(), *_training(), *_cpu()]
    return "\n".join(["| | over | |", "|---|---|---:|", *(f"| {a} | {b} | **{c}** |" for a, b, c in rows)])


def _forward() -> list[tuple[str, str, str]]:
    records = tables_bench.latest(tables_bench.INFERENCE, "cuda", "forward")
    found = [r for r in records if r.what.endswith("/ours-compiled") and r.shape["model"] == "paper-2b"]
    rows = []
    for record in found:
        what = f"forward pass, {record.shape['batch']} x {record.shape['sequence']:,} tokens, compiled"
        for other, name in (
            ("dense-eager", "dense PyTorch"),
            ("dense-compiled", "dense `torch.compile`"),
            ("best-dense", "the fastest dense way we know"),
        ):
            if f"over/{other}" in record.details:
                rows.append((what, name, f"{record.details[f'over/{other}']:.2f}x"))
        compiled = [r for r in records if r.shape == record.shape | {"meaning": r.shape["meaning"]}]
        for dense in compiled:
            if dense.what.endswith("/dense-compiled") and "millijoules_per_token" in dense.details:
                share = dense.details["millijoules_per_token"] / record.details["millijoules_per_token"]
                rows.append(("its energy per token", "dense `torch.compile`", f"{share:.2f}x less"))
    return rows


def _steps() -> list[tuple[str, str, str]]:
    """Training steps of the 2B model, with what they save in memory."""
    records = tables_bench.latest(tables_bench.TRAINING, "cuda", "step")
    by_name = {r.what.split("/")[2]: r for r in records if r.shape["model"] == "paper-2b"}
    ours = by_name.get("ours-compiled")
    if ours is None:
        return []
    rows = []
    what = f"training step, {ours.shape['batch']} x {ours.shape['sequence']:,} tokens, compiled"
    for other, name in (("dense-eager", "dense PyTorch"), ("dense-compiled", "dense `torch.compile`")):
        if other in by_name:
            rows.append((what, name, f"{ours.details[f'over/{other}']:.2f}x"))
            share = by_name[other].details["peak_bytes"] / ours.details["peak_bytes"]
            saved = ("its peak memory", name, f"{share:.2f}x less")
    return [*rows, saved] if rows else []


def _generation() -> list[tuple[str, str, str]]:
    def gain(part: str, baseline: str, batch: int) -> float | None:
        found = [
            r
            for r in read_records(tables_generation.GENERATION)
            if r.what == f"generation/{part}" and baseline in r.baseline and r.shape["M"] == batch
        ]
        return found[-1].ratio if found else None

    shown = (
        ("`generate`, one sequence", "dense, same CUDA graphs", gain("captured", "dense", 1)),
        ("`generate`, one sequence", "transformers' `generate`", gain("stock", "default", 1)),
        ("`generate`, 32 sequences", "dense, same CUDA graphs", gain("captured", "dense", 32)),
        ("`generate`, one sequence, energy per token", "dense, same CUDA graphs", gain("energy", "dense", 1)),
    )
    return [
        (what, over, f"{v:.0f}x" if v > 10 else f"{v:.2f}x" + " less" * ("energy" in what))
        for what, over, v in shown
        if v
    ]


def _training() -> list[tuple[str, str, str]]:
    found = tables_runs.runs("wide")
    rows = []
    for ours, dense, name in (
        ("auto", "dense", "dense PyTorch"),
        ("auto-compiled", "dense-compiled", "dense `torch.compile`"),
    ):
        if ours in found and dense in found:
            pair = (tables_runs.late(found[one], "tokens_per_second") for one in (ours, dense))
            gain = next(pair) / next(pair)
            what = "training on real text (8 layers)" + (", compiled" if "compiled" in ours else "")
            rows.append((what, name, f"{gain:.2f}x"))
    return rows


def _cpu() -> list[tuple[str, str, str]]:
    wanted = {"M": 1, "gated": True, "dtype": "float32"}
    found = [
        r
        for r in read_records(tables_bench.RESULTS / "ffn_cpu.jsonl")
        if r.what == "ffn_cpu/auto" and wanted.items() <= r.shape.items()
    ]
    if not found:
        return []
    sparse = min(found, key=lambda r: abs(r.sparsity["density"] - 0.01))
    return [("one token on a CPU, the block alone", "dense PyTorch", f"{sparse.ratio:.2f}x")]


TABLES: dict[str, Callable[[], str]] = {"headline": headline}
