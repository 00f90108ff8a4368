"""What the README shows, from other tables' records: the gains over plain and over compiled dense, and the
picture of a whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import tables_bench
import tables_generation
import tables_runs
from twell.measure import Record, RunRecord, read_records
from twell.measure.models import PRESETS
from twell.plots import bar_panels

Row = tuple[str, str, str]
_MODEL = "paper-2b"


def headline() -> str:
    """Rows whose records are missing are left out."""
    rows = [*_forward(), *_steps(), *_generation(), *_real_text(), *_cpu()]
    lines = ["| | over dense PyTorch | over compiled dense |", "|---|---:|---:|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _forward() -> list[Row]:
    found = _by_contender(tables_bench.latest(tables_bench.INFERENCE, "cuda", "forward"))
    if "ours-compiled" not in found:
        return []
    shape = found["ours-compiled"].shape
    return [
        _gains(f"forward pass, {shape['batch']} x {shape['sequence']:,} tokens", found),
        _shares("energy per token", found, "millijoules_per_token"),
        *_eager(found),
    ]


def _steps() -> list[Row]:
    found = _by_contender(tables_bench.latest(tables_bench.TRAINING, "cuda", "step"))
    if "ours-compiled" not in found:
        return []
    shape = found["ours-compiled"].shape
    return [
        _gains(f"training step, {shape['batch']} x {shape['sequence']:,} tokens", found),
        _shares("energy per token", found, "millijoules_per_token"),
        _shares("peak memory", found, "peak_bytes"),
    ]


def _by_contender(records: list[Record]) -> dict[str, Record]:
    """Of the whole model, as sparse as the paper's: others were measured, too."""
    size = PRESETS[_MODEL]
    return {
        r.what.split("/")[2]: r
        for r in records
        if r.shape["model"] == _MODEL
        and r.shape["layers"] == size.layers
        and abs(r.sparsity["nnz"] - size.nnz) < 1
    }


def _gains(what: str, found: dict[str, Record]) -> Row:
    details = found["ours-compiled"].details
    eager, compiled = (details.get(f"over/{other}") for other in ("dense-eager", "dense-compiled"))
    return what, _faster(eager), _faster(compiled)


def _eager(found: dict[str, Record]) -> list[Row]:
    """Ours without a compiler."""
    if "ours-eager" not in found:
        return []
    return [
        ("the same pass, neither compiled", _faster(found["ours-eager"].details.get("over/dense-eager")), "")
    ]


def _shares(what: str, found: dict[str, Record], name: str) -> Row:
    ours = found["ours-compiled"].details.get(name)
    theirs = (
        found[other].details.get(name) if other in found else None
        for other in ("dense-eager", "dense-compiled")
    )
    return (f"its {what}", *(f"{ours / one - 1:+.0%}" if ours and one else "" for one in theirs))


def _faster(gain: float | None) -> str:
    if gain is None:
        return ""
    return f"**{gain:.0f}x**" if gain > 10 else f"**{gain:.2f}x**"


def _generation() -> list[Row]:
    def gain(part: str, baseline: str, batch: int) -> float | None:
        found = [
            r
            for r in read_records(tables_generation.GENERATION)
            if r.what == f"generation/{part}" and baseline in r.baseline and r.shape["M"] == batch
        ]
        return found[-1].ratio if found else None

    energy = gain("energy", "dense", 1)
    rows = [
        (
            "`generate`, one sequence",
            _faster(gain("stock", "default", 1)),
            _faster(gain("captured", "dense", 1)),
        ),
        ("its energy per token", "", f"{1 / energy - 1:+.0%}" if energy else ""),
        ("`generate`, 32 sequences", "", _faster(gain("captured", "dense", 32))),
    ]
    return [row for row in rows if any(row[1:])]


def _real_text() -> list[Row]:
    found = tables_runs.runs("wide")

    def gains(value: Callable[[RunRecord], float]) -> tuple[str, str]:
        """value: tokens per second, or another figure of which more is better."""

        def over(dense: str) -> float | None:
            if "auto-compiled" not in found or dense not in found:
                return None
            return value(found["auto-compiled"]) / value(found[dense])

        return _faster(over("dense")), _faster(over("dense-compiled"))

    what = "training 8 layers on English text, tokens/s once sparse"
    rows = [
        (what, *gains(lambda run: tables_runs.late(run, "tokens_per_second"))),
        ("the same from start to end, compiling included", *gains(lambda run: 1 / run.seconds)),
    ]
    return [row for row in rows if any(row[1:])]


def _cpu() -> list[Row]:
    wanted = {"M": 1, "gated": True, "dtype": "float32"}

    def over_eager(part: str) -> float | None:
        found = [
            r
            for r in read_records(tables_bench.RESULTS / "ffn_cpu.jsonl")
            if r.what == f"ffn_cpu/{part}" and wanted.items() <= r.shape.items()
        ]
        return min(found, key=lambda r: abs(r.sparsity["density"] - 0.01)).ratio if found else None

    ours, compiled = over_eager("auto"), over_eager("compiled")
    if ours is None:
        return []
    return [
        (
            "one token on a CPU, the block alone, ours not compiled",
            _faster(ours),
            _faster(ours / compiled if compiled else None),
        )
    ]


_SHOWN = {
    "dense-eager": "PyTorch",
    "dense-compiled": "PyTorch, torch.compile",
    "ours-compiled": "twell, torch.compile",
}
Panels = dict[str, dict[str, float]]


def bars_data() -> Panels:
    """panel -> contender -> value; empty without all records."""
    forward = _by_contender(tables_bench.latest(tables_bench.INFERENCE, "cuda", "forward"))
    step = _by_contender(tables_bench.latest(tables_bench.TRAINING, "cuda", "step"))
    if not (forward.keys() >= _SHOWN.keys() <= step.keys()):
        return {}

    def panel(found: dict[str, Record], value: Callable[[Record], float]) -> dict[str, float]:
        return {shown: value(found[name]) for name, shown in _SHOWN.items()}

    def pace(record: Record) -> float:
        return record.details["tokens"] / record.value / 1e3

    return {
        "Forward pass, tokens per ms\n(more is better)": panel(forward, pace),
        "Training step, tokens per ms\n(more is better)": panel(step, pace),
        "Energy of the forward pass,\nmJ per token (less is better)": panel(
            forward, lambda r: r.details["millijoules_per_token"]
        ),
        "Peak memory in training,\nGiB (less is better)": panel(
            step, lambda r: r.details["peak_bytes"] / 2**30
        ),
    }


def draw_bars(data: Panels, path: Path, metadata: dict[str, str]) -> None:
    bar_panels(
        data,
        path,
        title="The paper's 2B model on one H200, dense and sparse",
        subtitle="same weights, bf16, 24 of 5,632 neurons active per token; forward 32 x 2,048 tokens, "
        "training 8 x 2,048 tokens; each panel from one run",
        metadata=metadata,
    )


TABLES: dict[str, Callable[[], str]] = {"headline": headline}
