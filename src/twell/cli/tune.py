"""`twell tune`: measure the limits of automatic plans on this GPU."""

from __future__ import annotations

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..kernels.gpu.limits import cache_file
from ..measure.tune import SHARES, TOKENS, tune

_QUICK_TOKENS = (1, 8, 64, 65, 1024, 8192)


def run_tune(*, hidden: int, neurons: int, gated: bool, quick: bool) -> None:
    console = Console()
    if not torch.cuda.is_available():
        console.print("twell tune measures a GPU; torch sees none here. On a CPU plans tune themselves.")
        raise typer.Exit(1)
    tokens = _QUICK_TOKENS if quick else TOKENS
    table = Table("tokens", "sparse up to", *(f"{share:.0%} active" for share in SHARES))
    with Progress(console=console) as progress:
        task = progress.add_task("measuring", total=len(tokens))

        def report(count: int, limit: float, gains: dict[float, float]) -> None:
            progress.advance(task)
            cells = (f"{gains[share]:.2f}x" for share in SHARES)
            table.add_row(str(count), f"{limit:.0%}", *cells)

        repetitions = 5 if quick else 15
        tune(hidden, neurons, gated=gated, tokens=tokens, repetitions=repetitions, report=report)
    console.print(table)
    name = torch.cuda.get_device_properties(torch.cuda.current_device()).name
    console.print(f"Speed-up over dense on {name}; limits kept in {cache_file(name)}")
