"""`twell block`: shows one sparse feed-forward block end to end on the CPU."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from .. import reference
from ..formats import BlockTwELL, Hybrid, TwELL
from ..formats.base import PackedMatrix, format_bytes
from ..measure import make_record, write_records
from ..measure.ffn import BASELINE, FfnCase, FfnComparison, compare_ffn, stock_dense
from ..nn import SparseMLP
from ..plan import Plan
from ..plots import figure_class, speedup_bars
from ..synthetic import SyntheticFfn, make_ffn
from .progress import Bar

_DECODE_TOKENS = (1, 8)
_REPETITIONS = 15


def run_block(*, output: Path, hidden: int, neurons: int, density: float, tokens: int) -> None:
    """Build, pack, check, time and plot a block; write `speedup.png` and `records.jsonl` to `output`."""
    figure_class()  # raises before the work starts
    console = Console()
    output.mkdir(parents=True, exist_ok=True)
    block = make_ffn(tokens, hidden, neurons, density * neurons)
    mlp = _as_module(block)

    console.rule("1. a sparse feed-forward block")
    console.print(mlp)
    gate = torch.relu(block.x @ block.gate.mT)
    share = (gate != 0).float().mean().item()
    console.print(f"{tokens} tokens; {share:.2%} of the {neurons} gate activations are not zero\n")

    console.rule("2. the three formats of its activations")
    _show_formats(console, gate.to(torch.bfloat16))

    console.rule("3. exact?")
    _check_exactness(console, mlp, block)

    console.rule("4. faster?")
    comparisons = _time(console, hidden, neurons, density, tokens)
    _show_times(console, comparisons)

    speedups = {_label(c): c.speedup("auto") for c in comparisons}
    subtitle = f"CPU, fp32, D {hidden}, H {neurons}, {density:.1%} of neurons active, outputs checked"
    plot = output / "speedup.png"
    write_records(output / "records.jsonl", [_record(c) for c in comparisons])
    speedup_bars(speedups, plot, title="Sparse feed-forward on the CPU", subtitle=subtitle)
    console.print(f"plot: {plot}\nrecords: {output / 'records.jsonl'}")


def _as_module(block: SyntheticFfn) -> SparseMLP:
    neurons, hidden = block.up.shape
    mlp = SparseMLP(hidden, neurons)
    mlp.load_state_dict(
        {"gate_proj.weight": block.gate, "up_proj.weight": block.up, "down_proj.weight": block.down}
    )
    return mlp.requires_grad_(False)


def _show_formats(console: Console, gate: torch.Tensor) -> None:
    packed: list[PackedMatrix] = [
        TwELL.pack(gate, overflow="spill"),
        BlockTwELL.pack(gate, rows=128),
        Hybrid.pack(gate),
    ]
    table = Table("format", "layout", "memory", "of dense", "round trip")
    for matrix in packed:
        same = torch.equal(matrix.unpack().view(torch.int16), gate.view(torch.int16))
        if not same:
            raise AssertionError(f"{type(matrix).__name__} did not unpack to what was packed")
        layout = "\n".join(f"{name} {list(t.shape)}" for name, t in matrix.tensors().items())
        table.add_row(
            type(matrix).__name__,
            layout,
            format_bytes(matrix.memory_bytes()),
            f"{matrix.memory_bytes() / matrix.dense_bytes():.1%}",
            "[green]to the bit[/]",
        )
    table.add_row("dense", f"{list(gate.shape)}", format_bytes(packed[0].dense_bytes()), "100%", "")
    console.print(table)
    _show_first_tile(console, packed[0])


def _show_first_tile(console: Console, twell: TwELL) -> None:
    if not twell.shape[0] or not twell.tiles:
        return
    row, tile = divmod(int(twell.counts().argmax()), twell.tiles)
    words = twell.words.view(torch.int32)[row, tile * twell.words_per_tile :][: twell.words_per_tile]
    count, entries = int(words[0]), words[1:]
    shown = [
        f"[{(word >> 16).to(torch.int16).view(torch.bfloat16).item():.3g} | {int(word & 0xFFFF)}]"
        for word in entries[: min(count, 6)]
    ]
    more = " ..." if count > len(shown) else ""
    console.print(
        f"the fullest TwELL tile, token {row}, tile {tile}: count {count}, then value | neuron:\n  "
        + " ".join(shown)
        + more
        + "\n",
        markup=False,
    )


def _check_exactness(console: Console, mlp: SparseMLP, block: SyntheticFfn) -> None:
    exact = reference.ffn(*block.operands(), dtype=torch.float64).y
    stock_error = reference.relative_error(stock_dense(*block.operands()), exact)
    table = Table("path", "error against the float64 oracle", "verdict")
    table.add_row("dense PyTorch", f"{stock_error:.1e}", "the yardstick")
    for path in ("row", "block", "auto"):
        mlp.plan = Plan(path=path, backend="cpu")
        error = reference.relative_error(mlp(block.x), exact)
        # The row path adds neurons one by one, which costs some roundings when many are active.
        bound = 2 * stock_error + 16 * torch.finfo(torch.float32).eps
        if not error <= bound:
            raise AssertionError(f"{path}: error {error:.1e}, over the bound {bound:.1e}")
        table.add_row(path, f"{error:.1e}", "[green]as exact as dense[/]")
    console.print(table)


def _time(console: Console, hidden: int, neurons: int, density: float, tokens: int) -> list[FfnComparison]:
    cases = [
        FfnCase(tokens=count, hidden=hidden, neurons=neurons, nnz=density * neurons)
        for count in sorted({tokens, *_DECODE_TOKENS}, reverse=True)
    ]
    with Bar(console, "timing dense and sparse", len(cases) * _REPETITIONS, "rounds") as bar:
        return [
            compare_ffn(case, {"auto": None}, repetitions=_REPETITIONS, progress=bar.advance)
            for case in cases
        ]


def _label(comparison: FfnComparison) -> str:
    tokens = comparison.case.tokens
    kind = "decode" if tokens in _DECODE_TOKENS else "prefill"
    return f"{kind}, {tokens} token{'s' if tokens > 1 else ''}"


def _show_times(console: Console, comparisons: list[FfnComparison]) -> None:
    table = Table("workload", "dense", "sparse", "speed-up", "error")
    for c in comparisons:
        dense, sparse = c.timings[BASELINE].median, c.timings["auto"].median
        table.add_row(
            _label(c),
            f"{dense * 1e3:.2f} ms",
            f"{sparse * 1e3:.2f} ms",
            f"[bold green]{dense / sparse:.2f}x[/]" if dense > sparse else f"{dense / sparse:.2f}x",
            f"{c.errors['auto']:.1e}",
        )
    console.print(table)


def _record(comparison: FfnComparison):
    return make_record(
        f"block/{'decode' if comparison.case.tokens in _DECODE_TOKENS else 'prefill'}/auto",
        comparison.timings["auto"],
        unit="s",
        baseline=BASELINE,
        baseline_timing=comparison.timings[BASELINE],
        shape=comparison.case.shape(),
        sparsity={"nnz": comparison.nnz, "density": comparison.nnz / comparison.case.neurons},
        error=comparison.errors["auto"],
        seed=comparison.case.seed,
    )
