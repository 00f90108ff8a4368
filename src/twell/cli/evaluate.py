"""`twell eval`: measures cross-entropy and sparsity of a model and runs lm-eval tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from .._errors import reject
from .._files import write_json
from .plot_file import check_plot, short_name
from .progress import READING_TASKS, Bar, Progress, announce_tasks, showing
from .text import expected_tokens, text_source

if TYPE_CHECKING:
    from ..evaluation import TextResult
    from ..train.data.sequences import PackedDataset

_PLAIN = {"highlight": False, "markup": False, "soft_wrap": True}


def run_eval(
    *,
    model: str,
    text: list[str],
    tasks: list[str],
    include: Path | None,
    sequence_length: int | None,
    batch: int,
    max_tokens: int | None,
    limit: int | None,
    dtype: str,
    out: Path | None,
    verify: bool = False,
    plot: Path | None = None,
) -> None:
    from ..train.checkpoints import find_model

    if out is not None and (out.exists() or not out.parent.is_dir()):
        reject("out", str(out), "a new file in a folder that exists")
    if sequence_length is not None and not text:
        reject("--sequence-length", sequence_length, "with --text only: held-out text has the run's windows")
    if plot is not None and tasks and not text:
        reject("plot", f"{plot} with --tasks only", "--text with it: the plot shows what layers do on text")
    check_plot(plot)
    find_model(model)
    source = text_source(text) if text else None
    console = Console()
    with showing(console, f"loading {model}"):
        from ..evaluation import evaluate_tasks, evaluate_text, evaluate_windows, load_model
        from ..train.data.sources import documents
    held_out = None if text or tasks else _held_out_of(model, verify=verify)  # has a bar of its own
    with showing(console, f"loading {model}"):
        loaded, tokenizer = load_model(model, dtype=dtype)
    found: dict[str, object] = {"model": model}
    if text or held_out is not None:
        total = expected_tokens(source, tokenizer, max_tokens) if text else _total(held_out, max_tokens)
        with Bar(console, "evaluating", total) as bar:
            shared = {"batch": batch, "max_tokens": max_tokens, "progress": bar.advance}
            if held_out is not None:
                result = evaluate_windows(loaded, _windows(held_out), **shared)
            else:
                result = evaluate_text(
                    loaded, tokenizer, documents(source), sequence_length=sequence_length, **shared
                )
        found |= dataclasses.asdict(result) | {"perplexity": result.perplexity}
        console.print(
            f"{result.tokens:,} tokens: cross-entropy {result.cross_entropy:.4f}, "
            f"perplexity {result.perplexity:.2f}",
            highlight=False,
        )
        if result.l0:
            _show_layers(console, result)
    if tasks:
        progress = Progress(console)
        progress.show(READING_TASKS)

        def say(names: list[str]) -> None:
            progress.clear()
            announce_tasks(console, names)

        try:
            options = {"include": include, "batch": batch, "limit": limit, "say": say}
            scores = evaluate_tasks(loaded, tokenizer, tasks, **options)
        finally:
            progress.clear()
        found |= {"tasks": scores, "mean_accuracy": sum(scores.values()) / len(scores)}
        table = Table("task", "accuracy")
        for name, score in (scores | {"mean": found["mean_accuracy"]}).items():
            table.add_row(name, f"{score:.1%}")
        console.print(table)
    if out is not None:
        write_json(out, found)
    if plot is not None:
        _draw(console, result, model, plot)


def _total(held_out: PackedDataset, max_tokens: int | None) -> int:
    return held_out.tokens if max_tokens is None else min(held_out.tokens, max_tokens)


def _windows(dataset: PackedDataset) -> Iterator[list[int]]:
    return (dataset[place]["input_ids"].tolist() for place in range(len(dataset)))


def _held_out_of(folder: str, *, verify: bool) -> PackedDataset:
    """What a run has held out."""
    from ..train.data import prepare
    from ..train.run_folder import CONFIG
    from ..train.settings import read_settings, run_config

    path = Path(folder) / CONFIG
    if not path.is_file():
        reject("text", "none", "--text PATH (or python, or hf:NAME), --tasks NAME, or the folder of a run")
    dataset = prepare(run_config(read_settings(path)).data, verify=verify).held_out
    if dataset is None:
        reject("model", f"{folder}, a run that has held no text out", "--text PATH with it")
    return dataset


def _show_layers(console: Console, result: TextResult) -> None:
    table = Table("layer", "active per token", "of", "L1", f"dead in {result.tokens:,} tokens")
    for layer, values in enumerate(zip(result.l0, result.neurons, result.l1, result.silent, strict=True)):
        l0, neurons, l1, silent = values
        table.add_row(
            str(layer), f"{l0:.1f}", f"{neurons:,} ({l0 / neurons:.2%})", f"{l1:.3g}", f"{silent:.1%}"
        )
    l0, l1, silent = (sum(values) / len(values) for values in (result.l0, result.l1, result.silent))
    table.add_row("mean", f"{l0:.1f}", "", f"{l1:.3g}", f"{silent:.1%}")
    console.print(table)


def _draw(console: Console, result: TextResult, model: str, plot: Path) -> None:
    from ..plots import layer_activity

    if not result.l0:
        console.print("no plot: no block of this model has exact zeros", **_PLAIN)
        return
    subtitle = f"{short_name(model)}, {result.tokens:,} tokens, cross-entropy {result.cross_entropy:.4f}"
    title = "Active neurons per token, and dead ones"
    layer_activity(result.l0, result.neurons, result.silent, plot, title=title, subtitle=subtitle)
    console.print(f"plot: {plot}", **_PLAIN)
