"""Energy of a call: from the GPU's total-energy counter, else from its power; from RAPL on CPUs.

The counter of a GPU moves every 20 to 100 ms, so a call is repeated for some seconds while a thread reads the
counter. Mean power is what the counter gained between two of its own moves, over the time between them; the
energy of a call is that power times the call's time. Nothing depends on where in a tick a call begins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from time import perf_counter, sleep
from typing import Protocol

import torch

from .._errors import reject
from .nvml import LIBRARY, Nvml, NvmlDevice

POWERCAP = Path("/sys/class/powercap")
SECONDS = 2.5  # of a window: 1 to 4% are one tick of the counter
COUNTER, SAMPLES, RAPL = "NVML energy counter", "integrated power samples", "RAPL counter"
_INTERVAL = 0.01  # between readings
_RUN_IN = 0.3  # seconds before a window counts: power is an average over 100 ms, clocks settle


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One look at a power source. joules: a counter that never falls; None where there is none."""

    seconds: float
    joules: float | None = None
    watts: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None


class PowerSource(Protocol):
    """Where readings come from. counter: what to call its counter of energy."""

    counter: str

    def read(self) -> Reading: ...


class GpuPower:
    counter = COUNTER

    def __init__(self, device: NvmlDevice) -> None:
        self._device = device

    def read(self) -> Reading:
        state = self._device.state()
        return Reading(
            seconds=perf_counter(),
            joules=state.joules,
            watts=state.watts,
            sm_clock_mhz=state.sm_clock_mhz,
            memory_clock_mhz=state.memory_clock_mhz,
            temperature_c=state.temperature_c,
        )


class CpuPower:
    """RAPL: the packages of a machine, with their memory where it is counted apart. Raises OSError without a
    counter that may be read; on most machines only root may."""

    counter = RAPL

    def __init__(self, root: Path = POWERCAP) -> None:
        self._counters: list[tuple[Path, int]] = []
        for folder in sorted(root.glob("intel-rapl:*")):
            name = (folder / "name").read_text().strip()
            if name.startswith("package") or name == "dram":
                span = int((folder / "max_energy_range_uj").read_text())
                self._counters.append((folder / "energy_uj", span))
        if not self._counters:
            raise OSError(f"no RAPL counters in {root}")
        self._last = [int(path.read_text()) for path, _ in self._counters]
        self._total = 0

    def read(self) -> Reading:
        for place, (path, span) in enumerate(self._counters):
            now = int(path.read_text())
            self._total += (now - self._last[place]) % (span + 1)  # it wraps, after minutes at full power
            self._last[place] = now
        return Reading(seconds=perf_counter(), joules=self._total * 1e-6)


def power_source(
    device: torch.device | str, *, library: str = LIBRARY, root: Path = POWERCAP
) -> PowerSource | str:
    """The power source of a device, or one line that says why there is none."""
    where = torch.device(device)
    try:
        if where.type == "cuda":
            gpu = Nvml(library).device(where.index if where.index is not None else 0)
            reading = GpuPower(gpu).read()
            if reading.joules is None and reading.watts is None:
                return "no energy: this GPU reports neither energy nor power"
            return GpuPower(gpu)
        return CpuPower(root)
    except PermissionError as error:
        return f"no energy: only root may read {error.filename}"
    except (OSError, ValueError) as error:
        return f"no energy: {error}"


@dataclass(frozen=True, kw_only=True)
class Power:
    """Mean power over some readings, how it was found, and the state of the GPU meanwhile."""

    watts: float
    method: str
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_c: int | None = None

    def entries(self) -> dict[str, float | int | str]:
        """For the hardware of a record."""
        found = {
            "power_w": round(self.watts, 1),
            "energy_from": self.method,
            "sm_clock_mhz": self.sm_clock_mhz and round(self.sm_clock_mhz),
            "memory_clock_mhz": self.memory_clock_mhz and round(self.memory_clock_mhz),
            "temperature_c": self.temperature_c,
        }
        return {name: value for name, value in found.items() if value is not None}


def mean_power(readings: Sequence[Reading], counter: str) -> Power | None:
    """None if the readings cannot tell: fewer than two, or a counter that did not move and no power."""
    found = _from_counter(readings)
    method = counter
    if found is None:
        found, method = _from_samples(readings), SAMPLES
    if found is None:
        return None
    temperatures = [r.temperature_c for r in readings if r.temperature_c is not None]
    return Power(
        watts=found,
        method=method,
        sm_clock_mhz=_mean(r.sm_clock_mhz for r in readings),
        memory_clock_mhz=_mean(r.memory_clock_mhz for r in readings),
        temperature_c=max(temperatures, default=None),
    )


def _from_counter(readings: Sequence[Reading]) -> float | None:
    """Watts between the first and the last time that the counter moved."""
    moves = [
        after
        for before, after in pairwise(readings)
        if before.joules is not None and after.joules is not None and after.joules > before.joules
    ]
    if len(moves) < 2:
        return None
    return (moves[-1].joules - moves[0].joules) / (moves[-1].seconds - moves[0].seconds)


def _from_samples(readings: Sequence[Reading]) -> float | None:
    """The mean of sampled power over time, by trapezoids."""
    known = [r for r in readings if r.watts is not None]
    if len(known) < 2 or known[-1].seconds <= known[0].seconds:
        return None
    joules = sum(
        (after.seconds - before.seconds) * (before.watts + after.watts) / 2
        for before, after in pairwise(known)
    )
    return joules / (known[-1].seconds - known[0].seconds)


def _mean(values: Iterator[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


@contextmanager
def sampled(source: PowerSource, interval: float = _INTERVAL) -> Iterator[list[Reading]]:
    """Read the source in a thread inside the `with`. The list is complete behind it."""
    readings: list[Reading] = []
    done = threading.Event()

    def read() -> None:
        while True:
            try:
                readings.append(source.read())
            except (OSError, ValueError):
                return  # what was read so far counts
            if done.wait(interval):
                return

    thread = threading.Thread(target=read, name="twell-power", daemon=True)
    thread.start()
    try:
        yield readings
    finally:
        done.set()
        thread.join()


@dataclass(frozen=True, kw_only=True)
class Energy:
    """Energy of one call, from `calls` calls in a row."""

    joules: float
    seconds: float
    calls: int
    power: Power


def energy_of(
    call: Callable[[], object],
    source: PowerSource,
    *,
    seconds: float = SECONDS,
    wait: Callable[[], None] = lambda: None,
    interval: float = _INTERVAL,
) -> Energy | None:
    """Repeat `call` for some seconds and read the source meanwhile; None where it cannot tell.

    wait:  waits for the device.
    """
    if not seconds > 0:
        reject("seconds", seconds, "a number above 0")
    _repeat(call, wait, min(_RUN_IN, seconds / 4))
    with sampled(source, interval) as readings:
        calls, took = _repeat(call, wait, seconds)
    power = mean_power(readings, source.counter)
    if power is None:
        return None
    return Energy(joules=power.watts * took / calls, seconds=took / calls, calls=calls, power=power)


def _repeat(call: Callable[[], object], wait: Callable[[], None], seconds: float) -> tuple[int, float]:
    """Calls made, and the seconds that they took, at least `seconds`."""
    calls = 0
    began = perf_counter()
    while True:
        call()
        wait()
        calls += 1
        took = perf_counter() - began
        if took >= seconds:
            return calls, took


def idle_power(source: PowerSource, seconds: float = 1.0) -> Power | None:
    """Power while nothing runs. Call it with an idle device."""
    with sampled(source) as readings:
        sleep(seconds)
    return mean_power(readings, source.counter)
