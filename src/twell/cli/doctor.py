"""`twell doctor`: shows what this machine has and how twell uses it."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .._errors import EXTRAS, how_to_install
from .._processor import make_products_safe
from ..activations import Activation
from ..backends import BACKENDS, Site
from ..kernels.cpu.gemm import has_native_gemm
from ..kernels.cpu.measurements import kept_measurements, measurements_file
from ..layer_state import LayerState
from ..measure import hardware, versions
from ..measure.environment import why_no_gpu
from ..plan import ENVIRONMENT_VARIABLE, parse_override
from ..policy import decide, resolve
from ..problem import FfnArgs


def run_doctor() -> None:
    """Print hardware, versions, backends (and why one cannot run), decisions and extras."""
    console = Console()
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    _print_pairs(console, "Versions", versions())
    for device in devices:
        _print_pairs(console, f"Hardware: {device}", hardware(device) | _processor(device))
    if "cuda" not in devices:
        console.print(f"No CUDA device ({why_no_gpu()}): twell uses the CPU backend.\n", highlight=False)

    table = Table(title="Backends", title_justify="left")
    for column in ("backend", "paths", *(f"on {device}" for device in devices)):
        table.add_column(column)
    for name, backend in BACKENDS.items():
        verdicts = []
        for device in devices:
            reason = backend.refusal(_example_site(device))
            verdicts.append("[green]can run[/]" if reason is None else f"[yellow]no:[/] {reason}")
        table.add_row(name, ", ".join(sorted(backend.paths)), *verdicts)
    console.print(table)

    override = os.environ.get(ENVIRONMENT_VARIABLE)
    try:
        if override:
            console.print(f"{ENVIRONMENT_VARIABLE} overrides every plan: {parse_override(override)}\n")
        for device in devices:
            _print_decisions(console, device)
    except ValueError as error:
        console.print(f"[red]{error}[/]\n")
    if "cuda" in devices:
        _print_pairs(console, "Limits of automatic plans on cuda", _limits())

    table = Table(title="Extras", title_justify="left")
    table.add_column("extra")
    table.add_column("state")
    for extra, modules in EXTRAS.items():
        missing = [module for module in modules if find_spec(module) is None]
        state = f"[yellow]missing {', '.join(missing)}:[/] {escape(how_to_install(extra))}"
        table.add_row(extra, state if missing else "[green]installed[/]")
    console.print(table)


def _processor(device: str) -> dict[str, str]:
    """The CPU's 16-bit products and its stored measurements."""
    if device != "cpu":
        return {}
    units = {str(dtype): has_native_gemm(dtype) for dtype in (torch.bfloat16, torch.float16)}
    native = ", ".join(name.removeprefix("torch.") for name, there in units.items() if there)
    return {
        "16-bit products": make_products_safe().words,
        "16-bit units": native or "none: such products run in float32",
        "measured": f"{len(kept_measurements())} numbers, stored in {measurements_file()}",
    }


def _print_decisions(console: Console, device: str) -> None:
    """Show how an automatic plan runs inference of a typical block, by number of tokens."""
    hidden, neurons, dtype = _EXAMPLE[device]
    title = f"Automatic plans on {device}: D {hidden}, H {neurons}, {str(dtype).removeprefix('torch.')}"
    table = Table("tokens", "path", "why", title=title, title_justify="left")
    rows = torch.empty(neurons, hidden, dtype=dtype, device=device)
    for tokens in (1, 64, 1024, 8192):
        x = rows[:1].expand(tokens, hidden)
        args = FfnArgs(x, rows, rows.mT, rows, None, None, None, Activation())
        resolution = resolve(None, _example_site(device, tokens))
        decision = decide(args, resolution, LayerState(), training=False, record=False)
        path = "by its activations" if decision.path == "auto" or decision.read else decision.path
        table.add_row(f"{tokens:,}", path, escape(decision.reason))
    console.print(table)


def _limits() -> dict[str, str]:
    """The limits that automatic plans use on the current GPU."""
    from ..crossover import cache_file, tuned_shapes
    from ..kernels.gpu.device import gpu_of

    gpu = gpu_of(torch.device("cuda"))
    built_in = "measured on an H200" if gpu.hopper else "none: dense until `twell tune` has run"
    tuned = ", ".join(tuned_shapes(gpu.name)) or "none"
    return {"built in": built_in, "tuned shapes": tuned, "stored in": str(cache_file(gpu.name))}


# D, H and dtype of a typical block.
_EXAMPLE = {"cpu": (1024, 4096, torch.float32), "cuda": (2048, 5632, torch.bfloat16)}


def _example_site(device_type: str, tokens: int = 2048) -> Site:
    """A typical inference call, to ask backends about."""
    hidden, neurons, dtype = _EXAMPLE[device_type]
    return Site(device_type, dtype, tokens, hidden, neurons, gated=True, training=False)


def _print_pairs(console: Console, title: str, pairs: dict) -> None:
    table = Table(title=title, title_justify="left", show_header=False)
    for key, value in pairs.items():
        table.add_row(key, "-" if value is None else str(value))
    console.print(table)
