"""The tables of `twell bench`, for tables.py: whole models at inference and in training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from twell._numbers import digits
from twell.measure import Record, read_records
from twell.measure.models import PRESETS
from twell.report.record_names import rounds_of, says_as_much

RESULTS = Path(__file__).resolve().parent / "results"
INFERENCE, TRAINING = RESULTS / "bench_inference.jsonl", RESULTS / "bench_training.jsonl"
NOT_MEASURED = "Not measured yet."
_MODELS = {
    "paper-0.5b": "0.5B",
    "paper-1b": "1B",
    "paper-1.5b": "1.5B",
    "paper-2b": "2B",
    "lambda-2e-5": "4 trained layers",
}
# Its settings are in no record, so nobody can repeat it.
_NOT_SHOWN = ("english-8",)
_SPARSE = 0.1  # a tenth of the neurons active; beyond, blocks train dense


def every(path: Path, device: str, *workloads: str) -> list[Record]:
    """Records of some workloads on a kind of device."""
    return [
        record
        for record in (read_records(path) if path.exists() else ())
        if record.shape["model"] not in _NOT_SHOWN
        and record.what.split("/")[1] in workloads
        and record.hardware["device"] == device
    ]


def latest(path: Path, device: str, *workloads: str) -> list[Record]:
    """Those of `every`; of what was measured again, the last that is whole. Models that fire other numbers of
    neurons are others."""
    found: dict[tuple, Record] = {}
    for record in every(path, device, *workloads):
        key = (record.what, *_group(record))
        if key in found and not says_as_much(rounds_of(record), rounds_of(found[key])):
            continue
        found.pop(key, None)
        found[key] = record
    return list(found.values())


def run_of(record: Record) -> tuple:
    """Equal for contenders that were compared with each other."""
    return record.date, record.commit, *_group(record)


def forward(device: str = "cuda") -> str:
    return _table(latest(INFERENCE, device, "forward"), ("sequences", "tokens"), ("batch", "sequence"))


def generation(device: str = "cuda") -> str:
    return _table(latest(INFERENCE, device, "generation"), ("sequences", "prompt"), ("batch", "prompt"))


def training(device: str = "cuda", sparse: bool = True) -> str:
    """sparse: of models that are; else of those that are not."""
    return _table(
        [r for r in latest(TRAINING, device, "step", "checkpointed") if _is_sparse(r) == sparse],
        ("layers", "checkpoints"),
        ("layers", "checkpointing"),
        compared={
            "loss": lambda details: _number(details.get("loss"), ".5f"),
            "hidden states": lambda details: _number(details.get("hidden_error"), ".0e"),
            "error of blocks": lambda details: _number(details.get("block_error"), ".0e"),
        },
    )


def micro_batches() -> str:
    records = latest(TRAINING, "cuda", "micro-batch")
    if not records:
        return NOT_MEASURED
    lines = ["| model | layers | checkpoints | | sequences |", "|---|---:|---|---|---:|"]
    for record in records:
        shape = record.shape
        lines.append(
            f"| {_model(shape)} | {shape['layers']} | {_cell(shape['checkpointing'])} | {_name(record)} "
            f"| {record.value:.0f} |"
        )
    return "\n".join(lines)


_LOGITS: dict[str, Callable[[dict], str]] = {
    "difference": lambda details: _number(details.get("largest_difference"), ".0e"),
    "same tokens": lambda details: _number(details.get("same_tokens_as_dense"), ".1%"),
}


def _table(
    records: list[Record],
    titles: tuple[str, str],
    names: tuple[str, str],
    compared: dict[str, Callable[[dict], str]] = _LOGITS,
) -> str:
    """A row for each contender, the compared ones under each other."""
    if not records:
        return NOT_MEASURED
    lines = [
        f"| model | active | {titles[0]} | {titles[1]} | | tokens/ms | over dense eager | mJ/token | memory "
        f"| {' | '.join(compared)} |",
        "|---|---:|---:|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for record in records:
        shape, details = record.shape, record.details
        cells = [
            _model(shape),
            _active(record),
            *(_cell(shape[name]) for name in names),
            _name(record),
            digits(details["tokens"] / record.value / 1e3, 4),
            _gain(record),
            _energy(details.get("millijoules_per_token")),
            _memory(details.get("peak_bytes")),
            *(show(details) for show in compared.values()),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def gains() -> str:
    """Ours, compiled, over every dense contender, in time and energy."""
    records = [
        *latest(INFERENCE, "cuda", "forward"),
        *filter(_is_sparse, latest(TRAINING, "cuda", "step", "checkpointed")),
    ]
    compared = [*every(INFERENCE, "cuda", "forward"), *every(TRAINING, "cuda", "step", "checkpointed")]
    energy = {(run_of(r), r.what.split("/")[2]): r.details.get("millijoules_per_token") for r in compared}
    doubtful = {(run_of(r), r.what.split("/")[2]) for r in compared if r.details.get("doubtful")}
    lines = ["| | over | times as fast | interval | its energy |", "|---|---|---:|---:|---:|"]
    for record in records:
        if not record.what.endswith("/ours-compiled") or record.details.get("doubtful"):
            continue
        for name, value in record.details.items():
            _, _, other = name.partition("over/")
            if not other or other.endswith(("/low", "/high")) or (run_of(record), other) in doubtful:
                continue
            low, high = (record.details[f"{name}/{end}"] for end in ("low", "high"))
            ours = record.details.get("millijoules_per_token")
            theirs = energy.get((run_of(record), other))
            share = f"{ours / theirs:.2f}x" if ours and theirs else ""
            what = {"forward": "forward", "step": "training step"}.get(
                record.what.split("/")[1], "checkpointed training step"
            )
            model = f"{_model(record.shape)}, {_active(record)} active"
            lines.append(
                f"| {model}, {what} | {other.replace('-', ' ')} | **{value:.2f}x** "
                f"| {low:.2f} to {high:.2f} | {share} |"
            )
    return "\n".join(lines) if len(lines) > 2 else NOT_MEASURED


def _group(record: Record) -> tuple:
    shape = {name: value for name, value in record.shape.items() if name != "meaning"}
    return record.what.split("/")[1], _active(record), *sorted(shape.items())


def _is_sparse(record: Record) -> bool:
    return record.sparsity["nnz"] < _SPARSE * record.shape["H"]


def _active(record: Record) -> str:
    return _number(record.sparsity.get("nnz"), ".0f")


def best_dense() -> str:
    """Which way won, by model."""
    records = [r for r in latest(INFERENCE, "cuda", "forward") if r.what.endswith("/best-dense")]
    if not records:
        return NOT_MEASURED
    return "\n".join(f"- {_model(r.shape)}: {r.shape['meaning']}." for r in records)


def measured_on() -> str:
    """The machine behind the records of each file."""
    lines = []
    for path in (INFERENCE, TRAINING):
        for device in ("cuda", "cpu"):
            records = latest(path, device, "forward", "generation", "step", "checkpointed")
            if records:
                lines.append(f"- {_where(path, records)}")
    return "\n".join(lines) or NOT_MEASURED


def _where(path: Path, records: list[Record]) -> str:
    hardware, versions = records[-1].hardware, records[-1].versions
    what = "Inference" if path == INFERENCE else "Training"
    commits = ", ".join(sorted({r.commit for r in records}))
    line = f"{what}: {hardware.get('gpu') or hardware['cpu']}, torch {versions['torch']}, commit {commits}"
    if hardware.get("sm_clock_mhz") is not None:
        clocks = [r.hardware["sm_clock_mhz"] for r in records if r.hardware.get("sm_clock_mhz") is not None]
        watts = [r.hardware["power_w"] for r in records if r.hardware.get("power_w") is not None]
        line += f"; {min(clocks)} to {max(clocks)} MHz, {min(watts):.0f} to {max(watts):.0f} W"
        if hardware.get("power_limit_w") is not None:
            line += f" of {hardware['power_limit_w']:.0f} W"
        warmest = max(r.hardware.get("temperature_c") or 0 for r in records)
        line += f", up to {warmest} C, idle {hardware.get('idle_power_w', '?')} W"
    methods = sorted({str(r.hardware["energy_from"]) for r in records if r.hardware.get("energy_from")})
    processes = sorted({round(r.details["processes"]) for r in records})
    line += f"; {' or '.join(map(str, processes))} process{'es' if processes[-1] > 1 else ''}"
    return f"{line}; energy from {', '.join(methods)}." if methods else f"{line}; no energy."


def _model(shape: dict) -> str:
    name, size = _MODELS.get(shape["model"], shape["model"]), PRESETS.get(shape["model"])
    return name if size is None or size.layers == shape["layers"] else f"{name}'s width"


def _name(record: Record) -> str:
    doubt = " (computes something else)" if record.details.get("doubtful") else ""
    return record.what.split("/")[2].replace("-", " ") + doubt


def _gain(record: Record) -> str:
    gain = record.details.get(f"over/{record.baseline}")
    if gain is None:
        return ""
    low, high = (record.details[f"over/{record.baseline}/{end}"] for end in ("low", "high"))
    return f"**{gain:.2f}x** ({low:.2f}-{high:.2f})"


def _cell(value: object) -> str:
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _energy(value: float | None) -> str:
    return "" if value is None else digits(value)


def _memory(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


TABLES: dict[str, Callable[[], str]] = {
    "bench-gains": gains,
    "bench-forward": forward,
    "bench-generation": generation,
    "bench-training": training,
    "bench-training-not-sparse": lambda: training(sparse=False),
    "bench-micro-batch": micro_batches,
    "bench-best-dense": best_dense,
    "bench-forward-cpu": lambda: forward("cpu"),
    "bench-training-cpu": lambda: training("cpu"),
    "bench-measured-on": measured_on,
}
