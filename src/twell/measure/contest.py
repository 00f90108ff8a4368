"""A fair comparison of contenders: warmed up one by one, timed in turn, then their memory and energy."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from .._errors import ran_out_of_memory, reject
from .._log import Ran, recorded_paths
from .energy import Power, PowerSource, Reading, energy_of, mean_power, sampled
from .environment import gpu_state
from .memory import peak_bytes
from .processes import NOTE
from .results import Measured
from .timing import Timing, compare

_SLOW_INTERVAL = 0.1  # seconds between readings while calls are timed
_WINDOWS = 2  # of energy for each contender, in turn and back


@dataclass(kw_only=True)
class Contender:
    """call:      what is timed.
    own_bytes:    memory that it holds between calls: weights, the optimiser's state.
    warm_up:      calls until it is ready: what it compiles is compiled, its layers are read.
    sparse:       whether our kernels should run in it, so that it is looked at which paths they take.
    sparse_tokens:  look at blocks' calls with so many tokens, of the whole warm-up: what is captured runs but
                  once. None: at a call after the rounds.
    """

    name: str
    meaning: str
    call: Callable[[], Any]
    own_bytes: int = 0
    warm_up: int = 3
    sparse: bool = False
    sparse_tokens: int | None = None
    details: dict[str, float] = field(default_factory=dict)
    error: float | None = None
    failure: str | None = None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How to measure, and whom to tell.

    rounds:   interleaved rounds.
    source:   of power; None: no energy.
    energy_seconds:  of a window; 0: no energy.
    emit:     called with what is known of a contender, again when more is.
    say:      called with what is being done.
    """

    device: torch.device
    rounds: int
    source: PowerSource | None = None
    energy_seconds: float = 0.0
    memory: bool = True
    emit: Callable[[Measured], None] = lambda measured: None
    say: Callable[[str], None] = lambda text: None

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What all contenders run. name: a word; title: for the reader."""

    name: str
    title: str
    shape: dict[str, int | str | bool]
    tokens: int
    sparsity: dict[str, float] = field(default_factory=dict)


def ready(contender: Contender, setting: Setting, fits: Callable[[], str] | None = None) -> bool:
    """Warm a contender up; whether it ran. Where memory is too small, its `failure` says so.

    fits:  says what would fit instead.
    """
    began = perf_counter()
    setting.say(f"{contender.name}: warming up")
    try:
        with recorded_paths() as ran:
            for _ in range(max(contender.warm_up, 1)):
                contender.call()
            setting.wait()
        contender.call()  # calls that nobody records may be prepared
        setting.wait()
    except RuntimeError as error:
        if not ran_out_of_memory(error):
            raise
        contender.failure = "out of memory"
    if contender.failure is not None:
        setting.release()
        if fits is not None:
            contender.failure += f": {fits()}"
        setting.say(f"{NOTE}{contender.name}: {contender.failure}")
        return False
    if contender.sparse_tokens is not None:
        _note_paths(contender, [piece for piece in ran if piece.tokens == contender.sparse_tokens])
    contender.details["ready_seconds"] = round(perf_counter() - began, 2)
    setting.say(f"{contender.name}: ready after {perf_counter() - began:.1f} s")
    return True


def _note_paths(contender: Contender, ran: Sequence[Ran]) -> None:
    if contender.sparse and ran:
        contender.details["sparse_share"] = sparse_share(ran)


def sparse_share(ran: Sequence[Ran]) -> float:
    """The share of blocks' calls that ran sparse. Autograd's own backwards are not noted, so none counts."""
    paths = [piece.path for piece in ran if piece.phase == "forward"]
    return sum(path != "dense" for path in paths) / max(len(paths), 1)


def run_contest(contenders: list[Contender], workload: Workload, setting: Setting) -> None:
    """Time contenders that are `ready`; emit each with its seconds, then with its memory and energy."""

    def measured(contender: Contender, **more: Any) -> Measured:
        return Measured(
            workload=workload.name,
            contender=contender.name,
            meaning=contender.meaning,
            shape=workload.shape,
            tokens=workload.tokens,
            sparsity=workload.sparsity,
            details=contender.details,
            error=contender.error,
            failure=contender.failure,
            **more,
        )

    running = [one for one in contenders if one.failure is None]
    for failed in contenders:
        if failed.failure is not None:
            setting.emit(measured(failed))
    if not running:
        return
    try:
        timings, power = _time(running, workload, setting)
    except RuntimeError as error:
        if not ran_out_of_memory(error):
            raise
        for one in running:
            one.failure = "out of memory while contenders took turns; --contenders names fewer"
            setting.emit(measured(one))
        setting.release()
        return
    for one in running:
        if one.sparse and one.sparse_tokens is None:
            # After the rounds: while a layer is new, many calls read how active it is.
            with recorded_paths() as ran:
                one.call()
            _note_paths(one, ran)
    found = {one.name: {"seconds": timings[one.name].samples, "power": power} for one in running}
    for one in running:
        setting.emit(measured(one, **found[one.name]))
    if setting.memory:
        for one in running:
            setting.say(f"{workload.title}: memory of {one.name}")
            try:
                one.details["peak_bytes"] = one.own_bytes + peak_bytes(one.call, setting.device)
            except RuntimeError as error:
                if not ran_out_of_memory(error):
                    raise
                setting.say(f"{NOTE}{one.name}: no memory for one call more, so its memory is not known")
                setting.release()
            setting.emit(measured(one, **found[one.name]))
    if setting.source is None or setting.energy_seconds <= 0:
        return
    joules: dict[str, list[float]] = {one.name: [] for one in running}
    for window in range(_WINDOWS):
        for one in running[:: -1 if window % 2 else 1]:
            setting.say(f"{workload.title}: energy of {one.name}, window {window + 1} of {_WINDOWS}")
            energy = energy_of(one.call, setting.source, seconds=setting.energy_seconds, wait=setting.wait)
            if energy is None:
                continue
            joules[one.name].append(energy.joules)
            found[one.name] |= {
                "joules": tuple(joules[one.name]),
                "power": {**power, **energy.power.entries()},
            }
            setting.emit(measured(one, **found[one.name]))


def _time(
    running: list[Contender], workload: Workload, setting: Setting
) -> tuple[dict[str, Timing], dict[str, Any]]:
    """Timings, and the state of the device meanwhile."""
    taken = 0

    def progress() -> None:
        nonlocal taken
        taken += 1
        setting.wait()  # between rounds: what is said is what has run
        setting.say(f"{workload.title}: round {taken} of {setting.rounds}")

    source = setting.source
    readings: list[Reading] = []
    with sampled(source, _SLOW_INTERVAL) if source is not None else nullcontext(readings) as readings:
        timings = compare(
            {one.name: one.call for one in running},
            device=setting.device,
            # A round that does not count: after `release` the allocator is empty.
            warmup=1 if setting.device.type == "cuda" else 0,
            repetitions=setting.rounds,
            calls_per_sample=1,
            progress=progress,
        )
    power: Power | None = None if source is None else mean_power(readings, source.counter)
    state = gpu_state(setting.device) if setting.device.type == "cuda" else {}
    entries = {} if power is None else power.entries()
    entries.pop("energy_from", None)  # of rounds with all contenders; each has energy of its own
    return timings, {**state, **entries}


def largest_that_fits(fits: Callable[[int], bool], guess: int = 1, most: int = 1 << 14) -> int:
    """The largest number for which `fits` holds, 0 if none; it holds for all smaller ones.

    guess: where to begin.
    """
    if most < 1 or guess < 1:
        reject("guess, most", (guess, most), "numbers of at least 1")
    low, high = 0, most + 1  # low fits, high does not
    trial = min(guess, most)
    while high - low > 1:
        if fits(trial):
            low = trial
        else:
            high = trial
        trial = min(2 * low, most) if high > most and low else (low + high) // 2
    return low


def doubt(one: Contender, what: str, error: float, most: float, setting: Setting) -> None:
    """Mark a contender that computes something else, and say so. most: the error that rounding can make."""
    if error <= most:  # NaN is not
        return
    one.details["doubtful"] = 1
    setting.say(
        f"{NOTE}{one.name} computes something else: its {what} differ by {error:.1e}, "
        f"and rounding makes at most {most:.1e}. Its speed means nothing."
    )
    # Records hold numbers.
    one.details = {name: value for name, value in one.details.items() if math.isfinite(value)}
    if one.error is not None and not math.isfinite(one.error):
        one.error = None
