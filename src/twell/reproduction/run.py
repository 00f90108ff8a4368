"""Trains the runs of a plan one after the other, in folders of their own, and measures each.

OUT/plan.json               scale, text and settings: what the folder belongs to
OUT/runs/NAME/              a run's folder, as of `twell train`, without the checkpoints of a finished run
OUT/runs/NAME/speed.json    how fast it is, measured where; `tasks.json`: its accuracy
OUT/results.json            everything, again after each run

A process may be killed anywhere. The next call with the same folder skips what is finished, resumes the run
that was interrupted from its newest checkpoint, and measures what is not measured yet.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from .._errors import ran_out_of_memory, reject
from .._files import make_folder, read_json_object, remove, write_json
from .._numbers import time_left
from ..evaluation import evaluate_tasks, load_model
from ..measure.processes import NOTE
from ..measure.records import source
from ..train.checkpoints import checkpoints
from ..train.config import RunConfig
from ..train.distributed import is_first
from ..train.metrics import read_metrics
from ..train.run import train
from ..train.run_folder import CONFIG, METRICS, exclusive, with_absolute_paths
from .recipes import SCALES, Plan, experiments_of
from .speed import measure_speed

PLAN, RESULTS, RUNS, SPEED, TASKS = "plan.json", "results.json", "runs", "speed.json", "tasks.json"
_PLAIN = {"highlight": False, "markup": False, "soft_wrap": True}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """finished: whether no run was interrupted. results: as in results.json."""

    finished: bool
    results: dict[str, Any]

    @property
    def failures(self) -> dict[str, str]:
        return {name: run["failure"] for name, run in self.results["runs"].items() if run.get("failure")}


def reproduce(
    plan: Plan,
    out: Path,
    *,
    tasks: Sequence[str] | None = None,
    include: Path | None = None,
    command: str = "",
    commit: str | None = None,
    console: Console | None = None,
) -> Outcome:
    """Do what is not done yet of `plan` in the folder `out`.

    tasks:    lm-eval's, None: the scale's own. include: a folder of your own.
    command:  noted in the results, for the reader. commit: where git is not available.
    Call it in one process, or in each process that torchrun or `accelerate launch` has started.
    """
    console = console or Console()
    make_folder(out, "out")
    _refuse_foreign(out)  # before a lock is written there
    with exclusive(out, "out") if is_first() else nullcontext():
        _check_folder(plan, out)
        return _all(plan, out, tasks, include, command, commit, console)


def _all(
    plan: Plan,
    out: Path,
    tasks: Sequence[str] | None,
    include: Path | None,
    command: str,
    commit: str | None,
    console: Console,
) -> Outcome:
    """What `reproduce` does in a folder of its own."""
    chosen = SCALES[plan.scale].tasks if tasks is None else tuple(tasks)
    # A call with other experiments adds to what earlier ones have found.
    before = read_json_object(out / RESULTS) or {"experiments": {}, "runs": {}}
    results: dict[str, Any] = {
        "scale": plan.scale,
        "command": command,
        "experiments": {
            name: list(one.runs)
            for name, one in experiments_of(SCALES[plan.scale]).items()
            if name in plan.experiments or name in before["experiments"]
        },
        "text": next(iter(plan.configs.values())).data.source,
        "runs": {name: run for name, run in before["runs"].items() if name not in plan.runs},
    }
    clock = _Clock(plan.configs)
    for number, name in enumerate(plan.runs, start=1):
        folder = out / RUNS / name
        _say(console, f"run {number} of {len(plan.runs)}: {name} ({plan.runs[name].title}){clock.left(name)}")
        began = perf_counter()
        entry = results["runs"][name] = _described(plan, name)
        skipped = _is_done(folder, chosen)
        try:
            finished = _one(plan, name, folder, chosen, include, commit, entry, console)
        except (FloatingPointError, RuntimeError) as error:
            if not (isinstance(error, FloatingPointError) or ran_out_of_memory(error)):
                raise
            finished, entry["failure"] = True, str(error).partition("\n")[0]
            _say(console, f"{name} failed: {entry['failure']}")
        if not finished:
            return Outcome(finished=False, results=results)
        clock.done(name, None if skipped else perf_counter() - began)
        if is_first():
            write_json(out / RESULTS, results)
        _forget()
    return Outcome(finished=True, results=results)


def _one(
    plan: Plan,
    name: str,
    folder: Path,
    tasks: Sequence[str],
    include: Path | None,
    commit: str | None,
    entry: dict[str, Any],
    console: Console,
) -> bool:
    """Train and measure one run, as far as that is not done; whether it is finished."""
    config = plan.configs[name]
    result = train(config, folder, resume=(folder / CONFIG).is_file(), console=console)
    if not result.finished:
        return False
    if not is_first():
        return True
    for checkpoint in checkpoints(folder):
        remove(checkpoint)  # the model and its figures are there; nothing resumes from it any more
    lines = read_metrics(folder / METRICS)
    entry["summary"] = result.summary
    entry["nnz_by_layer"] = _by_layer(lines)
    entry["curve"] = [
        {key: line[key] for key in ("tokens", "ce_loss", "nnz") if key in line}
        for line in lines
        if "ce_loss" in line
    ]
    entry |= _kept(folder / SPEED, lambda: _timed(folder, config, plan.scale, commit, console))
    if tasks:
        path = folder / TASKS
        known = read_json_object(path)
        if known is not None and (known.get("asked") != list(tasks) or known.get("missing")):
            remove(path)  # other tasks, or some that could not be run then
        found = _kept(path, lambda: _accuracy(folder, tasks, include))
        entry["tasks"], entry["tasks_missing"] = found["tasks"], found["missing"]
    return True


def _kept(path: Path, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a file holds; measured and written first where there is none."""
    found = read_json_object(path)
    if found is None:
        found = measure()
        write_json(path, found)
    return found


