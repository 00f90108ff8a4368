"""Declares every command and its options (those of `twell bench`: `bench_options`). Each has its own module,
imported when the command runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import rich  # noqa: F401 - every command needs it; imported here, where `main` explains its absence
import typer
from typer import Argument, Option
from typer.core import TyperCommand, TyperGroup

from .bench_options import bench

MOST_NEURONS = 65_535  # of row TwELL
_SOURCE = "a file, a folder, 'python' (its standard library) or hf:NAME (a dataset); may be repeated."
_DTYPE = Option(
    help="auto, float32, bfloat16 or float16. auto: float32 on a CPU; on a GPU as trained, or as stored."
)
_ACTIVITY = "Draw active and dead neurons by layer to this PNG file."
_PANELS = {
    "Start here": ("demo", "explain", "report"),
    "Use a model": ("generate", "serve", "prune"),
    "Train a model": ("train", "eval", "reproduce"),
    "Measure": ("bench", "profile", "verify"),
    "This machine": ("doctor", "tune", "block"),
}


class _Panels(TyperGroup):
    """Lists commands by what they are for, those that a newcomer wants first."""

    def list_commands(self, ctx) -> list[str]:
        for panel, names in _PANELS.items():
            for name in names:
                self.commands[name].rich_help_panel = panel
        return [name for names in _PANELS.values() for name in names]


app = typer.Typer(cls=_Panels, no_args_is_help=True, add_completion=False)
app.add_typer(bench, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        from .._version import __version__

        typer.echo(f"twell {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Sparse feed-forward execution for LLMs."""
    if "--help" not in sys.argv:
        from .._processor import make_products_safe

        make_products_safe()


@app.command()
def demo(
    output: Annotated[Path, Option(help="Folder for the runs, the plots and the report.")] = Path("demo_out"),
    overrides: Annotated[
        list[str] | None, Argument(help="Changes to the preset 'demo', as key=value.", show_default=False)
    ] = None,
) -> None:
    """Train, check and time a small sparse model on the CPU, and write a report (two to three minutes)."""
    from .demo import run_demo

    run_demo(output=output, overrides=overrides or [])


@app.command()
def block(
    output: Annotated[Path, Option(help="Folder for the plot and the records.")] = Path("block_out"),
    hidden: Annotated[int, Option(min=8, help="Hidden size D.")] = 1024,
    neurons: Annotated[
        int, Option(min=8, max=MOST_NEURONS, help="Neurons H; TwELL has 16-bit indices.")
    ] = 4096,
    density: Annotated[float, Option(min=0, max=1, help="Share of active neurons.")] = 0.01,
    tokens: Annotated[int, Option(min=1, help="Tokens of the prefill.")] = 1024,
) -> None:
    """Build one sparse block, show its storage formats, check its result, then time and plot it."""
    from .block import run_block

    run_block(output=output, hidden=hidden, neurons=neurons, density=density, tokens=tokens)


@app.command()
def doctor() -> None:
    """Show hardware, versions, the backends that run here and how automatic plans decide."""
    from .doctor import run_doctor

    run_doctor()


@app.command()
def tune(
    device: Annotated[
        str | None, Option(help="cuda or cpu. Default: the GPU if there is one.", show_default=False)
    ] = None,
    hidden: Annotated[int, Option(min=64, help="Hidden size D of your layers.")] = 2048,
    neurons: Annotated[int, Option(min=64, help="Neurons H of your layers.")] = 5632,
    gated: Annotated[bool, Option(help="Whether your layers have a gate.")] = True,
    quick: Annotated[
        bool,
        Option(
            "--quick",
            help="Measure less: on a GPU fewer token counts, on a CPU fewer dtypes and one layout.",
        ),
    ] = False,
    training: Annotated[bool, Option("--training", help="Measure training steps instead; GPU only.")] = False,
    plot: Annotated[
        Path | None,
        Option(help="Draw gains by share of active neurons (CPU: limits by tokens) to this PNG file."),
    ] = None,
) -> None:
    """Measure where sparse beats dense on this machine and store the limits for automatic plans."""
    from .tune import run_tune

    run_tune(
        device=device,
        hidden=hidden,
        neurons=neurons,
        gated=gated,
        quick=quick,
        training=training,
        plot=plot,
    )


