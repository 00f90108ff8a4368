"""`twell profile`: counts how the neurons of a model behave on a text; a table, JSON and plots."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .._errors import reject
from .._files import needs_space
from .progress import DENSE_GAINS, NOISY, Steps, showing
from .status import FAILED, INTERRUPTED
from .text import expected_tokens, text_source

if TYPE_CHECKING:
    from ..profiling import Profile

_PIECE_BYTES = 4 << 20  # of a long text file that is in memory at a time
_HARDLY_SPARSE = 0.1  # share of active neurons: published ReLU models have up to this, the paper's 0.5%
_SHOWN_UNIONS = (8, 128, 256)
_PLAIN = {"highlight": False, "markup": False, "soft_wrap": True}


def run_profile(
    *,
    model: str,
    text: list[str],
    out: Path | None,
    tokens: int | None,
    sequence_length: int | None,
    batch: int,
    sample: int,
    speed: bool,
    dtype: str,
) -> None:
    from ..plots import figure_class
    from ..train.checkpoints import find_model
    from ..train.data.sources import documents

    if out is not None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            reject("out", str(out), "a new or empty folder")
        if not out.absolute().parent.is_dir():
            reject("out", str(out), "a new folder in one that exists")
        figure_class()  # a missing matplotlib is named before anything is counted
    find_model(model)
    source = text_source(text)
    console = Console()
    with showing(console, f"loading {model}"):
        from ..evaluation import load_model, require_sparse_blocks
        from ..profiling.run import REPETITIONS, profile_model
        from ..sparsify.blocks import named_blocks

        loaded, tokenizer = load_model(model, dtype=dtype)
    require_sparse_blocks(loaded)
    total = expected_tokens(source, tokenizer, tokens)
    with Steps(console) as steps, stopping_after_a_batch(console) as stop:
        if speed:  # on the first batch
            steps.reach("timing blocks", 0, len(named_blocks(loaded)), "blocks")
        profile = profile_model(
            loaded,
            tokenizer,
            documents(source, longest=_PIECE_BYTES),
            name=model,
            text=text,
            sequence_length=sequence_length,
            batch=batch,
            max_tokens=tokens,
            sample=sample,
            repetitions=REPETITIONS if speed else 0,
            stop=stop,
            timing=lambda done, blocks: steps.reach("timing blocks", done, blocks, "blocks"),
            progress=lambda count: steps.advance("counting", count, total),
        )
    _show(console, profile)
    if out is not None:
        _write(console, profile, out)
    if profile.stopped is not None:
        console.print(f"stopped: {profile.stopped}; the figures are of {profile.tokens:,} tokens", **_PLAIN)
        raise typer.Exit(INTERRUPTED if profile.stopped == "interrupted" else FAILED)


@contextmanager
def stopping_after_a_batch(console: Console) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C ends the work after its batch, and is what the yielded function says; a second one
    acts as ever."""
    asked = False
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, before)
        console.print("stopping after this batch; Ctrl-C again stops at once", **_PLAIN)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def _show(console: Console, profile: Profile) -> None:
    title = f"{profile.tokens:,} tokens in sequences of {profile.sequence_length:,}"
    counts = _table("layer", "nnz", "of", "p50", "p99", "max", "dead", "first token", title=title)
    for number, layer in enumerate(profile.layers):
        nnz = layer.nnz
        counts.add_row(
            str(number),
            f"{nnz.mean:.1f}",
            f"{layer.neurons:,}",
            *(f"{value:,}" for value in (nnz.p50, nnz.p99, nnz.max)),
            f"{layer.firing.dead / layer.neurons:.1%}",
            "-" if layer.nnz_by_position is None else f"{layer.nnz_by_position[0]:.0f}",
        )
    console.print(counts)
    timed = any(layer.speed is not None for layer in profile.layers)
    sizes = [size for size in profile.union_sizes if size in _SHOWN_UNIONS]
    columns = ["layer", *(f"union {size}" for size in sizes), "shared", "overflow"]
    shared = _table(*columns, *(("sparse", "auto") if timed else ()))
    for number, layer in enumerate(profile.layers):
        unions = [layer.union[profile.union_sizes.index(size)] for size in sizes]
        speed = layer.speed
        shared.add_row(
            str(number),
            *("-" if union is None else f"{union:,.0f}" for union in unions),
            "-" if layer.overlap is None else f"{layer.overlap.kept:.0%}",
            f"{layer.overflow.by_compression[-1].rows:.2%}",
            *(() if speed is None else (f"{speed.sparse_speedup:.2f}x", f"{speed.auto_speedup:.2f}x")),
        )
    console.print(shared)
    for name, why in profile.skipped.items():
        console.print(f"not counted: {name}: {why}", **_PLAIN)
    _show_words(console, profile)
    _show_lines(console, profile)


def _table(*columns: str, title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name == "layer" else "right", no_wrap=True)
    return table


def _show_words(console: Console, profile: Profile) -> None:
    """The entries of the vocabulary that wake most and fewest neurons."""
    for name, tokens in (("most", profile.most), ("fewest", profile.fewest)):
        if tokens:
            words = "  ".join(f"{escape(repr(token.text))} [dim]{token.nnz:.0f}[/]" for token in tokens)
            console.print(f"{name} active: {words}", highlight=False, soft_wrap=True)


def _show_lines(console: Console, profile: Profile) -> None:
    speeds = [layer.speed for layer in profile.layers if layer.speed is not None]
    if speeds:
        place = profile.hardware.get("gpu") or "the CPU"
        console.print(
            f"'sparse' is the {speeds[0].sparse_path} path and 'auto' an automatic plan, over dense PyTorch; "
            f"{speeds[0].tokens:,} tokens on {place}.{_correlation(profile)}",
            **_PLAIN,
        )
        if any(speed.auto_path == "dense" and speed.interval.low > 1 for speed in speeds):
            console.print(DENSE_GAINS, **_PLAIN)
        if any(speed.interval.is_wide for speed in speeds):
            console.print(NOISY, style="yellow", **_PLAIN)
    if profile.mean_share > _HARDLY_SPARSE:
        slower = sum(speed.sparse_speedup < 1 for speed in speeds)
        measured = f"; {slower} of {len(speeds)} layers run slower than dense on that path" if speeds else ""
        console.print(
            f"This model is hardly sparse: a token activates {profile.mean_share:.0%} of the neurons"
            f"{measured}. Training with an L1 penalty makes it sparser (docs/recipe.md).",
            **_PLAIN,
        )


def _correlation(profile: Profile) -> str:
    found = profile.correlation
    if found is None or found.sparse is None:
        return ""
    return f" Correlation of a layer's nnz with its speed-up: {found.sparse:.3f} (the paper: {found.paper})."


def _write(console: Console, profile: Profile, out: Path) -> None:
    from ..profiling.figures import draw_profile

    with needs_space(str(out)):
        out.mkdir(exist_ok=True)
        profile.save(out / "profile.json")  # first: it cannot be drawn again
        drawn = draw_profile(profile, out)
    console.print(f"written: {out / 'profile.json'} and {len(drawn)} plots", **_PLAIN)
