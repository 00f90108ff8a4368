"""Declares the options of `twell bench`, as `app` does those of other commands; `bench` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

bench = typer.Typer(no_args_is_help=True, help="Compare whole models with dense ones: speed, energy, memory.")


_PRESET = Option(
    help="tiny, small, paper-0.5b, paper-1b, paper-1.5b or paper-2b. Default: paper-2b, tiny on a CPU.",
    show_default=False,
)
_CONTENDERS = {
    "inference": Option(
        help="Separated by commas: dense-eager, dense-compiled, best-dense, ours-eager, ours-compiled; of "
        "generation dense-eager, dense-captured, ours-captured, on a CPU dense-eager, ours-eager. Default: "
        "all, on a CPU the eager ones."
    ),
    "training": Option(
        help="Separated by commas: dense-eager, dense-compiled, dense-autotuned, dense-liger, ours-eager, "
        "ours-compiled. Default: all but dense-autotuned and dense-liger, on a CPU the eager ones."
    ),
}
_NNZ = Option(min=0, help="Active neurons per token to build every layer with. Default: the paper's.")
_DEVICE = Option(help="cuda, cuda:1 or cpu. Default: the GPU if there is one.", show_default=False)
_ROUNDS = Option(min=1, help="Interleaved rounds. Default: 9, on a CPU 6.", show_default=False)
_PROCESSES = Option(
    min=1, help="Processes, each with a build of its own. Default: 2, on a CPU 1.", show_default=False
)
_ENERGY = Option(min=0, help="Seconds of an energy window; 0: no energy. Counters move every 20 to 100 ms.")
_OUT = Option(help="Append records to this JSON Lines file, as they come.")
_PLOT = Option(help="Draw the speed-ups to this PNG file.")
_COMMIT = Option(help="The commit to note where git is not available.")


@bench.command("inference")
def bench_inference(
    model: Annotated[
        str | None,
        Argument(help="A model's folder, a run's folder, or a name on the Hub.", show_default=False),
    ] = None,
    preset: Annotated[str | None, _PRESET] = None,
    text: Annotated[
        list[str] | None,
        Option(help="What MODEL reads: a file, a folder, 'python' or hf:NAME; may be repeated."),
    ] = None,
    shape: Annotated[
        list[str] | None,
        Option(help="SEQUENCESxTOKENS of a forward pass; may be repeated. Default: 32x2048, on a CPU 2x256."),
    ] = None,
    workload: Annotated[
        list[str] | None, Option(help="forward or generation; may be repeated. Default: both.")
    ] = None,
    contenders: Annotated[list[str] | None, _CONTENDERS["inference"]] = None,
    layers: Annotated[int | None, Option(min=1, help="Layers of the preset. Default: all.")] = None,
    nnz: Annotated[float | None, _NNZ] = None,
    prompts: Annotated[
        list[int] | None, Option(min=1, help="Sequences of a generation; may be repeated. Default: 1.")
    ] = None,
    prompt_length: Annotated[
        int | None, Option(min=2, help="Tokens of a prompt. Default: 128, on a CPU 16.")
    ] = None,
    new_tokens: Annotated[
        int | None,
        Option(min=1, help="Tokens to time after a prompt. Default: 64; on a CPU 16 of large models."),
    ] = None,
    dtype: Annotated[str, Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, _DEVICE] = None,
    rounds: Annotated[int | None, _ROUNDS] = None,
    processes: Annotated[int | None, _PROCESSES] = None,
    energy_seconds: Annotated[float, _ENERGY] = 2.5,
    seed: Annotated[int, Option(help="Seed of weights and tokens.")] = 0,
    out: Annotated[Path | None, _OUT] = None,
    plot: Annotated[Path | None, _PLOT] = None,
    commit: Annotated[str | None, _COMMIT] = None,
) -> None:
    """Forward passes and generation of a model: dense eager, dense compiled, the best dense, and ours."""
    from .bench import run_inference

    run_inference(
        model=model,
        preset=preset,
        text=text or [],
        shape=shape or [],
        workload=workload or [],
        contenders=contenders or [],
        layers=layers,
        nnz=nnz,
        prompts=prompts or [],
        prompt_length=prompt_length,
        new_tokens=new_tokens,
        dtype=dtype,
        device=device,
        rounds=rounds,
        processes=processes,
        energy_seconds=energy_seconds,
        seed=seed,
        out=out,
        plot=plot,
        commit=commit,
    )


@bench.command("training", context_settings={"allow_extra_args": True})  # to say that there are none
def bench_training(
    context: typer.Context,
    preset: Annotated[str | None, _PRESET] = None,
    layers: Annotated[str, Option(help="Layers of the preset; auto: as many as fit.")] = "auto",
    nnz: Annotated[float | None, _NNZ] = None,
    batch: Annotated[
        int | None, Option(min=1, help="Sequences of a step. Default: 8, on a CPU 2.", show_default=False)
    ] = None,
    sequence_length: Annotated[
        int | None,
        Option(min=2, help="Tokens of a sequence. Default: 2048, on a CPU 128.", show_default=False),
    ] = None,
    precision: Annotated[
        str | None,
        Option(
            help="bfloat16 (weights and optimiser, too), mixed (autocast, as twell train) or float32. "
            "Default: bfloat16, on a CPU float32.",
            show_default=False,
        ),
    ] = None,
    checkpointing: Annotated[str, Option(help="Activation checkpointing: off, on or both.")] = "both",
    contenders: Annotated[list[str] | None, _CONTENDERS["training"]] = None,
    search: Annotated[bool, Option("--search", help="Search for the largest micro-batch that fits.")] = False,
    memory: Annotated[
        float | None, Option(min=0.001, help="GiB that the search may fill. Default: all of the GPU's.")
    ] = None,
    device: Annotated[str | None, _DEVICE] = None,
    rounds: Annotated[int | None, _ROUNDS] = None,
    processes: Annotated[int | None, _PROCESSES] = None,
    energy_seconds: Annotated[float, _ENERGY] = 2.5,
    seed: Annotated[int, Option(help="Seed of weights and tokens.")] = 0,
    out: Annotated[Path | None, _OUT] = None,
    plot: Annotated[Path | None, _PLOT] = None,
    commit: Annotated[str | None, _COMMIT] = None,
) -> None:
    """Whole training steps: stock dense models, eager and compiled, and ours with L1 and statistics."""
    from .bench import run_training

    run_training(
        extra=context.args,
        preset=preset,
        layers=layers,
        nnz=nnz,
        batch=batch,
        sequence_length=sequence_length,
        precision=precision,
        checkpointing=checkpointing,
        contenders=contenders or [],
        search=search,
        memory=memory,
        device=device,
        rounds=rounds,
        processes=processes,
        energy_seconds=energy_seconds,
        seed=seed,
        out=out,
        plot=plot,
        commit=commit,
    )
