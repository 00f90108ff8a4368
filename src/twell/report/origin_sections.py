"""Where the figures come from: machines, versions, commits, and the commands that make them again."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..measure.models import PRESETS
from ..measure.records import Record
from ..profiling.schema import Profile
from .document import Commands, Paragraph, Section, Table
from .inputs import Inputs
from .record_names import comparison, is_bench, is_real
from .wording import listed

# Words in commands for what only the reader knows.
_MODEL, _FILE, _NEW_FOLDER = "MODEL", "FILE", "NEW_FOLDER"
_MEANINGS = {
    _MODEL: "the model's folder or Hugging Face name",
    _FILE: "your text, on which the figures depend",
    _NEW_FOLDER: "where to write",
}
# Scripts of a checkout that write records, by the first word of their names.
_SCRIPTS = {
    "ffn_inference": "python benchmarks/ffn_inference.py",
    "ffn_training": "python benchmarks/ffn_training.py",
    "ffn_cpu": "python benchmarks/ffn_cpu.py",
    "format_memory": "python benchmarks/format_memory.py",
    "generation": "python benchmarks/generation.py",
    "sparsified": "python benchmarks/sparsified_models.py",
    "defaults": "python benchmarks/defaults.py",
    "pruned_model": f"python benchmarks/pruned_model.py --text {_FILE}",
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
    lines, legend = commands(inputs)
    blocks = [Paragraph("What makes these figures again."), Commands(lines)]
    yield Section("Commands", [*blocks, *([Paragraph(legend)] if legend else [])])


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


def commands(inputs: Inputs) -> tuple[list[str], str]:
    """The commands, and what the words in capitals in them stand for."""
    lines: dict[str, None] = {}
    models = _unknown_models(inputs.records)
    for run in inputs.runs:
        lines[run.command] = None
    for one in inputs.profiles:
        lines[profile_command(one.profile)] = None
    groups: dict[Any, list[Record]] = {}
    for record in inputs.records:
        key = comparison(record) if is_bench(record) else record.what.split("/")[0]
        groups.setdefault(key, []).append(record)
    for key, group in groups.items():
        if is_bench(group[0]):
            command = bench_command(group, models.get(group[0].shape.get("model"), _MODEL))
        else:
            command = _SCRIPTS.get(key)
        if command:
            lines[command] = None
    meanings = {word: f'the folder or Hugging Face name of "{name}"' for name, word in models.items()}
    legend = _legend(lines, {**_MEANINGS, **meanings})
    lines[shlex.join(["twell", "report", *inputs.sources])] = None
    return list(lines), legend


def _unknown_models(records: Sequence[Record]) -> dict[str, str]:
    """Name of a model -> the word for it in commands: records have its short name, not where it is."""
    benched = filter(is_bench, records)
    names = list(dict.fromkeys(str(record.shape["model"]) for record in benched if is_real(record)))
    if len(names) == 1:
        return {names[0]: _MODEL}
    return {name: f"{_MODEL}_{number}" for number, name in enumerate(names, 1)}


def _legend(lines: Iterable[str], meanings: Mapping[str, str]) -> str:
    """What the placeholders in the lines stand for."""
    words = {word for line in lines for word in shlex.split(line)}
    found = [f"{word}: {meaning}" for word, meaning in meanings.items() if word in words]
    return f"In capitals, what you fill in. {'; '.join(found)}." if found else ""


def profile_command(profile: Profile) -> str:
    words = ["twell", "profile", profile.model or _MODEL]
    for text in profile.text or [_FILE]:
        words += ["--text", text]
    words += ["--tokens", str(profile.tokens), "--sequence-length", str(profile.sequence_length)]
    words += ["--batch", str(profile.batch), "--dtype", profile.dtype]
    if profile.sample is None:
        words += ["--sample", "0"]
    if all(layer.speed is None for layer in profile.layers):
        words.append("--no-speed")
    return shlex.join([*words, "--out", _NEW_FOLDER])


def bench_command(group: Sequence[Record], model: str = _MODEL) -> str:
    """The command of `twell bench` that makes a comparison again.

    group: the records of its contenders.
    model: what stands for a model that is no preset.
    """
    record = group[0]
    shape = record.shape
    kind, workload, _ = record.what.split("/")
    words = ["twell", "bench", kind.removeprefix("bench_")]
    if kind == "bench_inference":
        if shape.get("text", "random tokens") == "random tokens":
            words += ["--preset", str(shape["model"]), "--layers", str(shape["layers"])]
            words += _built(record)
        else:
            words += [model, "--text", _FILE]
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
            if "memory_gib" in shape:
                words += ["--memory", str(shape["memory_gib"])]
        else:
            words += ["--batch", str(shape["batch"])]
        words += ["--sequence-length", str(shape["sequence"]), "--precision", str(shape["precision"])]
        words += ["--checkpointing", "on" if shape["checkpointing"] else "off"]
    device = str(record.hardware.get("device", "cpu"))
    contenders = [one.what.rsplit("/", 1)[-1] for one in group]
    if {*contenders} != _usual_contenders(kind, workload, device):
        words += ["--contenders", ",".join(contenders)]
    words += ["--device", device]
    for name in ("rounds", "processes"):
        most = max(one.details.get(name, 0) for one in group)
        if most:
            words += [f"--{name}", f"{most:.0f}"]
    if record.seed is not None:
        words += ["--seed", str(record.seed)]
    return shlex.join(words)


def _built(record: Record) -> Sequence[str]:
    """How sparse a preset was built, where that is not the preset's own.

    Older records only have what was reached, which rounds to what was asked for.
    """
    preset = PRESETS.get(str(record.shape["model"]))
    usual = None if preset is None else preset.nnz
    wanted, reached = record.sparsity.get("wanted_nnz"), record.sparsity.get("nnz")
    if wanted is not None:
        return [] if wanted == usual else ["--nnz", str(float(wanted)).removesuffix(".0")]
    return [] if reached is None or round(reached) == usual else ["--nnz", f"{reached:.4g}"]


def _usual_contenders(kind: str, workload: str, device: str) -> set[str]:
    """What `twell bench` compares if nobody names contenders."""
    from ..measure import inference, training

    if kind == "bench_training":
        names = training.DEFAULT
    elif workload == "forward":
        names = [*inference.FORWARD]
    else:
        names = [*inference.generation_contenders(torch.device(device))]
    # Nothing compiled on a CPU, nor in searches, where steps would compile again for every size.
    eager_only = device == "cpu" or workload == "micro-batch"
    return {name for name in names if name.endswith("eager") or not eager_only}