class _WithSettings(TyperCommand):
    """Lists the presets, and the settings after the options."""

    def format_help(self, ctx, formatter) -> None:
        from ..train.presets import PRESETS
        from .train import show_settings

        for option in self.params:
            if option.name == "preset":
                option.help = f"{', '.join(PRESETS)}."
        super().format_help(ctx, formatter)
        show_settings()


@app.command(cls=_WithSettings)
def train(
    overrides: Annotated[
        list[str] | None, Argument(help="Settings as key=value, such as train.steps=100.", show_default=False)
    ] = None,
    preset: Annotated[str | None, Option(help="Named settings.")] = None,
    config: Annotated[
        Path | None, Option(help="A YAML file of settings: sections model, data, recipe and train.")
    ] = None,
    out: Annotated[Path | None, Option(help="The run's folder, new or empty. Default: runs/PRESET.")] = None,
    resume: Annotated[Path | None, Option(help="Resume the run in this folder.")] = None,
    verify: Annotated[bool, Option("--verify", help="Check the contents of all token files.")] = False,
) -> None:
    """Train a sparse language model, also under torchrun or `accelerate launch`.

    Needs --preset, --config or --resume.
    """
    from .train import run_train

    run_train(overrides=overrides or [], preset=preset, config=config, out=out, resume=resume, verify=verify)


@app.command()
def reproduce(
    scale: Annotated[
        str, Option(help="tiny (CPU, 12 minutes), small (a GPU, 13 minutes) or paper (a cluster, days).")
    ],
    overrides: Annotated[
        list[str] | None, Argument(help="Settings of every run, as key=value.", show_default=False)
    ] = None,
    experiments: Annotated[
        list[str] | None,
        Option(help="lambda, sizes, activation, gate, dead; commas or repeated. Default: all."),
    ] = None,
    text: Annotated[
        str | None,
        Option(
            help="A file, a folder, 'python' or hf:NAME. small needs one, of 20 MB or more; default of tiny: "
            "python; of paper: its corpus.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Option(
            help="Folder for runs and results; an unfinished one is continued. Default: runs/reproduce-SCALE."
        ),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        Option(
            help="An lm-eval task for every model; may be repeated. Default: the paper's for scale paper."
        ),
    ] = None,
    include: Annotated[Path | None, Option(help="Folder of your own lm-eval tasks.")] = None,
    commit: Annotated[
        str | None, Option(help="Commit hash to record if git is not available.", show_default=False)
    ] = None,
) -> None:
    """Run the paper's experiments and compare the results with the paper's. Rerun the command to continue."""
    from .reproduce import run_reproduce

    run_reproduce(
        scale=scale,
        overrides=overrides or [],
        experiments=experiments or [],
        text=text,
        out=out,
        tasks=tasks,
        include=include,
        commit=commit,
    )


@app.command("eval")
def evaluate(
    model: Annotated[str, Argument(help="A model's folder, a run's folder, or a name on the Hub.")],
    text: Annotated[
        list[str] | None,
        Option(help=f"What to read: {_SOURCE} Default: the run's held-out text.", show_default=False),
    ] = None,
    tasks: Annotated[
        list[str] | None, Option(help="An lm-eval task, or 'paper' for the paper's seven; may be repeated.")
    ] = None,
    include: Annotated[Path | None, Option(help="Folder of your own lm-eval tasks.")] = None,
    sequence_length: Annotated[
        int | None,
        Option(min=2, help="Tokens in a window of --text. Default: what the model takes, at most 1024."),
    ] = None,
    batch: Annotated[int, Option(min=1, help="Windows per batch.")] = 8,
    max_tokens: Annotated[int | None, Option(min=2, help="Stop after this many tokens of text.")] = None,
    limit: Annotated[int | None, Option(min=1, help="Examples per task.")] = None,
    dtype: Annotated[str, _DTYPE] = "auto",
    out: Annotated[Path | None, Option(help="Write the results to this JSON file.")] = None,
    verify: Annotated[bool, Option("--verify", help="Check the contents of a run's token files.")] = False,
    plot: Annotated[Path | None, Option(help=_ACTIVITY)] = None,
) -> None:
    """Measure cross-entropy and sparsity on a run's held-out text or other text; run lm-eval tasks."""
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
        plot=plot,
    )


