"""`twell eval`: measures cross-entropy and sparsity of a model and runs lm-eval tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .._errors import reject
from .._files import write_json


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
) -> None:
    from ..train.checkpoints import find_model
    from ..train.data import DataConfig

    if out is not None and (out.exists() or not out.parent.is_dir()):
        reject("out", str(out), "a new file in a folder that exists")
    if sequence_length is not None and not text:
        reject("--sequence-length", sequence_length, "with --text only: held-out text has the run's windows")
    find_model(model)
    # Takes seconds, with transformers.
    from ..evaluation import evaluate_tasks, evaluate_text, evaluate_windows, load_model
    from ..train.data.sources import documents

    held_out = None if text or tasks else _held_out_of(model, verify=verify)
    console = Console()
    loaded, tokenizer = load_model(model, dtype=dtype)
    found: dict[str, object] = {"model": model}
    if text or held_out is not None:
        with progress_bar(console, max_tokens) as advance:
            shared = {"batch": batch, "max_tokens": max_tokens, "progress": advance}
            if held_out is not None:
                result = evaluate_windows(loaded, held_out, **shared)
            else:
                source = documents(DataConfig(source=tuple(text)))
                result = evaluate_text(loaded, tokenizer, source, sequence_length=sequence_length, **shared)
        found |= dataclasses.asdict(result) | {"perplexity": result.perplexity}
        console.print(
            f"{result.tokens:,} tokens: cross-entropy {result.cross_entropy:.4f}, "
            f"perplexity {result.perplexity:.2f}",
            highlight=False,
        )
        if result.l0:
            _show_layers(console, result)
    if tasks:
        scores = evaluate_tasks(loaded, tokenizer, tasks, include=include, batch=batch, limit=limit)
        found |= {"tasks": scores, "mean_accuracy": sum(scores.values()) / len(scores)}
        table = Table("task", "accuracy")
        for name, score in (scores | {"mean": found["mean_accuracy"]}).items():
            table.add_row(name, f"{score:.1%}")
        console.print(table)
    if out is not None:
        write_json(out, found)


@contextmanager
def progress_bar(
    console: Console, total: int | None, what: str = "evaluating"
) -> Iterator[Callable[[int], None]]:
    """A progress bar, and the function that advances it by a number of tokens."""
    columns = (what, BarColumn(), TextColumn("{task.completed:,.0f} tokens"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda tokens: bar.advance(task, tokens)


def _held_out_of(folder: str, *, verify: bool) -> Iterator[list[int]]:
    """The windows that a run has held out."""
    from ..train.data import prepare
    from ..train.run_folder import CONFIG
    from ..train.settings import read_settings, run_config

    path = Path(folder) / CONFIG
    if not path.is_file():
        reject("text", "none", "--text PATH (or python, or hf:NAME), --tasks NAME, or the folder of a run")
    dataset = prepare(run_config(read_settings(path)).data, verify=verify).held_out
    if dataset is None:
        reject("model", f"{folder}, a run that has held no text out", "--text PATH with it")
    return (dataset[place]["input_ids"].tolist() for place in range(len(dataset)))


def _show_layers(console: Console, result) -> None:
    table = Table("layer", "active per token", "of", "L1", f"dead in {result.tokens:,} tokens")
    for layer, values in enumerate(zip(result.l0, result.neurons, result.l1, result.silent, strict=True)):
        l0, neurons, l1, silent = values
        table.add_row(
            str(layer), f"{l0:.1f}", f"{neurons:,} ({l0 / neurons:.2%})", f"{l1:.3g}", f"{silent:.1%}"
        )
    l0, l1, silent = (sum(values) / len(values) for values in (result.l0, result.l1, result.silent))
    table.add_row("mean", f"{l0:.1f}", "", f"{l1:.3g}", f"{silent:.1%}")
    console.print(table)
