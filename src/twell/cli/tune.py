"""`twell tune`: measures the limits of automatic plans on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from .._errors import reject
from .._processor import cpu_name
from ..crossover import cache_file
from ..kernels.cpu.measurements import measurements_file
from ..measure.tune import SHARES, TOKENS, TRAINING_TOKENS, CpuLimits, tune_cpu, tune_gpu, tune_training
from ..plots import tuned_gains, tuned_limits
from .plot_file import check_plot
from .progress import Bar

_QUICK_TOKENS = (1, 8, 64, 65, 1024, 8192)
_QUICK_TRAINING_TOKENS = (1024, 4096, 16384)
_PLAIN = {"highlight": False, "markup": False, "soft_wrap": True}


def run_tune(
    *,
    device: str | None,
    hidden: int,
    neurons: int,
    gated: bool,
    quick: bool,
    training: bool = False,
    plot: Path | None = None,
) -> None:
    """Measure, store and show the limits of `device`; None means the GPU if there is one."""
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen not in ("cpu", "cuda") or (chosen == "cuda" and not torch.cuda.is_available()):
        reject("--device", chosen, "cpu, or cuda where torch sees a GPU")
    if training and chosen == "cpu":
        accepted = "with a GPU only: on a CPU every training step looks at its own activations"
        reject("--training", "a CPU", accepted)
    check_plot(plot)
    console = Console()
    if chosen == "cpu":
        _tune_cpu(console, hidden, neurons, gated, quick, plot)
    else:
        _tune_gpu(console, hidden, neurons, gated, quick, training, plot)


def _tune_cpu(
    console: Console, hidden: int, neurons: int, gated: bool, quick: bool, plot: Path | None
) -> None:
    table = Table("dtype", "tokens", "down", "row path up to", "block path")
    with Bar(console, "measuring", unit="measurements") as bar:

        def report(limits: CpuLimits) -> None:
            block = {None: "-", True: "pays", False: "does not pay"}[limits.block]
            name, down = _names(limits)
            table.add_row(name, f"{limits.tokens}+", down, f"{limits.row:.1%} active", block)

        found = tune_cpu(hidden, neurons, gated=gated, quick=quick, report=report, progress=bar.reach)
    if not found:
        console.print(f"Blocks of D {hidden}, H {neurons} run dense: they are too small to gain here.")
        return
    console.print(table)
    path = measurements_file()
    place = f"stored in {path}" if path is not None and path.is_file() else "not stored: no writable folder"
    console.print(f"Threads: {torch.get_num_threads()}. Limits {place}.")
    if plot is not None:
        place = f"{cpu_name()}, {torch.get_num_threads()} threads"
        _draw_limits(found, f"{place}, {_size(hidden, neurons, gated)}; the row path", plot)
        console.print(f"plot: {plot}", **_PLAIN)


def _names(limits: CpuLimits) -> tuple[str, str]:
    """Dtype and layout."""
    return str(limits.dtype).removeprefix("torch."), "by neuron" if limits.neuron_major else "as stock"


def _size(hidden: int, neurons: int, gated: bool) -> str:
    return f"D {hidden}, H {neurons}, {'gated' if gated else 'not gated'}"


def _draw_limits(found: Sequence[CpuLimits], subtitle: str, plot: Path) -> None:
    lines: dict[str, dict[int, float]] = {}
    for limits in found:
        lines.setdefault(", ".join(_names(limits)), {})[limits.tokens] = limits.row
    tuned_limits(lines, plot, title="Up to how many active neurons sparse pays", subtitle=subtitle)


def _tune_gpu(
    console: Console,
    hidden: int,
    neurons: int,
    gated: bool,
    quick: bool,
    training: bool,
    plot: Path | None,
) -> None:
    tune = tune_training if training else tune_gpu
    tokens = TRAINING_TOKENS if training else TOKENS
    if quick:
        tokens = _QUICK_TRAINING_TOKENS if training else _QUICK_TOKENS
    table = Table("tokens", "sparse up to", *(f"{share:.0%} active" for share in SHARES))
    found: dict[int, dict[float, float]] = {}
    with Bar(console, "measuring", len(tokens), "numbers of tokens") as bar:

        def report(count: int, limit: float, gains: dict[float, float]) -> None:
            bar.advance()
            found[count] = gains
            cells = (f"{gains[share]:.2f}x" for share in SHARES)
            table.add_row(str(count), f"{limit:.0%}", *cells)

        repetitions = 5 if quick else 15
        tune(hidden, neurons, gated=gated, tokens=tokens, repetitions=repetitions, report=report)
    console.print(table)
    name = torch.cuda.get_device_properties(torch.cuda.current_device()).name
    what = "Speed-up of a training step" if training else "Speed-up"
    console.print(f"{what} over dense on {name}; limits stored in {cache_file(name)}.")
    if plot is not None:
        subtitle = f"{name}, bfloat16, {_size(hidden, neurons, gated)}"
        tuned_gains(found, plot, title=f"{what} over dense PyTorch", subtitle=subtitle)
        console.print(f"plot: {plot}", **_PLAIN)
