"""Times calls: warmed up, repeated, and interleaved with the candidates they are compared with."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TypeVar

import numpy as np
import torch

from .._errors import reject, require_int, require_positive_int
from .environment import checked_device

T = TypeVar("T")
SAMPLE_SECONDS = 1e-3
"""Least length of a sample when the number of calls per sample is chosen automatically."""

_MAX_CALLS = 1 << 20
_QUEUE_CYCLES = 8_000_000  # 4 to 5 ms: more than the host takes to launch a forward and a backward


@dataclass(frozen=True)
class Timing:
    """Measured seconds per call, one entry per sample."""

    samples: tuple[float, ...]

    def __post_init__(self) -> None:
        samples = tuple(map(float, self.samples))
        if not samples or not all(math.isfinite(s) and s >= 0 for s in samples):
            reject("samples", samples, "at least one sample, each finite and >= 0 seconds")
        object.__setattr__(self, "samples", samples)

    @property
    def n(self) -> int:
        """Number of samples."""
        return len(self.samples)

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    def quantile(self, q: float) -> float:
        """The `q`-quantile, 0 <= q <= 1, linear between samples."""
        if not 0 <= q <= 1:
            reject("q", q, "a number from 0 to 1")
        return float(np.quantile(self.samples, q))

    def quantiles(self) -> dict[str, float]:
        """The three quantiles that every record carries."""
        return {"p10": self.quantile(0.1), "p50": self.quantile(0.5), "p90": self.quantile(0.9)}

    def __str__(self) -> str:
        p10, p50, p90 = (f"{seconds * 1e3:.4g}" for seconds in self.quantiles().values())
        return f"{p50} ms (p10 {p10}, p90 {p90}, n {self.n})"


def speedup(baseline: Timing, candidate: Timing) -> float:
    """How many times faster `candidate` is: the ratio of the medians."""
    if candidate.median == 0:
        reject("candidate", "a median of 0 s", "a measurable time; raise calls_per_sample")
    return baseline.median / candidate.median


def compare(
    candidates: Mapping[str, Callable[[], object]],
    *,
    device: torch.device | str = "cpu",
    warmup: int = 3,
    repetitions: int = 20,
    first: int = 0,
    calls_per_sample: int | None = None,
    queued: bool = False,
    progress: Callable[[], None] | None = None,
) -> dict[str, Timing]:
    """Time every candidate in interleaved rounds, so that drift and neighbours affect all equally.

    warmup:            untimed calls of each candidate before anything is timed.
    repetitions:       rounds. Each takes one sample of every candidate, in an order that changes between
                       rounds (rotated, and reversed every second time).
    first:             number of the first round, where rounds are taken one by one: it decides the order.
    calls_per_sample:  calls averaged into a sample; None picks, per candidate, as many as fill 1 ms.
    queued:            CUDA only: keep the GPU busy for some milliseconds before each sample, untimed, so that
                       the host has launched the sample when the GPU begins it. This gives GPU time with the
                       host running ahead, as in training.
    progress:          called after every round (on CUDA: after the round was queued).

    On CUDA, events on the current stream bracket each sample and the host waits once, at the end. A candidate
    whose launches take longer than its kernels is therefore timed by its launches, unless `queued`.
    """
    where = checked_device(device)
    if not isinstance(candidates, Mapping) or not candidates:
        reject("candidates", candidates, "a mapping of at least one name to a function")
    require_int("warmup", warmup, 0)
    require_positive_int("repetitions", repetitions)
    require_int("first", first, 0)
    if calls_per_sample is not None:
        require_positive_int("calls_per_sample", calls_per_sample)
    if queued and where.type != "cuda":
        reject("queued", True, "False on the CPU; True needs a CUDA device")

    cuda = where.type == "cuda"
    names = list(candidates)
    rounds = (name for index in range(first, first + repetitions) for name in order_of_round(names, index))
    with torch.cuda.device(where) if cuda else nullcontext():
        for fn in candidates.values():
            for _ in range(warmup):
                fn()
        calls = {
            name: calls_per_sample or _calls_filling_a_sample(fn, cuda) for name, fn in candidates.items()
        }
        with gc_paused():
            if cuda:
                return _samples_cuda(candidates, calls, rounds, queued, progress)
            return _samples_cpu(candidates, calls, rounds, progress)


def order_of_round(candidates: Sequence[T], index: int) -> list[T]:
    """The candidates in the order of round `index`: AB BA BA AB for two, all six orders for three."""
    shift = (index // 2) % len(candidates)
    order = [*candidates[shift:], *candidates[:shift]]
    return order[::-1] if index % 2 else order


def _calls_filling_a_sample(fn: Callable[[], object], cuda: bool) -> int:
    """The number of calls that lasts `SAMPLE_SECONDS`, at least 1."""
    calls = 1
    while calls < _MAX_CALLS:
        seconds = _wall_seconds(fn, calls, cuda)
        if seconds >= SAMPLE_SECONDS:
            break
        wanted = math.ceil(calls * 1.1 * SAMPLE_SECONDS / max(seconds, 1e-9))
        calls = min(max(wanted, calls + 1), 16 * calls, _MAX_CALLS)
    return calls


def _wall_seconds(fn: Callable[[], object], calls: int, cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    start = perf_counter_ns()
    for _ in range(calls):
        fn()
    if cuda:
        torch.cuda.synchronize()
    return (perf_counter_ns() - start) * 1e-9


def _samples_cpu(
    candidates: Mapping[str, Callable[[], object]],
    calls: dict[str, int],
    rounds: Iterator[str],
    progress: Callable[[], None] | None,
) -> dict[str, Timing]:
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for taken, name in enumerate(rounds, start=1):
        samples[name].append(_wall_seconds(candidates[name], calls[name], cuda=False) / calls[name])
        if progress is not None and taken % len(candidates) == 0:
            progress()
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def _samples_cuda(
    candidates: Mapping[str, Callable[[], object]],
    calls: dict[str, int],
    rounds: Iterator[str],
    queued: bool,
    progress: Callable[[], None] | None,
) -> dict[str, Timing]:
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in candidates}
    for taken, name in enumerate(rounds, start=1):
        fn = candidates[name]
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        if queued:
            torch.cuda._sleep(_QUEUE_CYCLES)
        start.record()
        for _ in range(calls[name]):
            fn()
        end.record()
        events[name].append((start, end))
        if progress is not None and taken % len(candidates) == 0:
            progress()
    torch.cuda.synchronize()
    return {
        name: Timing(tuple(start.elapsed_time(end) * 1e-3 / calls[name] for start, end in pairs))
        for name, pairs in events.items()
    }


@contextmanager
def gc_paused() -> Iterator[None]:
    """Keep the garbage collector out of samples. Inside another one this does nothing: collecting takes long
    enough for a GPU to cool down."""
    was_enabled = gc.isenabled()
    if was_enabled:
        gc.collect()
        gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
