"""`twell verify`: measures a released checkpoint and compares it with published figures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from .._errors import reject
from .._files import write_json
from .plot_file import check_plot, short_name
from .progress import READING_TASKS, Bar, announce_tasks, showing
from .status import FAILED
from .text import text_source

if TYPE_CHECKING:
    from ..profiling import Profile
    from ..verification import Expected, Verification

_FIGURES = ("nnz", "accuracy")
_PARTS = ("text", "tasks")
_PIECE_BYTES = 4 << 20
_PLAIN = {"highlight": False, "markup": False, "soft_wrap": True}


def run_verify(
    *,
    model: str,
    text: list[str],
    tasks: list[str],
    include: Path | None,
    expect: list[str],
    skip: list[str],
    tokens: int,
    sequence_length: int | None,
    batch: int,
    limit: int | None,
    dtype: str,
    out: Path | None,
    plot: Path | None = None,
) -> None:
    from ..train.checkpoints import find_model
    from ..train.data.sources import documents
    from ..train.presets import PAPER_CORPUS

    given = _figures(expect)
    for part in skip:
        if part not in _PARTS:
            reject("--skip", part, " or ".join(_PARTS))
    if set(skip) == set(_PARTS):
        reject("--skip", "text and tasks", "one of them: something has to be measured")
    if out is not None and (out.exists() or not out.absolute().parent.is_dir()):
        reject("out", str(out), "a new file in a folder that exists")
    if plot is not None and "text" in skip:
        reject("plot", f"{plot} with --skip text", "text with it: the plot shows what layers do on text")
    check_plot(plot)
    find_model(model)
    source = text_source(text or [PAPER_CORPUS])
    console = Console()
    with showing(console, f"loading {model}"):
        from ..evaluation import PAPER_TASKS, load_model, require_sparse_blocks
        from ..verification import verify_model

        loaded, tokenizer = load_model(model, dtype=dtype)
    require_sparse_blocks(loaded)
    expected = _expected(loaded.config, given, model)
    names = [name for task in tasks or ["paper"] for name in (PAPER_TASKS if task == "paper" else (task,))]
    shown = (READING_TASKS, len(names), "tasks") if "text" in skip else ("counting", tokens)
    with Bar(console, *shown) as bar:

        def say(names: list[str]) -> None:
            bar.clear()
            announce_tasks(console, names)

        found = verify_model(
            loaded,
            tokenizer,
            expected,
            documents=None if "text" in skip else documents(source, longest=_PIECE_BYTES),
            tasks=() if "tasks" in skip else names,
            include=include,
            sequence_length=sequence_length,
            max_tokens=tokens,
            limit=limit,
            batch=batch,
            progress=bar.advance,
            say=say,
        )
    _show(console, found)
    if out is not None:
        write_json(out, {"model": model, "passed": found.passed, **dataclasses.asdict(found)})
    if plot is not None and found.profile is not None:
        _draw(found.profile, f"{short_name(model)}, {found.profile.tokens:,} tokens", plot)
        console.print(f"plot: {plot}", **_PLAIN)
    if not found.passed:
        raise typer.Exit(FAILED)


def _figures(expect: list[str]) -> dict[str, float]:
    """--expect NAME=NUMBER, by name."""
    found = {}
    for entry in expect:
        name, _, number = entry.partition("=")
        try:
            found[name] = float(number)
        except ValueError:
            reject("--expect", entry, "nnz=NUMBER or accuracy=PERCENT")
        if name not in _FIGURES:
            reject("--expect", entry, "nnz=NUMBER or accuracy=PERCENT")
    return found


def _expected(config: object, given: dict[str, float], model: str) -> Expected:
    from ..verification import Expected, published

    paper = published(config)
    if given:
        return Expected(source="--expect", **given)
    if paper is None:
        reject(
            "model",
            f"{model!r}, which is none of the paper's",
            "SakanaAI/SparseLM0.5B, 1B, 1.5B, 2B or a copy, or another with --expect nnz=... or accuracy=...",
        )
    return paper


def _show(console: Console, found: Verification) -> None:
    if found.profile is not None:
        table = Table("layer", "active per token", "of", "p99", "dead", "first token")
        for number, layer in enumerate(found.profile.layers):
            first = "-" if layer.nnz_by_position is None else f"{layer.nnz_by_position[0]:.0f}"
            dead = f"{layer.firing.dead / layer.neurons:.1%}"
            nnz = layer.nnz
            table.add_row(str(number), f"{nnz.mean:.1f}", f"{layer.neurons:,}", f"{nnz.p99:,}", dead, first)
        console.print(table)
    if found.tasks:
        table = Table("task", "accuracy")
        for name, percent in found.tasks.items():
            table.add_row(name, f"{percent:.1f}%")
        console.print(table)
    table = Table("", "measured", "expected", "tolerance", "", title=f"Against {found.expected.source}")
    table.title_justify = "left"
    for check in found.checks:
        verdict = f"{check.verdict}: {check.why}" if check.why else check.verdict
        table.add_row(check.what, check.measured, check.expected, check.tolerance, verdict)
    console.print(table)
    for what, why in found.missing.items():
        console.print(f"not measured: {what}: {why}", **_PLAIN)
    if found.failed:
        console.print(f"failed: {', '.join(check.what for check in found.failed)}", **_PLAIN)
    elif found.missing:
        console.print("incomplete: nothing that was measured failed", **_PLAIN)
    else:
        console.print("verified", **_PLAIN)


def _draw(profile: Profile, subtitle: str, plot: Path) -> None:
    from ..plots import layer_activity

    active, neurons, dead = zip(
        *((layer.nnz.mean, layer.neurons, layer.firing.dead / layer.neurons) for layer in profile.layers),
        strict=True,
    )
    title = "Active neurons per token, and dead ones"
    layer_activity(active, neurons, dead, plot, title=title, subtitle=subtitle)