@app.command()
def explain(
    model: Annotated[str, Argument(help="A model's folder, a run's folder, or a name on the Hub.")],
    text: Annotated[list[str], Option(help=f"What to run: {_SOURCE}")],
    tokens: Annotated[int, Option(min=2, help="Tokens of the batch.")] = 4096,
    sequence_length: Annotated[
        int | None, Option(min=2, help="Tokens in a window. Default: what the model takes, at most 1024.")
    ] = None,
    dtype: Annotated[str, _DTYPE] = "auto",
    save: Annotated[
        bool,
        Option(
            "--save", help="Write each layer's share of active neurons to the model's config.json, for vLLM."
        ),
    ] = False,
    plot: Annotated[
        Path | None, Option(help="Draw active neurons and gains by layer to this PNG file.")
    ] = None,
) -> None:
    """Show how every block of a model runs on a text, why, and its speed-up over dense PyTorch."""
    from .explain import run_explain

    run_explain(
        model=model,
        text=text,
        tokens=tokens,
        sequence_length=sequence_length,
        dtype=dtype,
        save=save,
        plot=plot,
    )


@app.command()
def profile(
    model: Annotated[str, Argument(help="A model's folder, a run's folder, or a name on the Hub.")],
    text: Annotated[list[str], Option(help=f"What to count on: {_SOURCE}")],
    out: Annotated[
        Path | None, Option(help="New folder for profile.json and the plots. Default: a table only.")
    ] = None,
    tokens: Annotated[int | None, Option(min=2, help="Stop after this many tokens of text.")] = None,
    sequence_length: Annotated[
        int | None, Option(min=2, help="Tokens in a sequence. Default: what the model takes, at most 1024.")
    ] = None,
    batch: Annotated[int, Option(min=1, help="Sequences per batch.")] = 8,
    sample: Annotated[
        int, Option(min=0, help="Number of leading tokens to record one by one, for the heat map; 0: none.")
    ] = 256,
    speed: Annotated[bool, Option(help="Time every layer against dense PyTorch on the first batch.")] = True,
    dtype: Annotated[str, _DTYPE] = "auto",
) -> None:
    """Count how many neurons of a model fire on a text, which ones and where; time each layer."""
    from .profile import run_profile

    run_profile(
        model=model,
        text=text,
        out=out,
        tokens=tokens,
        sequence_length=sequence_length,
        batch=batch,
        sample=sample,
        speed=speed,
        dtype=dtype,
    )


@app.command()
def report(
    inputs: Annotated[
        list[Path],
        Argument(
            help="Runs' folders, profiles (profile.json or its folder), .jsonl files of records, in any mix; "
            "or a reproduction's folder."
        ),
    ],
    out: Annotated[Path, Option(help="HTML file to write; it is self-contained.")] = Path("report.html"),
    markdown: Annotated[
        Path | None,
        Option(
            help="Also write Markdown to this file, with its figures in a folder beside it: FILE_figures."
        ),
    ] = None,
) -> None:
    """Turn training runs, profiles and records into one HTML page: headline, tables, figures, token map."""
    from .report import run_report

    run_report(inputs=inputs, out=out, markdown=markdown)