def _timed(
    folder: Path, config: RunConfig, scale: str, commit: str | None, console: Console
) -> dict[str, Any]:
    """The speed of a run, and where it was measured: a later call may come from another commit."""
    origin = source("cuda" if torch.cuda.is_available() else "cpu", None)
    with console.status(f"timing {folder.name}") as status:  # on a terminal only

        def say(text: str) -> None:
            status.update(Text(f"timing {folder.name}: {text.removeprefix(NOTE)}"))  # brackets are no markup

        found = measure_speed(folder, config, SCALES[scale].speed_shape(config), say)
    return {"speed": found, "source": origin | ({"commit": commit} if commit is not None else {})}


def _accuracy(folder: Path, tasks: Sequence[str], include: Path | None) -> dict[str, Any]:
    """Percent by task, and what could not be run."""
    missing: dict[str, str] = {}
    model, tokenizer = load_model(str(folder))
    found = evaluate_tasks(model, tokenizer, list(tasks), include=include, missing=missing)
    scores = {task: 100 * value for task, value in found.items()}
    return {"asked": list(tasks), "tasks": scores, "missing": missing}


def _is_done(folder: Path, tasks: Sequence[str]) -> bool:
    return all((folder / name).exists() for name in (SPEED, *([TASKS] if tasks else [])))


def _by_layer(lines: list[dict[str, Any]]) -> list[float]:
    """Active neurons by layer in the last evaluation; of training's last log without one."""
    for prefix in ("eval_nnz_layer_", "nnz_layer_"):
        for line in reversed(lines):
            if f"{prefix}0" in line:
                count = sum(key.startswith(prefix) for key in line)
                return [line[f"{prefix}{layer}"] for layer in range(count)]
    return []


def _described(plan: Plan, name: str) -> dict[str, Any]:
    run, config = plan.runs[name], plan.configs[name]
    return {
        "title": run.title,
        "preset": config.preset,
        "paper_l1": run.l1,
        "l1": None if run.l1 is None else config.recipe.l1,
        "neurons": config.model.intermediate_size,
        "hidden_size": config.model.hidden_size,
        "layers": config.model.layers,
        "gated": config.model.gated,
        "activation": config.model.activation,
        "steps": config.train.steps,
        "tokens_per_step": config.tokens_per_step,
    }


def _refuse_foreign(out: Path) -> None:
    """Refuse a folder that holds something else than a reproduction, or one whose plan is damaged."""
    # First what is there, then the plan: under torchrun another process may write it in between.
    used = any(not path.name.startswith(".") for path in out.iterdir())
    if used and read_json_object(out / PLAN) is None:
        reject("out", str(out), "a new or empty folder, or that of a reproduction to continue")


def _check_folder(plan: Plan, out: Path) -> None:
    """Refuse the folder of another reproduction; note this one. Experiments may be added later."""
    now = {"scale": plan.scale, "runs": {name: _settings(config) for name, config in plan.configs.items()}}
    stored = read_json_object(out / PLAN)
    if stored is not None:
        if stored.get("scale") != plan.scale:
            reject("out", f"{out}, begun at scale {stored.get('scale')}", "another folder, or that scale")
        for name, settings in stored.get("runs", {}).items():
            if now["runs"].setdefault(name, settings) != settings:
                reject(
                    "out",
                    f"{out}, begun with other settings or another text",
                    "another folder, or the same command as before",
                )
    if is_first() and now != stored:
        write_json(out / PLAN, now)


def _settings(config: RunConfig) -> dict[str, Any]:
    """As JSON gives it back. Where tokens are cached changes nothing."""
    config = with_absolute_paths(config)
    found = config.as_dict()
    found["data"].pop("cache")
    found["data"]["source"] = list(config.data.sources)
    found["train"]["report"] = list(config.train.report)
    return found


class _Clock:
    """How long the rest takes, from how long runs of this process took."""

    def __init__(self, configs: dict[str, RunConfig]) -> None:
        self._work = {name: _work(config) for name, config in configs.items()}
        self._left = sum(self._work.values())
        self._seconds = self._done = 0.0

    def left(self, name: str) -> str:
        if not self._seconds:
            return ""
        return f", {time_left(self._left * self._seconds / self._done)}"

    def done(self, name: str, seconds: float | None) -> None:
        """seconds: None for a run that was finished before."""
        self._left -= self._work[name]
        if seconds is not None:
            self._seconds += seconds
            self._done += self._work[name]


def _work(config: RunConfig) -> float:
    """In proportion to the operations of a run."""
    model = config.model
    blocks = (3 if model.gated else 2) * model.intermediate_size
    layer = model.hidden_size * (4 * model.hidden_size + blocks)
    return config.train.steps * config.tokens_per_step * (model.layers * layer)


def _say(console: Console, text: str) -> None:
    if is_first():
        console.print(text, style="bold", **_PLAIN)


def _forget() -> None:
    """Free what a run leaves in this process."""
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
