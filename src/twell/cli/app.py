"""Argument parsing only; each command lives in a module of its own, imported when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import rich  # noqa: F401  (every command draws with it: miss it here, where `main` explains)
import typer
from typer import Argument, Option
from typer.core import TyperCommand

app = typer.Typer(no_args_is_help=True, add_completion=False)


def _say_version(wanted: bool) -> None:
    if wanted:
        from .._version import __version__

        typer.echo(f"twell {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, Option("--version", help="Say the version and leave.", is_eager=True, callback=_say_version)
    ] = False,
) -> None:
    """Sparse feed-forward execution for LLMs."""
    if "--help" not in sys.argv:
        from .._processor import make_products_safe

        make_products_safe()


@app.command()
def demo(
    output: Annotated[Path, Option(help="Folder for the run, the plots and the results.")] = Path("demo_out"),
    overrides: Annotated[
        list[str] | None, Argument(help="Settings over the preset 'tiny', as key=value.", show_default=False)
    ] = None,
) -> None:
    """Train a small sparse model on the CPU, check it, time it, let it write: five minutes."""
    from .demo import run_demo

    run_demo(output=output, overrides=overrides or [])


@app.command()
def block(
    output: Annotated[Path, Option(help="Folder for the plot and the records.")] = Path("block_out"),
    hidden: Annotated[int, Option(min=8, help="Hidden size D.")] = 1024,
    neurons: Annotated[int, Option(min=8, help="Neurons H.")] = 4096,
    density: Annotated[float, Option(min=0, max=1, help="Active share of the neurons.")] = 0.01,
    tokens: Annotated[int, Option(min=1, help="Tokens of the prefill.")] = 1024,
) -> None:
    """Build a sparse block, show its formats, check it against the oracle, time it, plot it."""
    from .block import run_block

    run_block(output=output, hidden=hidden, neurons=neurons, density=density, tokens=tokens)


@app.command()
def doctor() -> None:
    """Show the hardware and versions seen, and which backends can run here."""
    from .doctor import run_doctor

    run_doctor()


@app.command()
def tune(
    device: Annotated[
        str | None, Option(help="cuda or cpu; the GPU if there is one.", show_default=False)
    ] = None,
    hidden: Annotated[int, Option(min=64, help="Hidden size D of your layers.")] = 2048,
    neurons: Annotated[int, Option(min=64, help="Neurons H of your layers.")] = 5632,
    gated: Annotated[bool, Option(help="Whether the block has a gate.")] = True,
    quick: Annotated[bool, Option("--quick", help="Fewer token counts and repetitions.")] = False,
) -> None:
    """Measure where sparse beats dense on this machine and keep the result for automatic plans."""
    from .tune import run_tune

    run_tune(device=device, hidden=hidden, neurons=neurons, gated=gated, quick=quick)


class _WithSettings(TyperCommand):
    """Lists the settings after the options."""

    def format_help(self, ctx, formatter) -> None:
        from .train import show_settings

        super().format_help(ctx, formatter)
        show_settings()


@app.command(cls=_WithSettings)
def train(
    overrides: Annotated[
        list[str] | None, Argument(help="Settings as key=value, such as train.steps=100.", show_default=False)
    ] = None,
    preset: Annotated[str | None, Option(help="tiny, small, paper-0.5b, paper-1b, ..., relufy.")] = None,
    config: Annotated[Path | None, Option(help="A YAML file of settings.")] = None,
    out: Annotated[Path | None, Option(help="The run's folder, new or empty; runs/PRESET without.")] = None,
    resume: Annotated[Path | None, Option(help="Go on with the run in this folder.")] = None,
    verify: Annotated[bool, Option("--verify", help="Check the contents of all token files.")] = False,
) -> None:
    """Train a sparse language model; alone, or under torchrun or `accelerate launch`."""
    from .train import run_train

    run_train(overrides=overrides or [], preset=preset, config=config, out=out, resume=resume, verify=verify)


@app.command("eval")
def evaluate(
    model: Annotated[str, Argument(help="A model's folder, a run's folder, or a name on the Hub.")],
    text: Annotated[
        list[str] | None, Option(help="Files, folders, 'python' or hf:NAME; repeat it for more.")
    ] = None,
    tasks: Annotated[list[str] | None, Option(help="lm-eval tasks; 'paper' for the paper's seven.")] = None,
    include: Annotated[Path | None, Option(help="Folder of lm-eval tasks of your own.")] = None,
    sequence_length: Annotated[
        int | None, Option(min=2, help="Tokens of a window of --text; the model's positions, at most 1024.")
    ] = None,
    batch: Annotated[int, Option(min=1, help="Windows at a time.")] = 8,
    max_tokens: Annotated[int | None, Option(min=2, help="Stop after so many tokens of text.")] = None,
    limit: Annotated[int | None, Option(min=1, help="Examples per task.")] = None,
    dtype: Annotated[str, Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    out: Annotated[Path | None, Option(help="A JSON file for the results.")] = None,
    verify: Annotated[bool, Option("--verify", help="Check the contents of a run's token files.")] = False,
) -> None:
    """Cross-entropy, perplexity and sparsity by layer, on what a run has held out or on other text; tasks."""
    from .evaluate import run_eval

    run_eval(
        model=model,
        text=text or [],
        tasks=tasks or [],
        include=include,
        sequence_length=sequence_length,
        batch=batch,
        max_tokens=max_tokens,
        limit=limit,
        dtype=dtype,
        out=out,
        verify=verify,
    )


@app.command()
def generate(
    model: Annotated[str, Argument(help="A model's folder, a run's folder, or a name on the Hub.")],
    prompt: Annotated[str, Option(help="Text to continue.")],
    tokens: Annotated[int | None, Option(min=1, help="New tokens; 64, or what fits.")] = None,
    temperature: Annotated[float, Option(min=0, help="0: always the likeliest token.")] = 0.0,
    top_p: Annotated[float, Option(min=0.01, max=1, help="Sample from so much of the probability.")] = 0.95,
    seed: Annotated[int, Option(help="Of the sampling.")] = 0,
    dtype: Annotated[str, Option(help="auto, float32, bfloat16 or float16.")] = "auto",
) -> None:
    """Continue a prompt, streaming, on the sparse decode path."""
    from .generate import run_generate

    run_generate(
        model=model,
        prompt=prompt,
        tokens=tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        dtype=dtype,
    )


@app.command()
def version() -> None:
    """Print the version."""
    from .. import __version__

    typer.echo(__version__)
