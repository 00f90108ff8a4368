"""A fair comparison of contenders: warmed up one by one, timed in turn, then their memory and energy."""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import torch

from .._errors import failed_to_compile, in_one_line, ran_out_of_memory, reject
from .._log import Ran, recorded_paths
from .._numbers import time_left
from .energy import Energy, Power, PowerSource, Reading, energy_of, mean_power, sampled
from .environment import gpu_state
from .memory import peak_bytes
from .processes import NOTE
from .results import Measured, overall_power
from .timing import compare, gc_paused, order_of_round

T = TypeVar("T")
_SLOW_INTERVAL = 0.1  # seconds between readings while calls are timed
_MOST_NOISY = 10  # rounds that count for nothing, until it is given up
OUT_OF_MEMORY = "out of memory"
_LOOKS = 3  # at the paths of a call: no layer is read twice in so many calls, after those of warming up
_WINDOWS = 2  # of energy for each contender, in turn and back


@dataclass(kw_only=True)
class Contender:
    """call:      what is timed.
    own_bytes:    memory that it holds between calls: weights, the optimiser's state.
    warm_up:      calls until it is ready: what it compiles is compiled, its layers are read.
    sparse:       whether our kernels should run in it, so that it is looked at which paths they take.
    sparse_tokens:  look at blocks' calls with so many tokens, of the whole warm-up: what is captured runs but
                  once. None: at some calls after the rounds.
    dense_reason: why most of its dense calls ran dense, where that is known.
    """

    name: str
    meaning: str
    call: Callable[[], Any]
    own_bytes: int = 0
    warm_up: int = 3
    sparse: bool = False
    sparse_tokens: int | None = None
    details: dict[str, float] = field(default_factory=dict)
    dense_reason: str = ""
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

    def unless_memory_runs_out(self, call: Callable[[], T]) -> T | None:
        """The result of `call`, None where memory runs out; what it held is free again."""
        try:
            result = call()
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
            result = None
        self.release()  # not before: the error holds what its frames held
        return result

    def attempted(self, call: Callable[[], T]) -> tuple[T | None, str | None]:
        """The result of `call`, or why there is none: no memory, or a compiler that failed. Other errors are
        mistakes, and raised."""
        result, failure = None, None
        try:
            result = call()
        except Exception as error:
            if ran_out_of_memory(error):
                failure = OUT_OF_MEMORY
            elif failed_to_compile(error):
                failure = f"does not compile: {in_one_line(error)}"
            else:
                raise
        if failure is not None:
            self.release()  # not before: the error holds what its frames held
        return result, failure


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What all contenders run.

    name:    a word; title: for the reader.
    tokens:  of what is timed.
    steps:   how many times a contender's call does what is timed.
    """

    name: str
    title: str
    shape: dict[str, int | str | bool]
    tokens: int
    steps: int = 1
    sparsity: dict[str, float] = field(default_factory=dict)


TakeRound = Callable[[Sequence[Contender], int], dict[str, float] | None]
"""(contenders, number of the round) -> seconds by contender; None for a round that counts for nothing."""


def ready(
    contender: Contender, setting: Setting, fits: Callable[[], str] | None = None, *, place: str = ""
) -> bool:
    """Warm a contender up; whether it ran. Where memory is too small, or a compiler fails, its `failure` says
    so.

    fits:   says what would fit in memory instead.
    place:  among what is warmed up, as "2 of 5": compiling may take minutes.
    """
    began = perf_counter()
    called = f"{contender.name} ({place})" if place else contender.name
    setting.say(f"{called}: warming up")

    def warm_up() -> list[Ran]:
        with recorded_paths() as ran:
            for _ in range(max(contender.warm_up, 1)):
                contender.call()
            setting.wait()
        contender.call()  # calls that nobody records may be prepared
        setting.wait()
        return ran

    ran, contender.failure = setting.attempted(warm_up)
    if contender.failure is not None:
        if fits is not None and contender.failure == OUT_OF_MEMORY:
            contender.failure += f": {fits()}"
        setting.say(f"{NOTE}{called}: {contender.failure}")
        return False
    if contender.sparse_tokens is not None:
        _note_paths(contender, [piece for piece in ran if piece.tokens == contender.sparse_tokens])
    contender.details["ready_seconds"] = round(perf_counter() - began, 2)
    setting.say(f"{called}: ready after {perf_counter() - began:.1f} s")
    return True


def _note_paths(contender: Contender, ran: Sequence[Ran]) -> None:
    if contender.sparse and ran:
        contender.details["sparse_share"] = sparse_share(ran)
        contender.dense_reason = _dense_reason(ran)


def sparse_share(ran: Sequence[Ran]) -> float:
    """The share of blocks' calls that ran sparse. Autograd's own backwards are not noted, so none counts."""
    paths = [piece.path for piece in ran if piece.phase == "forward"]
    return sum(path != "dense" for path in paths) / max(len(paths), 1)


def _dense_reason(ran: Sequence[Ran]) -> str:
    dense = (piece for piece in ran if piece.path == "dense" and piece.phase == "forward")
    reasons = Counter(piece.reason for piece in dense if piece.reason)
    return max(reasons, key=reasons.__getitem__, default="")


def run_contest(
    contenders: list[Contender], workload: Workload, setting: Setting, take_round: TakeRound | None = None
) -> None:
    """Time contenders that are `ready`; emit each after every round, then with its memory and energy.

    take_round:  times a round; None: one call of each.
    """
    samples: dict[str, list[float]] = {one.name: [] for one in contenders}
    joules: dict[str, list[float]] = {one.name: [] for one in contenders}
    power: dict[str, dict[str, Any]] = {one.name: {} for one in contenders}
    windows: dict[str, list[dict[str, Any]]] = {one.name: [] for one in contenders}  # of energy

    def emit(one: Contender) -> None:
        setting.emit(
            Measured(
                workload=workload.name,
                contender=one.name,
                meaning=one.meaning,
                shape=workload.shape,
                tokens=workload.tokens,
                seconds=tuple(samples[one.name]),
                joules=tuple(found / workload.steps for found in joules[one.name]),
                power=power[one.name],
                sparsity=workload.sparsity,
                details=dict(one.details),
                dense_reason=one.dense_reason,
                error=one.error,
                failure=one.failure,
            )
        )

    def attempt(one: Contender, what: str, call: Callable[[], Any], left: str = "") -> Any:
        """The result of `call`, None where memory runs out."""
        setting.say(f"{workload.title}: {what} of {one.name}{left}")
        try:
            return call()
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
        setting.release()  # not before: the error holds what its frames held
        setting.say(f"{NOTE}{one.name}: no memory for one call more, so its {what} is not known")
        return None

    running = [one for one in contenders if one.failure is None]
    for failed in contenders:
        if failed.failure is not None:
            emit(failed)
    if not running:
        return
    state: dict[str, Any] | None = None
    try:
        state = _time(running, workload, setting, samples, emit, take_round)
    except RuntimeError as error:
        if not ran_out_of_memory(error):
            raise
    if state is None:
        setting.release()  # not before: the error holds what its frames held
        state = _state(setting)
        failure = "out of memory while contenders took turns; --contenders names fewer"
        rounds = len(samples[running[0].name])
        if rounds:
            setting.say(f"{NOTE}{workload.title}: {failure}. {rounds} of {setting.rounds} rounds count")
        else:
            for one in running:
                one.failure = failure
    for one in running:
        power[one.name] = state
        emit(one)
    running = [one for one in running if one.failure is None]
    for one in running:
        if one.sparse and one.sparse_tokens is None:
            # After the rounds: while a layer is new, many calls read how active it is.
            _note_paths(one, attempt(one, "share of sparse calls", lambda one=one: _paths(one)) or [])
            emit(one)
        if setting.memory:
            peak = attempt(one, "memory", lambda one=one: peak_bytes(one.call, setting.device))
            if peak is not None:
                one.details["peak_bytes"] = one.own_bytes + peak
                emit(one)
    ahead = _energy_seconds(running, setting)
    if not ahead:
        return
    for window in range(_WINDOWS):
        for place, one in enumerate(order_of_round(running, window)):
            what = f"energy (window {window + 1} of {_WINDOWS})"
            done = (window * len(running) + place) / (_WINDOWS * len(running))
            left = f"; {time_left(ahead * (1 - done))}"
            energy = attempt(one, what, lambda one=one: _energy(one, setting), left)
            if energy is not None:
                joules[one.name].append(energy.joules)
                windows[one.name].append(_of_window(energy.power))
                power[one.name] = {**state, **overall_power(windows[one.name])}
                emit(one)


def _of_window(power: Power) -> dict[str, Any]:
    """Entries beside those of the rounds, which have names of their own."""
    return {
        name if name.startswith("energy_") else f"energy_{name}": value
        for name, value in power.entries().items()
    }


def _energy_seconds(running: Sequence[Contender], setting: Setting) -> float:
    """How long the windows take; 0 without energy."""
    return 0.0 if setting.source is None else _WINDOWS * len(running) * max(setting.energy_seconds, 0.0)


def _paths(contender: Contender) -> list[Ran]:
    """What blocks' calls usually do. Now and then one reads how active its layer is, and runs sparse for that
    where the plan is dense: each does what it did in most of a few calls."""
    looks: list[list[Ran]] = []
    for _ in range(_LOOKS):
        with recorded_paths() as ran:
            contender.call()
        looks.append(ran)
    if len({len(look) for look in looks}) > 1:  # not call by call the same
        return sorted(looks, key=sparse_share)[_LOOKS // 2]
    return [
        sorted(pieces, key=lambda piece: piece.path != "dense")[_LOOKS // 2]
        for pieces in zip(*looks, strict=True)
    ]


def _energy(contender: Contender, setting: Setting) -> Energy | None:
    return energy_of(contender.call, setting.source, seconds=setting.energy_seconds, wait=setting.wait)


def _time(
    running: list[Contender],
    workload: Workload,
    setting: Setting,
    samples: dict[str, list[float]],
    emit: Callable[[Contender], None],
    take_round: TakeRound | None,
) -> dict[str, Any]:
    """Adds to `samples` and emits after every round; returns the state of the device meanwhile.

    Rounds that count for nothing are taken again, up to a limit; `noisy_rounds` has their number.
    """
    source = setting.source
    readings: list[Reading] = []
    take = take_round or partial(_one_call_each, device=setting.device)
    noisy = taken = 0
    readers = sampled(source, _SLOW_INTERVAL) if source is not None else nullcontext(readings)
    began, left = perf_counter(), ""
    collecting = gc_paused() if take_round is None else nullcontext()  # once, not before each round
    with collecting, readers as readings:
        while taken < setting.rounds and noisy < _MOST_NOISY:
            setting.say(f"{workload.title}: round {taken + 1} of {setting.rounds}{left}")
            found = take(running, taken)
            seconds = (perf_counter() - began) / (taken + noisy + 1)
            ahead = seconds * (setting.rounds - taken - 1) + _energy_seconds(running, setting)
            left = f"; {time_left(ahead)}"
            if found is None:
                noisy += 1
                continue
            taken += 1
            for one in running:
                samples[one.name].append(found[one.name])
                emit(one)
    if 0 < taken < setting.rounds:
        setting.say(
            f"{NOTE}{workload.title}: {taken} of {setting.rounds} rounds count; in {noisy} others, times "
            "varied by more than what is measured"
        )
    for one in running:
        if noisy:
            one.details["noisy_rounds"] = noisy
        if not taken:
            one.failure = f"{noisy} rounds in a row took times that vary by more than what is measured"
    power: Power | None = None if source is None else mean_power(readings, source.counter)
    entries = {} if power is None else power.entries()
    entries.pop("energy_from", None)  # of rounds with all contenders; each has energy of its own
    return {**_state(setting), **entries}


def _state(setting: Setting) -> dict[str, Any]:
    return gpu_state(setting.device) if setting.device.type == "cuda" else {}


def _one_call_each(running: Sequence[Contender], turn: int, device: torch.device) -> dict[str, float]:
    timings = compare(
        {one.name: one.call for one in running},
        device=device,
        # A call that does not count: after `release` the allocator is empty.
        warmup=1 if device.type == "cuda" and turn == 0 else 0,
        repetitions=1,
        first=turn,
        calls_per_sample=1,
    )
    return {name: timing.samples[0] for name, timing in timings.items()}


def largest_that_fits(
    fits: Callable[[int], bool],
    guess: int = 1,
    most: int = 1 << 14,
    *,
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """The largest number for which `fits` holds, 0 if none; it holds for all smaller ones.

    guess:  where to begin.
    say:    called before each trial with its number and what is known by then.
    """
    if most < 1 or guess < 1:
        reject("guess, most", (guess, most), "numbers of at least 1")
    low, high = 0, most + 1  # low fits, high does not
    trial = min(guess, most)
    while high - low > 1:
        known = [f"{low} fits"] if low else []
        known += [f"{high} does not"] if high <= most else []
        say(f"trying {trial}" + (f", since {' and '.join(known)}" if known else ""))
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