@app.command()
def verify(
    model: Annotated[
        str, Argument(help="One of the paper's checkpoints, such as SakanaAI/SparseLM1.5B, or a folder.")
    ],
    text: Annotated[
        list[str] | None,
        Option(help="Text to count active neurons on; may be repeated. Default: the paper's corpus."),
    ] = None,
    tasks: Annotated[
        list[str] | None, Option(help="An lm-eval task; may be repeated. Default: the paper's seven.")
    ] = None,
    include: Annotated[Path | None, Option(help="Folder of your own lm-eval tasks.")] = None,
    expect: Annotated[
        list[str] | None,
        Option(help="nnz=NUMBER or accuracy=PERCENT, in place of the paper's figures; may be repeated."),
    ] = None,
    skip: Annotated[list[str] | None, Option(help="Part to skip: text or tasks.")] = None,
    tokens: Annotated[int, Option(min=2, help="Tokens of text.")] = 262_144,
    sequence_length: Annotated[
        int | None, Option(min=2, help="Tokens in a sequence. Default: what the model takes, at most 1024.")
    ] = None,
    batch: Annotated[int, Option(min=1, help="Sequences per batch.")] = 8,
    limit: Annotated[int | None, Option(min=1, help="Examples per task, for a quick look.")] = None,
    dtype: Annotated[str, _DTYPE] = "auto",
    out: Annotated[Path | None, Option(help="Write the results to this JSON file.")] = None,
    plot: Annotated[Path | None, Option(help=_ACTIVITY)] = None,
) -> None:
    """Compare a released checkpoint with published figures: active neurons per layer, accuracy on tasks."""
    from .verify import run_verify

    run_verify(
        model=model,
        text=text or [],
        tasks=tasks or [],
        include=include,
        expect=expect or [],
        skip=skip or [],
        tokens=tokens,
        sequence_length=sequence_length,
        batch=batch,
        limit=limit,
        dtype=dtype,
        out=out,
        plot=plot,
    )


@app.command()
def prune(
    model: Annotated[str, Argument(help="A model's folder, a run's folder, or a name on the Hub.")],
    text: Annotated[list[str], Option(help=f"What to count on: {_SOURCE}")],
    out: Annotated[Path, Option(help="Folder for the pruned model, which must not exist yet.")],
    min_fires: Annotated[int, Option(min=1, help="Remove neurons that fire fewer than this many times.")] = 1,
    tokens: Annotated[int | None, Option(min=2, help="Stop after this many tokens of text.")] = None,
    sequence_length: Annotated[
        int | None, Option(min=2, help="Tokens in a window. Default: what the model takes, at most 1024.")
    ] = None,
    batch: Annotated[int, Option(min=1, help="Windows per batch.")] = 8,
    dtype: Annotated[
        str, Option(help="auto (keeps the stored dtype), float32, bfloat16 or float16 (saves in that dtype).")
    ] = "auto",
    plot: Annotated[
        Path | None, Option(help="Draw neurons before and after by layer to this PNG file.")
    ] = None,
) -> None:
    """Remove the neurons that never fire on a text, save the model, and compare it before and after."""
    from .prune import run_prune

    run_prune(
        model=model,
        text=text,
        out=out,
        min_fires=min_fires,
        tokens=tokens,
        sequence_length=sequence_length,
        batch=batch,
        dtype=dtype,
        plot=plot,
    )


@app.command()
def generate(
    model: Annotated[str, Argument(help="A model's folder, a run's folder, or a name on the Hub.")],
    prompt: Annotated[str, Option(help="Text to continue.")],
    tokens: Annotated[int | None, Option(min=1, help="New tokens. Default: 64, or as many as fit.")] = None,
    temperature: Annotated[float, Option(min=0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    top_k: Annotated[int, Option(min=0, help="Sample from the best K tokens; 0: from all.")] = 0,
    top_p: Annotated[float, Option(min=0.01, max=1, help="Nucleus sampling threshold.")] = 0.95,
    repetition_penalty: Annotated[
        float, Option(min=0.01, help="Values above 1 make tokens that already occurred less likely.")
    ] = 1.0,
    batch: Annotated[
        int,
        Option(
            min=1, help="Texts to sample at once (needs --temperature above 0); printed when all are done."
        ),
    ] = 1,
    seed: Annotated[int, Option(help="Sampling seed.")] = 0,
    dtype: Annotated[str, _DTYPE] = "auto",
) -> None:
    """Continue a prompt and stream the text."""
    from .generate import run_generate

    run_generate(
        model=model,
        prompt=prompt,
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        batch=batch,
        seed=seed,
        dtype=dtype,
    )


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[str, Argument(help="A model's folder, a run's folder, or a name on the Hub.")],
) -> None:
    """Serve a model over HTTP, as OpenAI's API: with vLLM if it is installed, else with transformers.

    Options after `--` are passed to that server unchanged: `twell serve MODEL -- --port 8001`.
    """
    from .serve import run_serve

    run_serve(model=model, options=context.args)
