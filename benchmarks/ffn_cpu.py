"""Dense against sparse feed-forward on the CPU; writes benchmarks/results/ffn_cpu.jsonl.

D 1024, H 4096, skewed synthetic gates. Every case interleaves eager PyTorch and `twell.ffn` with an automatic
plan; cases at 1% active add the explicit paths and compiled dense. Every output is compared with the float64
oracle in the same run. Few-token cases rotate among enough blocks that weights are never in the cache. Run it
on an idle machine:

    python benchmarks/ffn_cpu.py [--quick] [--tokens N]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from _records import replace_records
from twell import Plan
from twell.measure import Record, make_record
from twell.measure.ffn import BASELINE, COMPILED, FfnCase, FfnComparison, compare_ffn

RESULTS = Path(__file__).parent / "results" / "ffn_cpu.jsonl"
HIDDEN, NEURONS = 1024, 4096
HEADLINE_DENSITY = 0.01
TOKENS = {
    torch.float32: (1, 8, 64, 2048),
    torch.bfloat16: (1, 8, 64, 512),
    torch.float16: (1, 8, 64, 512),
}
DENSITIES = {
    torch.float32: (0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    torch.bfloat16: (0.01, 0.1, 0.3, 1.0),
    torch.float16: (0.01, 0.1, 0.3, 1.0),
}
WHAT = {"auto": "ffn_cpu/auto", "row": "ffn_cpu/row", "block": "ffn_cpu/block", COMPILED: "ffn_cpu/compiled"}


def cases() -> Iterator[tuple[FfnCase, bool]]:
    """Every case, and whether it belongs to the headline (all paths, compiled dense)."""
    for dtype, densities in DENSITIES.items():
        for tokens in TOKENS[dtype]:
            for density in densities:
                case = FfnCase(
                    tokens=tokens, hidden=HIDDEN, neurons=NEURONS, nnz=density * NEURONS, dtype=dtype
                )
                yield case, dtype == torch.float32 and density == HEADLINE_DENSITY
    for tokens in TOKENS[torch.float32]:
        nnz = HEADLINE_DENSITY * NEURONS
        yield FfnCase(tokens=tokens, hidden=HIDDEN, neurons=NEURONS, nnz=nnz, gated=False), True


def measure(case: FfnCase, headline: bool, repetitions: int) -> FfnComparison:
    plans: dict[str, Plan | None] = {"auto": None}
    if headline:
        plans |= {"row": Plan(path="row"), "block": Plan(path="block")}
    return compare_ffn(case, plans, compiled=headline, repetitions=repetitions)


def records(comparison: FfnComparison) -> Iterator[Record]:
    case = comparison.case
    for variant, timing in comparison.timings.items():
        if variant != BASELINE:
            yield make_record(
                WHAT[variant],
                timing,
                unit="s",
                baseline=BASELINE,
                baseline_timing=comparison.timings[BASELINE],
                shape=case.shape(),
                sparsity={"nnz": comparison.nnz, "density": comparison.nnz / case.neurons},
                error=comparison.errors[variant],
                seed=case.seed,
                repository=__file__,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3 repetitions, print only, write nothing")
    parser.add_argument("--tokens", type=int, help="measure these cases only, keep the other records")
    options = parser.parse_args()
    quick = options.quick
    chosen = [c for c in cases() if options.tokens in (None, c[0].tokens)]
    console = Console()
    rows: list[Record] = []
    for case, headline in track(chosen, "measuring", console=console):
        slow = case.tokens >= 512
        repetitions = 3 if quick else (9 if slow else 21)
        comparison = measure(case, headline, repetitions)
        rows.extend(records(comparison))
        gains = ", ".join(
            f"{name} {comparison.speedup(name):.2f}x" for name in comparison.timings if name != BASELINE
        )
        shape = case.shape()
        console.print(
            f"M {case.tokens} {shape['dtype']} gated={case.gated} nnz {comparison.nnz:.0f}: "
            f"{BASELINE} {comparison.timings[BASELINE].median * 1e3:.2f} ms, {gains}"
        )
    if not quick:
        total = replace_records(RESULTS, rows, lambda old: options.tokens in (None, old.shape["M"]))
        console.print(f"{len(rows)} records in {RESULTS}, {total - len(rows)} others kept")


if __name__ == "__main__":
    main()
