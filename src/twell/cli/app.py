"""Argument parsing only; each command lives in a module of its own, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import rich  # noqa: F401  (every command draws with it: miss it here, where `main` explains)
import typer
from typer import Option

app = typer.Typer(help="Sparse feed-forward execution for LLMs.", no_args_is_help=True, add_completion=False)


@app.command()
def demo(
    output: Annotated[Path, Option(help="Folder for the plot and the records.")] = Path("demo_out"),
    hidden: Annotated[int, Option(min=8, help="Hidden size D.")] = 1024,
    neurons: Annotated[int, Option(min=8, help="Neurons H.")] = 4096,
    density: Annotated[float, Option(min=0, max=1, help="Active share of the neurons.")] = 0.01,
    tokens: Annotated[int, Option(min=1, help="Tokens of the prefill.")] = 1024,
) -> None:
    """Build a sparse block, show its formats, check it against the oracle, time it, plot it."""
    from .demo import run_demo

    run_demo(output=output, hidden=hidden, neurons=neurons, density=density, tokens=tokens)


@app.command()
def doctor() -> None:
    """Show the hardware and versions seen, and which backends can run here."""
    from .doctor import run_doctor

    run_doctor()


@app.command()
def tune(
    hidden: Annotated[int, Option(min=64, help="Hidden size D of your layers.")] = 2048,
    neurons: Annotated[int, Option(min=64, help="Neurons H of your layers.")] = 5632,
    gated: Annotated[bool, Option(help="Whether the block has a gate.")] = True,
    quick: Annotated[bool, Option("--quick", help="Fewer token counts and repetitions.")] = False,
) -> None:
    """Measure where sparse beats dense on this GPU and keep the result for automatic plans."""
    from .tune import run_tune

    run_tune(hidden=hidden, neurons=neurons, gated=gated, quick=quick)


@app.command()
def version() -> None:
    """Print the version."""
    from .. import __version__

    typer.echo(__version__)
