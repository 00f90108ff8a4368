"""Compares dense with sparse on one feed-forward block; benchmarks and `twell block` share it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .. import reference
from ..functional import ffn, ffn_with_stats
from ..plan import Plan
from ..synthetic import make_ffn
from .timing import Timing, compare, speedup

BASELINE = "dense eager"
COMPILED = "dense compiled"

# In a model of many layers, a token finds weights that are not in the cache. Few-token cases rotate among
# enough blocks to outgrow any CPU's last-level cache.
_COLD_BYTES = 192 << 20
_MANY_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class FfnCase:
    """One workload: synthetic gates with realistic firing rates (see `twell.synthetic`)."""

    tokens: int
    hidden: int
    neurons: int
    nnz: float
    dtype: torch.dtype = torch.float32
    gated: bool = True
    seed: int = 0

    @property
    def layers(self) -> int:
        """Blocks that the timed loop rotates among."""
        if self.tokens >= _MANY_TOKENS:
            return 1
        matrices = 3 if self.gated else 2
        weights = matrices * self.hidden * self.neurons * self.dtype.itemsize
        return min(-(-_COLD_BYTES // weights), 32)

    def shape(self) -> dict[str, int | str | bool]:
        """The shape entries of a record."""
        return {
            "M": self.tokens,
            "D": self.hidden,
            "H": self.neurons,
            "dtype": str(self.dtype).removeprefix("torch."),
            "gated": self.gated,
            "layers": self.layers,
        }


@dataclass(frozen=True)
class FfnComparison:
    """Timings per block and call, and errors against the float64 oracle, from the same run."""

    case: FfnCase
    nnz: float
    timings: dict[str, Timing]
    errors: dict[str, float]

    def speedup(self, variant: str, baseline: str = BASELINE) -> float:
        return speedup(self.timings[baseline], self.timings[variant])


def compare_ffn(
    case: FfnCase,
    plans: Mapping[str, Plan | None],
    *,
    compiled: bool = False,
    warmup: int = 2,
    repetitions: int = 15,
    progress: Callable[[], None] | None = None,
) -> FfnComparison:
    """Time stock dense PyTorch and `twell.ffn` with each plan on the CPU, interleaved.

    Dense reads `down` as `nn.Linear` stores it, ours as `SparseMLP` does (neuron-major).
    compiled: also time `torch.compile` of the dense block.
    """
    blocks = [
        make_ffn(
            case.tokens,
            case.hidden,
            case.neurons,
            case.nnz,
            gated=case.gated,
            dtype=case.dtype,
            seed=case.seed + layer,
        )
        for layer in range(case.layers)
    ]
    stock = [block.operands() for block in blocks]
    ours = [(x, up, down.mT.contiguous().mT, gate) for x, up, down, gate in stock]

    functions: dict[str, Callable[..., Tensor]] = {BASELINE: stock_dense}
    if compiled:
        functions[COMPILED] = torch.compile(stock_dense, fullgraph=True)
    operands = dict.fromkeys(functions, stock)
    for name, plan in plans.items():
        functions[name] = partial(ffn, plan=plan)
        operands[name] = ours

    def loop(name: str) -> Callable[[], None]:
        def run() -> None:
            for layer in operands[name]:
                functions[name](*layer)

        return run

    with torch.no_grad():
        timings = compare(
            {name: loop(name) for name in functions},
            warmup=warmup,
            repetitions=repetitions,
            calls_per_sample=1,
            progress=progress,
        )
        exact = reference.ffn(*stock[0], dtype=torch.float64).y
        errors = {
            name: reference.relative_error(function(*operands[name][0]), exact)
            for name, function in functions.items()
        }
    return FfnComparison(
        case=case,
        nnz=ffn_with_stats(*stock[0])[1].l0.item(),
        timings={
            name: Timing(tuple(sample / case.layers for sample in timing.samples))
            for name, timing in timings.items()
        },
        errors=errors,
    )


def stock_dense(x: Tensor, up: Tensor, down: Tensor, gate: Tensor | None) -> Tensor:
    """The baseline: the ReLU block in stock PyTorch."""
    linear = torch.nn.functional.linear
    if gate is None:
        return linear(torch.relu(linear(x, up)), down)
    return linear(torch.relu(linear(x, gate)) * linear(x, up), down)
