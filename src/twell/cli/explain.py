"""`twell explain`: shows on a text what each block of a model does and gains, before anyone commits to it."""

from __future__ import annotations

import json
import os
import textwrap
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from .._errors import reject
from .._files import write_json
from .plot_file import check_plot, short_name
from .progress import DENSE_GAINS, NOISY, Bar, showing
from .text import text_source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from ..explanation import Explanation

_PLAIN = {"highlight": False, "soft_wrap": True}


def run_explain(
    *,
    model: str,
    text: list[str],
    tokens: int,
    sequence_length: int | None,
    dtype: str,
    save: bool = False,
    plot: Path | None = None,
) -> None:
    from ..train.checkpoints import MANIFEST, find_model
    from ..train.data.sources import documents

    folder = Path(find_model(model))
    if save and not folder.is_dir():
        reject("save", f"the name {model!r} on the Hub", "a folder, whose config.json can be written")
    if save and (folder / MANIFEST).exists():
        reject(
            "save",
            f"the checkpoint {folder}",
            "a finished run or another model: checkpoints stay as they are",
        )
    check_plot(plot)
    source = text_source(text)
    console = Console()
    with showing(console, f"loading {model}"):
        from .. import explain
        from ..evaluation import load_model, require_sparse_blocks
        from ..sparsify.blocks import named_blocks

        loaded, tokenizer = load_model(model, dtype=dtype)
    require_sparse_blocks(loaded)
    ids = _first_tokens(loaded, tokenizer, documents(source), tokens, sequence_length)
    names = [name for name, _ in named_blocks(loaded)]
    with Bar(console, f"timing blocks on {ids.numel():,} tokens", len(names), "blocks") as bar:

        def progress(name: str, share: float) -> None:
            bar.reach(names.index(name) + share, len(names))

        explained = explain(loaded, {"input_ids": ids, "use_cache": False}, progress=progress)
    _show(console, explained, ids.numel(), _place(loaded))
    if save:
        _save(loaded, ids, folder, console)
    if plot is not None:
        _draw(explained, f"{short_name(model)}, {ids.numel():,} tokens on {_place(loaded)}", plot)
        console.print(f"plot: {plot}", markup=False, **_PLAIN)


def _first_tokens(
    model: Any, tokenizer: Any, texts: Iterator[str], tokens: int, sequence_length: int | None
) -> Tensor:
    """int64 [windows, length]: whole windows of the text, of up to `tokens` tokens together."""
    import torch

    from ..evaluation import text_windows

    windows = text_windows(model, tokenizer, texts, sequence_length)
    first = next(windows, None)
    if first is None:
        reject("text", "no two tokens", "at least 2 tokens of text")
    more = islice(windows, max(tokens // len(first) - 1, 0))
    whole = [first, *(window for window in more if len(window) == len(first))]
    return torch.tensor(whole, device=model.device)[:, :tokens]


def _show(console: Console, explained: Explanation, tokens: int, place: str) -> None:
    """The table, what its columns mean, and the average."""
    width = _width(console)
    table = explained.text(width)
    console.print(table, **_PLAIN)
    gains = [layer.gain for layer in explained if layer.gain is not None]
    if not gains:
        return
    console.print(**_PLAIN)
    for column, meaning in _meanings(tokens).items():
        if column in table.partition("\n")[0]:
            _say(console, f"'{column}' {meaning}", width)
    share = sum(1 / gain.middle for gain in gains) / len(gains)
    said = f"{tokens:,} tokens on {place}: a block takes {share:.0%} of dense PyTorch's time on average "
    _say(console, f"{said}(95% intervals above).", width)
    if any(layer.forward == "dense" and layer.gain is not None and layer.gain.low > 1 for layer in explained):
        _say(console, DENSE_GAINS, width)
    if any(gain.is_wide for gain in gains):
        _say(console, NOISY, width, style="yellow")


def _meanings(tokens: int) -> dict[str, str]:
    """What columns mean whose titles do not say it."""
    from ..explanation import NEIGHBOURS

    union = f"is of {NEIGHBOURS} neighbouring tokens."
    if tokens < NEIGHBOURS:
        union = f"is of all {tokens} tokens; so short a text says little: take at least {NEIGHBOURS} tokens."
    return {
        "union": union,
        "fewer products": "is how many times fewer multiplications a block needs than dense PyTorch does.",
    }


def _width(console: Console) -> int | None:
    """Characters of a line on a terminal; None in a file, whose lines may be longer."""
    return console.width if console.is_terminal or "COLUMNS" in os.environ else None


def _say(console: Console, text: str, width: int | None, style: str | None = None) -> None:
    """Print `text` in lines that end between words."""
    lines = text if width is None else textwrap.fill(text, width)
    console.print(lines, style=style, markup=False, **_PLAIN)


def _save(model: object, ids: object, folder: Path, console: Console) -> None:
    """Write how active each layer is to the model's config.json."""
    from ..shares import FIELD, SIZES, measure_shares

    shares = measure_shares(model, [{"input_ids": ids, "use_cache": False}])
    if not shares:
        reject("tokens", ids.numel(), f"at least {SIZES[-1]} tokens of text, to save how active layers are")
    path = folder / "config.json"
    write_json(path, {**json.loads(path.read_text()), FIELD: shares})
    console.print(f"saved the shares of active neurons in {path}", **_PLAIN)


def _draw(explained: Explanation, subtitle: str, plot: Path) -> None:
    from ..plots import layer_gains

    active = [layer.active for layer in explained]
    gains = [None if layer.gain is None else layer.gain.middle for layer in explained]
    layer_gains(active, gains, plot, title="How active every block is, and what it gains", subtitle=subtitle)


def _place(model: object) -> str:
    import torch

    device = model.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
