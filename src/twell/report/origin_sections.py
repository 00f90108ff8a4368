"""Where the figures come from: machines, versions, commits, and the commands that make them again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from ..measure.records import Record
from ..profiling.schema import Profile
from .document import Commands, Paragraph, Section, Table
from .inputs import Inputs
from .record_names import is_bench
from .wording import listed

# Scripts of a checkout that write records, by the first word of their names.
_SCRIPTS = {
    "ffn_inference": "python benchmarks/ffn_inference.py",
    "ffn_training": "python benchmarks/ffn_training.py",
    "ffn_cpu": "python benchmarks/ffn_cpu.py",
    "format_memory": "python benchmarks/format_memory.py",
    "generation": "python benchmarks/generation.py",
    "sparsified": "python benchmarks/sparsified_models.py",
    "defaults": "python benchmarks/defaults.py",
    "pruned_model": "python benchmarks/pruned_model.py --text FILE",
    "families": "python -m tests.sparsify.families --record",
}


def origin_sections(inputs: Inputs) -> Iterator[Section]:
    places = _environments(inputs)
    if places.rows:
        notes = []
        if any(not run.place for run in inputs.runs):
            names = listed([run.name for run in inputs.runs if not run.place])
            notes.append(Paragraph(f"Not noted which machine trained: {names}."))
        yield Section("Environment", [places, *notes])
    yield Section("Commands", [Paragraph("What makes these figures again."), Commands(_commands(inputs))])


def _environments(inputs: Inputs) -> Table:
    found: dict[tuple, dict[str, Any]] = {}

    def add(hardware: dict, versions: dict, commit: str, date: str, what: str) -> None:
        cells = (*_machine(hardware), _versions(versions))
        entry = found.setdefault(cells, {"commits": {}, "dates": [], "what": {}})
        entry["commits"][commit or "not noted"] = None
        entry["dates"].append(date[:10])
        entry["what"][what] = None

    for record in inputs.records:
        add(record.hardware, record.versions, record.commit, record.date, record.what.split("/")[0])
    for run in inputs.runs:
        if run.place:
            add(
                run.place["hardware"], run.place["versions"], run.place["commit"], run.place["date"], run.name
            )
    for one in inputs.profiles:
        profile = one.profile
        add(profile.hardware, profile.versions, "", profile.created, f"profile {one.name}")
    rows = []
    for (machine, details, versions), entry in found.items():
        first, last = min(entry["dates"]), max(entry["dates"])
        rows.append(
            (
                ", ".join(list(entry["what"])[:8]) + (" ..." if len(entry["what"]) > 8 else ""),
                machine,
                details,
                versions,
                ", ".join(entry["commits"]),
                first if first == last else f"{first} to {last}",
            )
        )
    columns = ("figures", "machine", "details", "versions", "commit", "date")
    return Table(columns, rows, left=range(6))


def _machine(hardware: dict[str, Any]) -> tuple[str, str]:
    gpu = hardware.get("gpu")
    if gpu:
        names = (("gpu_memory_gib", "{} GiB"), ("sm_count", "{} SMs"), ("driver", "driver {}"))
    else:
        names = (("logical_cores", "{} cores"), ("torch_threads", "{} threads"), ("memory_gib", "{} GiB"))
    details = [form.format(hardware[key]) for key, form in names if hardware.get(key) is not None]
    limit = hardware.get("power_limit_w")
    if limit is not None:
        details.append(f"limit {limit:.0f} W")
    if hardware.get("energy_from"):
        details.append(f"energy from {hardware['energy_from']}")
    return str(gpu or hardware.get("cpu") or "unknown"), ", ".join(details)


def _versions(versions: dict[str, Any]) -> str:
    names = ("twell", "torch", "triton", "transformers", "python")
    return ", ".join(f"{name} {versions[name]}" for name in names if versions.get(name))


def _commands(inputs: Inputs) -> list[str]:
    lines: dict[str, None] = {}
    for run in inputs.runs:
        lines[run.command] = None
    for one in inputs.profiles:
        lines[profile_command(one.profile)] = None
    for record in inputs.records:
        command = bench_command(record) if is_bench(record) else _SCRIPTS.get(record.what.split("/")[0])
        if command:
            lines[command] = None
    lines[shlex.join(["twell", "report", *inputs.sources])] = None
    return list(lines)


def profile_command(profile: Profile) -> str:
    words = ["twell", "profile", profile.model or "MODEL"]
    for text in profile.text or ["TEXT"]:
        words += ["--text", text]
    words += ["--tokens", str(profile.tokens), "--sequence-length", str(profile.sequence_length)]
    words += ["--batch", str(profile.batch), "--dtype", profile.dtype]
    if profile.sample is None:
        words += ["--sample", "0"]
    if all(layer.speed is None for layer in profile.layers):
        words.append("--no-speed")
    return shlex.join([*words, "--out", "NEW_FOLDER"])


def bench_command(record: Record) -> str:
    """The command of `twell bench` that measures this workload, with all of its contenders."""
    shape, details = record.shape, record.details
    kind, workload, _ = record.what.split("/")
    words = ["twell", "bench", kind.removeprefix("bench_")]
    if kind == "bench_inference":
        if shape.get("text", "random tokens") == "random tokens":
            words += ["--preset", str(shape["model"]), "--layers", str(shape["layers"])]
            words += _built(record)
        else:
            words += [str(shape["model"]), "--text", "TEXT"]  # records do not name it
        words += ["--workload", workload]
        if workload == "forward":
            words += ["--shape", f"{shape['batch']}x{shape['sequence']}"]
        else:
            words += ["--prompts", str(shape["batch"]), "--prompt-length", str(shape["prompt"])]
            words += ["--new-tokens", str(shape["new_tokens"])]
        words += ["--dtype", str(shape["dtype"])]
    else:
        words += ["--preset", str(shape["model"]), "--layers", str(shape["layers"]), *_built(record)]
        if workload == "micro-batch":
            words.append("--search")
        else:
            words += ["--batch", str(shape["batch"])]
        words += ["--sequence-length", str(shape["sequence"]), "--precision", str(shape["precision"])]
        words += ["--checkpointing", "on" if shape["checkpointing"] else "off"]
    words += ["--device", str(record.hardware.get("device", "cpu"))]
    for name in ("rounds", "processes"):
        if details.get(name):
            words += [f"--{name}", f"{details[name]:.0f}"]
    if record.seed is not None:
        words += ["--seed", str(record.seed)]
    return shlex.join(words)


def _built(record: Record) -> Sequence[str]:
    """Of models that are built to be sparse; the record has what was reached, which is close to it."""
    nnz = record.sparsity.get("nnz")
    return ["--nnz", f"{nnz:.0f}"] if nnz is not None else []
