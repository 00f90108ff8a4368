"""What the README shows, from other tables' records: the gains over dense, like against like, and the
picture of a whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import tables_bench
import tables_generation
import tables_runs
from twell.measure import Record, read_records
from twell.measure.models import PRESETS
from twell.plots import bar_panels
from twell.report.record_names import rounds_of, says_as_much

Row = tuple[str, str, str]
Found = dict[str, Record]
_MODEL = "paper-2b"
# Ours and the dense contender that it is held against, by column.
_PAIRS = (("ours-compiled", "dense-compiled"), ("ours-eager", "dense-eager"))


def headline() -> str:
    """Rows whose records are missing are left out."""
    rows = [*_forward(), *_steps(), *_generation(), *_real_text(), *_cpu()]
    lines = ["| twell against PyTorch | both compiled | neither compiled |", "|---|---:|---:|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows if any(row[1:]))])


def _forward() -> list[Row]:
    found = _latest_run(tables_bench.INFERENCE, "forward")
    if not found:
        return []
    shape = found["ours-compiled"].shape
    return [
        _gains(f"forward pass, {shape['batch']} x {shape['sequence']:,} tokens", found),
        ("the same, against the best dense way", _faster(_over(found, "ours-compiled", "best-dense")), ""),
        _shares("energy per token", found, "millijoules_per_token"),
    ]


def _steps() -> list[Row]:
    rows = []
    for workload, how in (("step", ""), ("checkpointed", ", activation checkpoints")):
        found = _latest_run(tables_bench.TRAINING, workload)
        if found:
            shape = found["ours-compiled"].shape
            rows += [
                _gains(f"training step, {shape['batch']} x {shape['sequence']:,} tokens{how}", found),
                _shares("energy per token", found, "millijoules_per_token"),
                _shares("peak memory", found, "peak_bytes"),
            ]
    return rows


def _latest_run(path: Path, workload: str) -> Found:
    """contender -> record, of the newest run of the whole model that is as sparse as the paper's, in which
    every pair of the columns ran and computed the same thing; empty if there is none. Runs that were
    interrupted after few rounds are passed over."""
    size = PRESETS[_MODEL]
    runs: dict[tuple, Found] = {}
    for r in tables_bench.every(path, "cuda", workload):
        whole = r.shape["model"] == _MODEL and r.shape["layers"] == size.layers
        if whole and abs(r.sparsity["nnz"] - size.nnz) < 1 and not r.details.get("doubtful"):
            runs.setdefault(tables_bench.run_of(r), {})[r.what.split("/")[2]] = r
    needed = {name for pair in _PAIRS for name in pair}
    complete = [found for found in runs.values() if needed <= found.keys()]

    def rounds(found: Found) -> int:
        return min(rounds_of(found[name]) or 0 for name in needed)

    most = max(map(rounds, complete), default=0)
    whole = [found for found in complete if says_as_much(rounds(found), most)]
    return max(whole[::-1], key=lambda found: found["ours-compiled"].date, default={})


def _gains(what: str, found: Found) -> Row:
    return (what, *(_faster(_over(found, ours, dense)) for ours, dense in _PAIRS))


def _over(found: Found, ours: str, dense: str) -> float | None:
    """How many times faster ours is, as measured in that run; None unless both computed the same."""
    return found[ours].details.get(f"over/{dense}") if {ours, dense} <= found.keys() else None


def _shares(what: str, found: Found, name: str) -> Row:
    def share(ours: str, dense: str) -> str:
        values = [found[one].details.get(name) for one in (ours, dense) if one in found]
        return f"{values[0] / values[1] - 1:+.0%}" if len(values) == 2 and all(values) else ""

    return (f"its {what}", *(share(*pair) for pair in _PAIRS))


def _faster(gain: float | None) -> str:
    return "" if gain is None else f"**{gain:.2f}x**"


def _generation() -> list[Row]:
    def gain(part: str, batch: int) -> float | None:
        found = [
            r
            for r in read_records(tables_generation.GENERATION)
            if r.what == f"generation/{part}" and "dense" in r.baseline and r.shape["M"] == batch
        ]
        return found[-1].ratio if found else None

    energy = gain("energy", 1)
    return [
        ("`generate`, one sequence", _faster(gain("captured", 1)), ""),
        ("its energy per token", f"{1 / energy - 1:+.0%}" if energy else "", ""),
        ("`generate`, 32 sequences", _faster(gain("captured", 32)), ""),
    ]


def _real_text() -> list[Row]:
    found = tables_runs.runs("wide")

    def gain(ours: str, dense: str) -> float | None:
        if ours not in found or dense not in found:
            return None
        late = (tables_runs.late(found[one], "tokens_per_second") for one in (ours, dense))
        return next(late) / next(late)

    what = "training 8 layers on English text, second half of the run"
    return [(what, _faster(gain("auto-compiled", "dense-compiled")), _faster(gain("auto", "dense")))]


def _cpu() -> list[Row]:
    wanted = {"M": 1, "gated": True, "dtype": "float32"}
    found = [
        r
        for r in read_records(tables_bench.RESULTS / "ffn_cpu.jsonl")
        if r.what == "ffn_cpu/auto" and wanted.items() <= r.shape.items()
    ]
    if not found:
        return []
    closest = min(found, key=lambda r: abs(r.sparsity["density"] - 0.01))
    return [("one token on a CPU, the block alone", "", _faster(closest.ratio))]


_SHOWN = {
    "dense-eager": "PyTorch",
    "dense-compiled": "PyTorch, torch.compile",
    "ours-compiled": "twell, torch.compile",
}
Panels = dict[str, dict[str, float]]


def bars_data() -> Panels:
    """panel -> contender -> value; empty without all records."""
    forward = _latest_run(tables_bench.INFERENCE, "forward")
    step = _latest_run(tables_bench.TRAINING, "step")
    if not (forward.keys() >= _SHOWN.keys() <= step.keys()):
        return {}
    needed = ((forward, "millijoules_per_token"), (step, "peak_bytes"))
    if any(name not in found[one].details for found, name in needed for one in _SHOWN):
        return {}

    def panel(found: Found, value: Callable[[Record], float]) -> dict[str, float]:
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
        title="A model of the paper's 2B size on one H200, dense and sparse",
        subtitle="random weights, 24 of 5,632 neurons active per token, bf16; forward 32 x 2,048 tokens, "
        "training 8 x 2,048; each panel one run",
        metadata=metadata,
    )


TABLES: dict[str, Callable[[], str]] = {"headline": headline}
