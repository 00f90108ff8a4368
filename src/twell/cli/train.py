"""`twell train`: collect settings from a preset, a file and arguments, then run; list settings in --help."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from .._errors import reject
from .next_steps import after_training
from .plot_file import short_name
from .progress import showing
from .status import INTERRUPTED

_PLAIN = {"highlight": False, "markup": False, "soft_wrap": True}


def run_train(
    *,
    overrides: list[str],
    preset: str | None,
    config: Path | None,
    out: Path | None,
    resume: Path | None,
    verify: bool = False,
) -> None:
    from ..train.distributed import is_first
    from ..train.presets import preset as preset_settings
    from ..train.presets import without_sizes
    from ..train.run_folder import CONFIG
    from ..train.settings import read_settings, run_config, with_overrides

    if resume is not None:
        if preset is not None or config is not None or out is not None:
            raise ValueError("--resume cannot be combined with --preset, --config or --out")
        if not (resume / CONFIG).is_file():
            parent = f"; did you mean {resume.parent}?" if (resume.parent / CONFIG).is_file() else ""
            reject("resume", str(resume), f"the folder of a run, with its {CONFIG}{parent}")
        settings = read_settings(resume / CONFIG)
        folder = resume
    else:
        if (preset is None) == (config is None):
            received = "nothing" if preset is None else "both --preset and --config"
            reject("settings", received, "one of --preset NAME, --config FILE.yaml and --resume FOLDER")
        settings = preset_settings(preset) if config is None else read_settings(config)
        if preset is not None and any(o.removeprefix("model.").startswith("init_from=") for o in overrides):
            settings = without_sizes(settings)
        folder = out or Path("runs") / (preset or config.stem)
    settings = run_config(with_overrides(settings, overrides))
    console = Console()
    with showing(console, "starting") if is_first() else nullcontext():
        # After validation: they import transformers, which takes seconds.
        from ..train.display import summary_rows
        from ..train.run import train
    with stopping_at_once(folder, console):
        result = train(settings, folder, resume=resume is not None, verify=verify, console=console)
    if not is_first():
        return
    if not result.finished:
        step = result.summary["step"]
        console.print(f"stopped after step {step}; to continue: twell train --resume {folder}", **_PLAIN)
        raise typer.Exit(INTERRUPTED)
    table = Table("", "", show_header=False)
    rows = summary_rows(result.summary)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(f"model: {folder / 'model'}", **_PLAIN)
    if (plot := _draw(folder, dict(rows))) is not None:
        console.print(f"plot: {plot}", **_PLAIN)
    steps = after_training(folder, sparse=not settings.model.dense)
    console.print(f"next: {', or '.join(steps)}", **_PLAIN)


@contextmanager
def stopping_at_once(folder: Path, console: Console) -> Iterator[None]:
    """Around a run: if Ctrl-C ends it in the middle of a step, say what is saved, and exit."""
    from ..train.checkpoints import newest_finished, step_of
    from ..train.distributed import is_first
    from ..train.run_folder import CONFIG

    try:
        yield
    except KeyboardInterrupt:
        if not is_first():
            raise typer.Exit(INTERRUPTED) from None
        last = newest_finished(folder)
        kept = "no step was saved" if last is None else f"step {step_of(last)} is saved in {last}"
        again = f"; to continue: twell train --resume {folder}" if (folder / CONFIG).is_file() else ""
        console.print(f"stopped at once; {kept}{again}", **_PLAIN)
        raise typer.Exit(INTERRUPTED) from None


def _draw(folder: Path, results: Mapping[str, str]) -> Path | None:
    """The file with the training curves; None without matplotlib, or if nothing was logged."""
    from ..train.display import draw_training
    from ..train.log_lines import read_metrics
    from ..train.run_folder import METRICS

    path, lines = folder / "training.png", read_metrics(folder / METRICS)
    known = [f"{results[name]} {name}" for name in ("parameters", "steps", "tokens") if name in results]
    title = f"Training of {short_name(str(folder))}"
    return path if draw_training(lines, path, title=title, subtitle=", ".join(known)) else None


def show_settings() -> None:
    """Print every preset, and every setting with its default and meaning, for `twell train --help`."""
    from ..train.config import meanings
    from ..train.presets import PRESETS, about

    console = Console(highlight=False, markup=False)
    table = Table("preset", "what it trains", title="Presets", title_justify="left", box=None)
    table.columns[0].no_wrap = True
    for name in PRESETS:
        table.add_row(name, about(name))
    console.print(table)
    console.print()
    table = Table("setting", "default", "meaning", title="Settings", title_justify="left", box=None)
    table.columns[0].no_wrap = True
    section = ""
    for key, default, meaning in meanings():
        if key.partition(".")[0] != section:
            section = key.partition(".")[0]
            table.add_row()
        table.add_row(key, _yaml(default), meaning)
    console.print(table)


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
