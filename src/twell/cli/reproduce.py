"""`twell reproduce`: the paper's experiments, and our figures beside the paper's."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from .._errors import how_to_install
from .._files import write_atomically
from .status import FAILED, INTERRUPTED

_PLAIN = {"highlight": False, "markup": False, "soft_wrap": True}


def run_reproduce(
    *,
    scale: str,
    overrides: list[str],
    experiments: list[str],
    text: str | None,
    out: Path | None,
    tasks: list[str] | None,
    include: Path | None,
    commit: str | None,
) -> None:
    from ..reproduction.recipes import SCALES, plan
    from ..train.distributed import is_first

    names = [name.strip() for part in experiments for name in part.split(",") if name.strip()]
    chosen = plan(scale, names, text=text, overrides=overrides)
    folder = out or Path("runs") / f"reproduce-{scale}"
    console = Console()
    if is_first():
        console.print(
            f"{len(chosen.experiments)} experiments, {len(chosen.runs)} runs; scale {scale} takes "
            f"{SCALES[scale].takes}",
            **_PLAIN,
        )
    from ..reproduction.run import reproduce  # after validation: it imports transformers

    command = shlex.join(["twell", *sys.argv[1:]]) if "reproduce" in sys.argv[1:2] else ""
    try:
        outcome = reproduce(
            chosen, folder, tasks=tasks, include=include, command=command, commit=commit, console=console
        )
        finished = outcome.finished
    except KeyboardInterrupt:
        finished = False
    if not is_first():
        return
    if not finished:
        console.print("stopped; the same command continues", **_PLAIN)
        raise typer.Exit(INTERRUPTED)
    written = _write(outcome.results, folder, console)
    console.print(f"results: {', '.join(map(str, written))}", **_PLAIN)
    if outcome.failures:
        console.print(f"failed: {', '.join(outcome.failures)}; the same command tries again", **_PLAIN)
        raise typer.Exit(FAILED)


def _write(results: dict[str, Any], folder: Path, console: Console) -> list[Path]:
    """Show the tables; write them and the figures. The files."""
    from ..reproduction.figures import draw
    from ..reproduction.page import make_page
    from ..reproduction.results import legend, markdown, tables, where
    from ..reproduction.run import RESULTS

    if not console.is_terminal:
        console = Console(file=console.file, width=max(console.width, 150))
    for found in tables(results):
        shown = Table(*found.columns, title=found.title, title_justify="left")
        for place, column in enumerate(shown.columns):
            column.overflow = "fold"  # a narrow terminal must not cut figures off
            column.justify = "right" if place else "left"
        for row in found.rows:
            shown.add_row(*row)
        console.print(shown)
        console.print(" ".join(found.notes), end="\n\n", **_PLAIN)
    console.print(f"{legend(results)}\n{where(results)}", highlight=False, markup=False)
    page, report = folder / "results.md", folder / "report.html"
    write_atomically(page, markdown(results))
    write_atomically(report, make_page(results).html())
    written = [folder / RESULTS, page, report]
    if importlib.util.find_spec("matplotlib") is None:
        console.print(
            f"no plots without matplotlib: {how_to_install('plot')}, then the same command", **_PLAIN
        )
        return written
    return written + draw(results, folder)
