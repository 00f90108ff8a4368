"""How long a call takes: warmed up, repeated, and interleaved when candidates are compared."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
import torch
from torch import Tensor

from .._checks import reject, require_positive_int
from .environment import checked_device

SAMPLE_SECONDS = 1e-3
"""The least a sample lasts when the number of calls per sample is chosen automatically."""

_MAX_CALLS = 1 << 20
_MIN_FLUSH_BYTES = 256 << 20
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
    def min(self) -> float:
        return min(self.samples)

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


def time_calls(
    fn: Callable[[], object],
    *,
    device: torch.device | str = "cpu",
    warmup: int = 3,
    repetitions: int = 20,
    calls_per_sample: int | None = None,
    l2_cold: bool = False,
) -> Timing:
    """Time `fn()`; `compare` with a single candidate."""
    timings = compare(
        {"fn": fn},
        device=device,
        warmup=warmup,
        repetitions=repetitions,
        calls_per_sample=calls_per_sample,
        l2_cold=l2_cold,
    )
    return timings["fn"]


def compare(
    candidates: Mapping[str, Callable[[], object]],
    *,
    device: torch.device | str = "cpu",
    warmup: int = 3,
    repetitions: int = 20,
    calls_per_sample: int | None = None,
    l2_cold: bool = False,
    queued: bool = False,
    progress: Callable[[], None] | None = None,
) -> dict[str, Timing]:
    """Time every candidate in interleaved rounds, so that drift and neighbours hit all alike.

    warmup:            untimed calls of each candidate before anything is timed.
    repetitions:       rounds; each takes one sample of every candidate, in an order that changes
                       between rounds (rotated, and reversed every second time).
    calls_per_sample:  calls averaged into a sample; None picks, per candidate, as many as fill 1 ms.
    l2_cold:           CUDA only: overwrite the L2 cache before each sample, untimed; one call per sample.
    queued:            CUDA only: keep the device busy for some milliseconds before each sample, untimed, so
                       that the host has launched the sample when the device begins it. What a device does
                       behind a host that runs ahead, as in training.
    progress:          called after every round (on CUDA: after the round was queued).

    On CUDA, events on the current stream bracket each sample and the host waits once, at the end; a
    candidate whose launches take longer than its kernels is therefore timed at the rate of its launches,
    unless `queued`.
    """
    where = checked_device(device)
    if not isinstance(candidates, Mapping) or not candidates:
        reject("candidates", candidates, "a mapping of at least one name to a function")
    if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 0:
        reject("warmup", repr(warmup), "an integer >= 0")
    require_positive_int("repetitions", repetitions)
    if calls_per_sample is not None:
        require_positive_int("calls_per_sample", calls_per_sample)
    if l2_cold and where.type != "cuda":
        reject("l2_cold", True, "False on the CPU; True needs a CUDA device")
    if queued and where.type != "cuda":
        reject("queued", True, "False on the CPU; True needs a CUDA device")
    if l2_cold and calls_per_sample not in (None, 1):
        reject("calls_per_sample", calls_per_sample, "None or 1 with l2_cold: later calls would find L2 warm")

    cuda = where.type == "cuda"
    fixed = 1 if l2_cold else calls_per_sample
    names = list(candidates)
    rounds = (name for index in range(repetitions) for name in _order(names, index))
    with torch.cuda.device(where) if cuda else nullcontext():
        for fn in candidates.values():
            for _ in range(warmup):
                fn()
        calls = {name: fixed or _calls_filling_a_sample(fn, cuda) for name, fn in candidates.items()}
        with _gc_paused():
            if cuda:
                flush = _flush_buffer() if l2_cold else None
                return _samples_cuda(candidates, calls, rounds, flush, queued, progress)
            return _samples_cpu(candidates, calls, rounds, progress)


def _order(names: list[str], index: int) -> list[str]:
    """The candidates in the order of round `index`: AB BA BA AB for two, all six orders for three."""
    shift = (index // 2) % len(names)
    order = names[shift:] + names[:shift]
    return order[::-1] if index % 2 else order


def _calls_filling_a_sample(fn: Callable[[], object], cuda: bool) -> int:
    """How many calls last `SAMPLE_SECONDS`; 1 if a single call does."""
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
    flush: Tensor | None,
    queued: bool,
    progress: Callable[[], None] | None,
) -> dict[str, Timing]:
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in candidates}
    for taken, name in enumerate(rounds, start=1):
        fn = candidates[name]
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        if flush is not None:
            flush.zero_()
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


def _flush_buffer() -> Tensor:
    """A buffer whose overwriting leaves nothing else in L2: at least twice its size.

    256 MiB at the least, so that the write also lasts long enough to hide the launches behind it.
    """
    l2_bytes = torch.cuda.get_device_properties(None).L2_cache_size
    return torch.empty(max(2 * l2_bytes, _MIN_FLUSH_BYTES), dtype=torch.int8, device="cuda")


@contextmanager
def _gc_paused() -> Iterator[None]:
    """No garbage collection inside a sample."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
