"""`twell bench`: the paper's tables on this machine; `app` declares the options."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .._errors import in_one_line, reject, require_choice
from .._files import require_writable
from .._interval import ENOUGH_ROUNDS
from .._numbers import time_left
from ..measure import Record, read_records
from ..measure.models import PRESETS, require_preset
from ..measure.processes import NOTE, PART, Job, run_apart
from ..measure.records import source, write_run
from ..measure.results import Measured, merge, records_of
from ..plots import speedup_bars
from . import bench_view
from .bench_jobs import (
    DTYPES,
    Common,
    InferenceOptions,
    TrainingOptions,
    inference_job,
    layers_job,
    of_process,
    training_job,
)
from .plot_file import check_plot
from .status import FAILED, INTERRUPTED

WORKLOADS = ("forward", "generation")
_LONG = 5.0  # seconds from which on a step of the work stays on screen
_WRITE_EVERY = 5.0  # seconds: where rounds are short, a file written after each would leave the GPU idle
CHECKPOINTING = {"off": (False,), "on": (True,), "both": (False, True)}
_log = logging.getLogger("twell")


def run_inference(
    *,
    model: str | None,
    preset: str | None,
    text: Sequence[str],
    shape: Sequence[str],
    workload: Sequence[str],
    contenders: Sequence[str],
    layers: int | None,
    nnz: float | None,
    prompts: Sequence[int],
    prompt_length: int | None,
    new_tokens: int | None,
    dtype: str,
    **shared: Any,
) -> None:
    from ..measure.inference import CONTENDERS, FORWARD, generation_contenders

    device = _device(shared.pop("device"))
    gpu = device.startswith("cuda")
    if model is not None and preset is not None:
        reject("model, --preset", f"{model!r} and {preset!r}", "one of them")
    if model is not None and not text:
        reject("text", "none", "--text FILE, a folder, 'python' or hf:NAME: what MODEL is to read")
    if model is None and text:
        reject("text", text[0], "MODEL with it: presets have no tokenizer")
    if model is not None and (layers is not None or nnz is not None):
        reject("layers, nnz", (layers, nnz), "a preset; MODEL has its own")
    chosen = None if model is not None else _preset(preset, gpu)
    if dtype not in ("auto", *DTYPES):
        reject("dtype", repr(dtype), " | ".join(["auto", *DTYPES]))
    if model is None and dtype == "auto":
        dtype = "bfloat16" if gpu else "float32"
    for one in workload:
        require_choice("workload", one, WORKLOADS)
    known, default = (CONTENDERS, CONTENDERS) if gpu else (list(FORWARD), _eager(FORWARD))
    compared = _contenders(contenders, known, default)
    by_workload = {"forward": FORWARD, "generation": generation_contenders(torch.device(device))}
    running = [one for one in WORKLOADS if by_workload[one].keys() & set(compared)]
    for one in workload:
        if one not in running:
            accepted = f"of {one} on this device: {', '.join(by_workload[one])}"
            reject("contenders", ", ".join(compared), accepted)
    options = InferenceOptions(
        preset=chosen,
        layers=layers,
        nnz=nnz,
        contenders=compared,
        device=device,
        model=model,
        text=tuple(text),
        dtype=dtype,
        workloads=tuple(workload or running),
        shapes=tuple(map(_shape, shape)),
        prompts=tuple(prompts) or (1,),
        prompt_length=prompt_length or (128 if gpu else 16),
        new_tokens=new_tokens,
        **_measuring(shared, gpu),
    )
    _run("bench_inference", inference_job, options, **shared)


def run_training(
    *,
    extra: Sequence[str],
    preset: str | None,
    layers: str,
    nnz: float | None,
    batch: int | None,
    sequence_length: int | None,
    precision: str | None,
    checkpointing: str,
    contenders: Sequence[str],
    search: bool,
    memory: float | None,
    **shared: Any,
) -> None:
    from ..measure.training import CONTENDERS, DEFAULT, PRECISIONS, require_contenders

    if extra:
        reject("MODEL", repr(extra[0]), f"presets only: --preset {' | '.join(PRESETS)}")
    device = _device(shared.pop("device"))
    gpu = device.startswith("cuda")
    require_choice("checkpointing", checkpointing, tuple(CHECKPOINTING))
    precision = precision or ("bfloat16" if gpu else "float32")
    require_choice("precision", precision, PRECISIONS)
    if layers != "auto" and not (layers.isdecimal() and int(layers)):
        reject("layers", repr(layers), "a number above 0, or auto")
    if search and memory is None and not gpu:
        reject("search", "no limit of memory", "--memory GIB on a CPU, whose system would swap first")
    compared = _contenders(contenders, CONTENDERS, DEFAULT if gpu else _eager(DEFAULT))
    require_contenders(compared, device)
    options = TrainingOptions(
        preset=_preset(preset, gpu),
        layers=None if layers == "auto" else int(layers),
        nnz=nnz,
        contenders=compared,
        device=device,
        batch=batch or (8 if gpu else 2),
        sequence=sequence_length or (2048 if gpu else 128),
        precision=precision,
        checkpointing=CHECKPOINTING[checkpointing],
        search=search,
        memory=None if memory is None else int(memory * 2**30),
        **_measuring(shared, gpu),
    )
    _run("bench_training", training_job, options, prepare=_with_layers, **shared)


def _with_layers(options: TrainingOptions, run: Callable[[Job, Common], list[Measured]]) -> TrainingOptions:
    """As many layers as fit, where no number is given."""
    if options.layers is not None:
        return options
    (found,) = run(layers_job, options)
    return dataclasses.replace(options, layers=int(found.details["layers"]))


def _device(given: str | None) -> str:
    if given is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    from ..measure.environment import checked_device

    return str(checked_device(given))


def _preset(given: str | None, gpu: bool) -> str:
    name = given or ("paper-2b" if gpu else "tiny")
    require_preset(name)
    return name


def _shape(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        reject("shape", repr(text), "SEQUENCESxTOKENS, as 32x2048")
    return int(parts[0]), int(parts[1])


def _contenders(given: Sequence[str], known: Sequence[str], default: Sequence[str]) -> tuple[str, ...]:
    names = [name.strip() for part in given for name in part.split(",") if name.strip()]
    for name in names:
        if name not in known:
            reject("contenders", repr(name), ", ".join(known))
    return tuple(one for one in known if one in (names or default))


def _eager(names: Iterable[str]) -> list[str]:
    """What is worth its time on a CPU: without a compiler, which takes a minute there and gains little."""
    return [name for name in names if name.endswith("eager")]


def _measuring(shared: dict[str, Any], gpu: bool) -> dict[str, Any]:
    """Takes the options of measuring out of `shared`."""
    seconds = shared.pop("energy_seconds")
    return {
        "rounds": shared.pop("rounds") or (9 if gpu else ENOUGH_ROUNDS),
        "energy_seconds": seconds,
        "seed": shared.pop("seed"),
    }


def _require_records(out: Path) -> None:
    """Refuse to append to what is no file of records."""
    try:
        read_records(out)
    except ValueError as error:
        found = str(error).removeprefix(f"{out}, ")
        reject("out", f"{str(out)!r}, which is no file of records ({found})", "a new file, or one of records")


class _Collected:
    """Results as they come, on file soon after they are known. Others may append to the file meanwhile.

    unwritten: why the last try to write the file failed; None if it did not.
    """

    def __init__(
        self, what: str, options: Common, out: Path | None, commit: str | None, say: Callable[[str], None]
    ) -> None:
        if out is not None:
            require_writable(out, "out")
            if out.exists():
                _require_records(out)
        self._what, self._options, self._out, self._say = what, options, out, say
        # Once: it says which records of the file are of this run.
        self._source = source(options.device, None) | ({"commit": commit} if commit else {})
        self._found: dict[tuple, Measured] = {}
        self._written = -_WRITE_EVERY
        self._told = False
        self.unwritten: str | None = None

    def add(self, process: int, measured: Measured) -> None:
        self._found[(process, *measured.key)] = measured.plus(process=process)
        if perf_counter() - self._written >= _WRITE_EVERY:
            self.write()

    def write(self) -> None:
        """What cannot be written now may be later, and is measured in any case."""
        if self._out is not None and self._found:
            records = self.records()
            try:
                write_run(self._out, records)
            except (OSError, ValueError) as error:
                self.unwritten = in_one_line(error)
                if not self._told:
                    self._say(f"records cannot be written, measuring goes on: {self.unwritten}")
                self._told = True
            else:
                self.unwritten = None
        self._written = perf_counter()

    @property
    def measured(self) -> list[Measured]:
        return list(self._found.values())

    def records(self) -> list[Record]:
        return records_of(self._what, self.measured, source=self._source, seed=self._options.seed)


def _run(
    what: str,
    job: Job,
    options: Any,
    *,
    processes: int | None,
    out: Path | None,
    plot: Path | None,
    commit: str | None,
    prepare: Callable[[Any, Callable[[Job, Any], list[Measured]]], Any] | None = None,
) -> None:
    gpu = options.device.startswith("cuda")
    count = processes or (2 if gpu else 1)
    check_plot(plot)
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, 120))
    if not gpu:
        console.print(bench_view.ON_A_CPU, highlight=False, soft_wrap=True)

    def note(text: str) -> None:
        # No markup: what compilers and paths have in brackets is none.
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    collected = _Collected(what, options, out, commit, note)
    failure, status = None, 0
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)
        phase = _Phases(console, progress, task, note)

        def start(job: Job, options: Any, emit: Callable[[Measured], None]) -> None:
            if count == 1:
                job(options, emit, phase)
            else:
                run_apart(job, options, emit, phase)

        def gathered(job: Job, options: Any) -> list[Measured]:
            found: list[Measured] = []
            start(job, options, found.append)
            return found

        try:
            if prepare is not None:
                options = prepare(options, gathered)
            began = perf_counter()
            for process in range(count):
                each = (perf_counter() - began) / process if process else None
                left = "" if each is None else f" ({time_left(each * (count - process))})"
                phase.prefix = f"process {process + 1} of {count}{left}: " if count > 1 else ""
                start(job, of_process(options, process), lambda m, p=process: collected.add(p, m))
        except KeyboardInterrupt:
            failure, status = "interrupted", INTERRUPTED
        except Exception as error:
            if not collected.measured:
                raise
            _log.debug("twell bench has failed", exc_info=True)
            failure, status = in_one_line(error), FAILED
        finally:
            collected.write()
        phase.end()
    merged = merge(collected.measured)
    bench_view.show(console, merged, collected.records())
    if out is not None and collected.measured and collected.unwritten is None:
        console.print(f"records: {out}", highlight=False)
    if plot is not None and any(one.gain for one in merged):
        _draw(plot, merged)
        console.print(f"plot: {plot}", highlight=False)
    if failure is not None:
        kept = "what was measured before is above" if collected.measured else "nothing was measured yet"
        print(f"twell: {failure}; {kept}", file=sys.stderr)
    if collected.unwritten is not None:
        print(f"twell: records were not written: {collected.unwritten}", file=sys.stderr)
    if status or collected.unwritten is not None:
        raise typer.Exit(status or FAILED)


def _draw(plot: Path, merged: list) -> None:
    gains = {bench_view.label(one): one.gain.middle for one in merged if one.gain is not None}
    shape = merged[0].first.shape
    subtitle = f"{shape['model']}, {shape['layers']} layers, {shape.get('dtype', '')}; same run, same weights"
    baselines = dict.fromkeys(one.baseline for one in merged if one.gain is not None)
    speedup_bars(gains, plot, title=f"Times as fast as {' or '.join(baselines)}", subtitle=subtitle)


class _Phases:
    """Shows what is running and since when; prints what takes seconds as a line that stays."""

    def __init__(self, console: Console, progress: Progress, task: Any, note: Callable[[str], None]) -> None:
        self._console, self._progress, self._task, self._note = console, progress, task, note
        self._began, self._text, self.prefix = perf_counter(), "", ""
        self._noted: set[str] = set()

    def __call__(self, text: str) -> None:
        if text.startswith(PART):
            self._show(text.removeprefix(PART))
            return
        self.end()
        if text.startswith(NOTE):
            if text not in self._noted:  # processes say the same
                self._note(text.removeprefix(NOTE))
            self._noted.add(text)
            return
        self._text = f"{self.prefix}{text}"
        self._show(text)

    def _show(self, text: str) -> None:
        self._progress.update(self._task, description=f"{self.prefix}{text}")

    def end(self) -> None:
        took = perf_counter() - self._began
        if self._text and took >= _LONG:
            line = f"{took:6.1f} s  {self._text}"
            self._console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
        self._began, self._text = perf_counter(), ""
