"""`twell demo`: trains a small sparse language model on the CPU, checks it, times it, generates text."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.table import Table

from .. import reference
from .._errors import reject
from .._files import make_folder, write_json
from ..measure import Timing, compare
from ..plan import Plan
from ..plots import figure_class, speedup_bars, training_curves
from .status import INTERRUPTED
from .train import stopping_at_once

_REPETITIONS = 9
_DECODED = 32  # tokens of a timed generation
_PROMPT = "def read_file(path):\n    "


def run_demo(*, output: Path, overrides: list[str]) -> None:
    """Train, plot, reload, check, time, generate; write everything to `output`."""
    figure_class()  # raises before the work starts
    from ..evaluation import load_model
    from ..train.metrics import read_metrics
    from ..train.presets import preset
    from ..train.run import train
    from ..train.run_folder import METRICS
    from ..train.settings import run_config, with_overrides

    console = Console()
    run = _new_folder(output)
    console.rule("1. train: Llama, ReLU, a mild L1 penalty, on the source of Python's standard library")
    config = run_config(with_overrides(preset("tiny"), overrides))
    if config.model.dense:
        reject(
            "model.activation",
            repr(config.model.activation),
            "relu | relu2 | fatrelu(T) | drelu: the demo is sparse",
        )
    with stopping_at_once(run, console):
        result = train(config, run, console=console)
    if not result.finished:
        console.print(f"Stopped. Resume with: twell train --resume {run}", highlight=False)
        raise typer.Exit(INTERRUPTED)
    logs = [line for line in read_metrics(run / METRICS) if "ce_loss" in line]
    _show_training(console, logs, result.summary)
    subtitle = f"preset tiny, {result.summary['parameters'] / 1e6:.1f}M parameters, CPU"
    training_curves(
        {"tiny": logs},
        output / "training.png",
        title="The loss falls, the activations go out",
        subtitle=subtitle,
    )

    console.rule("2. reload: is sparse as exact as dense?")
    model, tokenizer = load_model(str(run))
    tokens = _some_tokens(tokenizer, model)
    _check(console, model, tokens)

    console.rule("3. faster?")
    speedups = _time(console, model, tokens)
    nnz = result.summary[f"{_evaluated(result.summary)}nnz"]
    active = nnz / model.config.intermediate_size
    speedup_bars(
        speedups,
        output / "speedup.png",
        title="The trained model, sparse over dense",
        subtitle=f"CPU, fp32, {active:.1%} of {model.config.intermediate_size} neurons active per token",
    )

    console.rule("4. generate text")
    with torch.inference_mode():
        prompt = tokenizer(_PROMPT, return_tensors="pt", add_special_tokens=False).input_ids
        written = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=48,
            do_sample=False,
            repetition_penalty=1.2,
            pad_token_id=tokenizer.eos_token_id,
        )
    console.print(tokenizer.decode(written[0]), markup=False, highlight=False)
    found = result.summary | {"speedups": speedups}
    write_json(output / "demo.json", found)
    console.print(f"\nplots: {output / 'training.png'}, {output / 'speedup.png'}\nmodel: {run / 'model'}")


def _new_folder(output: Path) -> Path:
    """A new folder name for the run: running the demo again deletes nothing."""
    make_folder(output, "output")
    return next(run for number in count(1) if not (run := output / f"run-{number}").exists())


def _show_training(console: Console, logs: list[dict], summary: dict) -> None:
    from ..train.metrics import dead_of

    table = Table("tokens", "cross-entropy", "active per token", "dead", "tokens/s")
    rows = [logs[round(i * (len(logs) - 1) / 5)] for i in range(6)] if len(logs) > 6 else logs
    for line in rows:
        table.add_row(
            f"{line['tokens']:,}",
            f"{line['ce_loss']:.3f}",
            f"{line['nnz']:.1f}",
            dead_of(line).removeprefix("dead "),
            f"{line['tokens_per_second']:,.0f}",
        )
    console.print(table)
    prefix = _evaluated(summary)
    text, loss = ("held-out", "held_out_ce_loss") if prefix else ("training", "train_ce_loss")
    console.print(
        f"{text}: cross-entropy {summary[loss]:.3f}, {summary[f'{prefix}nnz']:.1f} active neurons per token, "
        f"{dead_of(summary, prefix)}",
        highlight=False,
    )


def _evaluated(summary: dict) -> str:
    """How the figures to show begin: held-out ones, or training's if no text is held out."""
    return "" if summary["held_out_ce_loss"] is None else "held_out_"


