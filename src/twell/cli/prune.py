"""`twell prune`: removes the neurons of a model that do not fire on a text, and saves what is left."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from .._errors import reject
from .._files import needs_space
from .plot_file import check_plot, short_name
from .progress import Bar, showing
from .text import expected_tokens, text_source

if TYPE_CHECKING:
    from ..pruning import PruneReport

_REPETITIONS = 7  # of the forward that is timed


def run_prune(
    *,
    model: str,
    text: list[str],
    out: Path,
    min_fires: int,
    tokens: int | None,
    sequence_length: int | None,
    batch: int,
    dtype: str,
    plot: Path | None = None,
) -> None:
    from ..train.checkpoints import find_model
    from ..train.data.sources import documents

    if out.exists():
        reject("out", str(out), "a folder that does not exist yet")
    if not out.absolute().parent.is_dir():
        reject("out", str(out), "a new folder in one that exists")
    check_plot(plot)
    find_model(model)
    source = text_source(text)
    console = Console()
    with showing(console, f"loading {model}"):
        from .. import prune_
        from ..evaluation import TextResult, evaluate_windows, load_model, require_sparse_blocks, text_windows
        from ..pruning.firing import counts_of, recorded_firing

        loaded, tokenizer = load_model(model, dtype=_computed_in(dtype, model))
    require_sparse_blocks(loaded)

    def windows() -> Iterator[list[int]]:
        return text_windows(loaded, tokenizer, documents(source), sequence_length)

    def evaluate(what: str, total: int | None) -> TextResult:
        with Bar(console, what, total) as bar:
            return evaluate_windows(loaded, windows(), batch=batch, max_tokens=tokens, progress=bar.advance)

    with recorded_firing(loaded) as recorded:
        before = evaluate("counting", expected_tokens(source, tokenizer, tokens))
    first = next(windows())[:tokens]
    speed = _tokens_per_second(console, loaded, first)
    with showing(console, "pruning"):
        report = prune_(loaded, counts_of(recorded, "text"), min_fires=min_fires)
    after = evaluate("checking", before.tokens)
    speed_after = _tokens_per_second(console, loaded, first)
    console.print(str(report), highlight=False, soft_wrap=True)
    table = Table(f"on {before.tokens:,} tokens", "before", "after", "change")
    _add_row(table, "parameters", report.parameters_before, report.parameters_after)
    _add_row(table, f"tokens/s, {len(first):,} at once", speed, speed_after)
    entropies = before.cross_entropy, after.cross_entropy
    table.add_row(
        "cross-entropy", *(f"{nats:.4f}" for nats in entropies), f"{entropies[1] - entropies[0]:+.4f}"
    )
    console.print(table)
    if dtype == "auto" and (stored := _stored_dtype(model)) is not None:
        loaded.to(stored)
    with showing(console, f"saving {out}"):
        _save(loaded, tokenizer, out)
    console.print(f"saved in {out}", highlight=False, soft_wrap=True)
    if plot is not None:
        _draw(report, f"{short_name(model)}, {before.tokens:,} tokens", plot)
        console.print(f"plot: {plot}", highlight=False, markup=False, soft_wrap=True)


def _draw(report: PruneReport, subtitle: str, plot: Path) -> None:
    from ..plots import layer_sizes

    before, after = [block.before for block in report.blocks], [block.after for block in report.blocks]
    left = f"{report.parameters_after / report.parameters_before:.1%} of the parameters are left"
    title = "Neurons before and after pruning"
    layer_sizes(before, after, plot, title=title, subtitle=f"{subtitle}; {left}")


def _tokens_per_second(console: Console, model: Any, window: list[int]) -> float:
    """The speed of forwards over one window."""
    import torch

    from ..measure import compare

    ids = torch.tensor([window], device=model.device)
    forward = {"forward": lambda: model(input_ids=ids, use_cache=False)}
    with torch.inference_mode(), Bar(console, "timing", _REPETITIONS, "rounds") as bar:
        options = {"repetitions": _REPETITIONS, "progress": bar.advance}
        timing = compare(forward, device=model.device, **options)["forward"]
    return len(window) / timing.median


def _computed_in(dtype: str, model: str) -> str:
    """On a GPU the dtype of the checkpoint, so that saving the model again loses nothing."""
    import torch

    from ..evaluation import DTYPES

    if dtype != "auto" or not torch.cuda.is_available():
        return dtype
    stored = str(_stored_dtype(model)).removeprefix("torch.")
    return stored if stored in DTYPES else "auto"


def _stored_dtype(model: str) -> Any:
    """That of the checkpoint: a CPU computes in float32."""
    from transformers import AutoConfig

    from ..train.checkpoints import find_model

    return AutoConfig.from_pretrained(find_model(model)).dtype


def _add_row(table: Table, name: str, before: float, after: float) -> None:
    table.add_row(name, f"{before:,.0f}", f"{after:,.0f}", f"{after / before - 1:+.1%}")


def _save(model: Any, tokenizer: Any, out: Path) -> None:
    """In one piece: the folder has its name once everything is in it."""
    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}.part")
    with needs_space(str(out)):
        try:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            temporary.rename(out)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