def _some_tokens(tokenizer, model) -> torch.Tensor:
    """int64 [4, positions], from text that every machine has."""
    text = Path(json.__file__).read_text()
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0]
    length = min(model.config.max_position_embeddings, ids.numel() // 4)
    return ids[: 4 * length].view(4, length)


def _set_plan(model, plan: Plan | None) -> None:
    from ..hf import sparse_mlps  # transformers takes seconds to import

    for mlp in sparse_mlps(model):
        mlp.plan = plan


@torch.inference_mode()
def _check(console: Console, model, tokens: torch.Tensor) -> None:
    def logits(plan: Plan | None) -> torch.Tensor:
        _set_plan(model, plan)
        return model(input_ids=tokens, use_cache=False).logits

    dense = logits(Plan(path="dense"))
    # The rounding error of dense itself, for comparison.
    exact = model.double()(input_ids=tokens, use_cache=False).logits
    model.float()
    dense_error = reference.relative_error(dense, exact)
    table = Table("feed-forward", "error of the logits against float64", "same next token as dense")
    table.add_row("dense", f"{dense_error:.1e}", "")
    for path in ("row", "auto"):
        found = logits(Plan(path=path))
        error = reference.relative_error(found, exact)
        same = (found.argmax(-1) == dense.argmax(-1)).double().mean().item()
        if not error <= 2 * dense_error + 1e-6:
            raise AssertionError(f"{path}: error {error:.1e}, dense has {dense_error:.1e}")
        table.add_row(path, f"{error:.1e}", f"{same:.2%}")
    console.print(table)


@torch.inference_mode()
def _time(console: Console, model, tokens: torch.Tensor) -> dict[str, float]:
    """case -> times faster than dense, for the whole model and for a feed-forward block."""
    from ..hf import sparse_mlps

    prompt = tokens[:1, :16]
    inputs: list[torch.Tensor] = []
    block = sparse_mlps(model)[-1]
    hook = block.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach().clone()))
    model(input_ids=tokens, use_cache=False)
    hook.remove()
    hidden = inputs[0]

    def decode() -> None:
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=_DECODED,
            min_new_tokens=_DECODED,
            do_sample=False,
            pad_token_id=0,
        )

    cases: dict[str, Callable[[], object]] = {
        f"feed-forward block, {hidden.shape[0] * hidden.shape[1]:,} tokens": lambda: block(hidden),
        "feed-forward block, 1 token": lambda: block(hidden[0, -1:]),
        f"whole model, {tokens.numel():,} tokens": lambda: model(input_ids=tokens, use_cache=False),
        f"whole model, {_DECODED} tokens one by one": decode,
    }
    table = Table("", "dense", "sparse", "speed-up")
    speedups = {}
    for name, call in cases.items():
        timings = _compare(model, call)
        dense, ours = timings["dense"], timings["sparse"]
        speedups[name] = dense.median / ours.median
        table.add_row(
            name, f"{dense.median * 1e3:.2f} ms", f"{ours.median * 1e3:.2f} ms", f"{speedups[name]:.2f}x"
        )
    console.print(table)
    return speedups


def _compare(model, call: Callable[[], object]) -> dict[str, Timing]:
    def with_plan(plan: Plan | None) -> Callable[[], None]:
        def timed() -> None:
            _set_plan(model, plan)
            call()

        return timed

    candidates = {"dense": with_plan(Plan(path="dense")), "sparse": with_plan(None)}
    return compare(candidates, warmup=3, repetitions=_REPETITIONS)
