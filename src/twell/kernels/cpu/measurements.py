"""Measurements of this CPU that automatic plans go by: taken once, kept on disk, the same for a whole run.

Which way of computing is faster differs by machine, so no constant can say it. Each number is measured the
first time a call has to choose, until two tries agree, and kept in the cache folder by CPU and by versions of
torch and twell, unless other programs were busy: then a number below the usual one says little about the
CPU, and the usual one counts. `twell tune --device cpu` measures on purpose. Different ways differ in the
last bit, so a training run keeps the numbers it used in its own folder (`choices_kept_in`).
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from ..._files import cache_folder, locked, write_json
from ..._log import log_once
from ..._processor import cpu_name, fingerprint
from ..._version import __version__

_QUIET_ROUNDS = 4  # stop after this many in which no time falls
_FELL = 0.97  # a time below this share of the least before has fallen
_MOST_SECONDS = 0.5  # per try, but at least two rounds
_MOST_TRIES = 5
_AGREE_WITHIN = 0.2  # of the larger of two tries
_LARGEST = 1e6  # no share or gain is larger; a larger number was not written by us
_BUSY = 1.25  # programs that want to run, per core, over the last minute
_LOCK_SECONDS = 30  # measurements take less; after that, measure beside the other process

_log = logging.getLogger("twell")
_lock = threading.RLock()  # threads that measure at once would slow each other
_known: dict[str, float] = {}
_doubted: set[str] = set()  # names measured while other programs were busy
_run_file: Path | None = None
_forked = False
_alone = False  # whether this process holds the lock: a measurement may ask for another


def _note_fork() -> None:
    global _alone, _forked, _lock, _run_file
    _alone, _forked = False, True
    _run_file = None  # it is the parent's to write
    _lock = threading.RLock()  # the parent's may have been held by a thread that is not here


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def measured(name: str, measure: Callable[[], float], *, otherwise: float, usual: float = 0.0) -> float:
    """The number called `name` on this CPU: known, kept on disk or measured now.

    measure:    one try, a number >= 0; 0 says that sparsity is of no use here, and logs a warning.
    otherwise:  the number in a forked process where none is kept: it has no threads to measure with.
    usual:      what CPUs give at least; it replaces a smaller number that was measured amid noise.
    """
    value = _known.get(name)
    if value is not None:
        return value
    with _lock:
        if name in _known:
            return _known[name]
        kept = _kept().get(name)
        if kept is None and _forked:
            log_once("a forked process cannot measure the CPU and takes the cautious way: dense, F.linear")
            return otherwise
        return _learn(name, _measure_alone(name, measure, usual) if kept is None else kept)


def measure_again(name: str, measure: Callable[[], float]) -> float:
    """Measure even if the number is known; the new one replaces it."""
    with _lock:
        with _only_process():
            value = agreeing(measure, _MOST_TRIES)
            _keep(name, value)
        return _learn(name, value)


def was_doubted() -> bool:
    """Whether this process has measured the CPU while other programs were busy."""
    return bool(_doubted)


def agreeing(measure: Callable[[], float], most_tries: int = _MOST_TRIES) -> float:
    """The mean of two successive tries that agree, or the median of `most_tries` if none do."""
    return _agreeing(measure, most_tries)[0]


def _agreeing(measure: Callable[[], float], most_tries: int = _MOST_TRIES) -> tuple[float, bool]:
    """As `agreeing`, and whether two tries agreed."""
    tries = [measure()]
    while len(tries) < most_tries:
        tries.append(measure())
        one, other = tries[-2:]
        if abs(one - other) <= _AGREE_WITHIN * max(one, other):
            return (one + other) / 2, True
    return median(tries), False


def least_seconds(*runs: Callable[[], float]) -> list[float]:
    """The least seconds each of `runs` returns, taken in turns until none of them falls any more.

    Other work on the machine only adds to a time, so the least is what an idle machine would take.
    """
    least = [float("inf")] * len(runs)
    begun, quiet = time.perf_counter(), 0
    while quiet < _QUIET_ROUNDS and (time.perf_counter() - begun < _MOST_SECONDS or quiet == 0):
        times = [run() for run in runs]
        fell = any(new < _FELL * old for new, old in zip(times, least, strict=True))
        least = [min(pair) for pair in zip(times, least, strict=True)]
        quiet = 0 if fell else quiet + 1
    return least


@contextmanager
def choices_kept_in(path: Path, *, write: bool = True) -> Iterator[None]:
    """Go by the measurements in `path` inside the `with`, and add what else is measured.

    Numbers from another CPU or other versions stay in `path`, unused.
    write: False only reads, as all but one of several processes should.
    """
    global _run_file
    before = dict(_known), _run_file
    with _lock:
        _known.clear()
        _known.update(_read(path).get(_machine(), {}))
        _run_file = path if write else None
    try:
        yield
    finally:
        with _lock:
            _known.clear()
            _known.update(before[0])
            _run_file = before[1]


def random_floats(*shape: int) -> Tensor:
    """float32 in [0, 1), the same every time; the caller's random state stays as it is."""
    return torch.rand(
        *shape, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu"
    )


def measurements_file() -> Path | None:
    """Where measurements of this CPU are kept; None without a cache folder."""
    folder = cache_folder()
    return None if folder is None else folder / f"cpu-{_machine()}.json"


def kept_measurements() -> dict[str, float]:
    """All numbers kept on disk for this CPU, by name."""
    return dict(_kept())


def _measure_alone(name: str, measure: Callable[[], float], usual: float) -> float:
    """Measure while no other process does, unless one has found the number meanwhile."""
    with _only_process():
        kept = _kept().get(name)
        if kept is not None:
            return kept
        value, agreed = _agreeing(measure)
        _log.info("twell: measured this CPU: %s: %.4g", name, value)
        if is_busy() or (value < usual and not agreed):
            return _doubt(name, value, usual)
        if value == 0:
            log_once(
                f"measured this CPU and found no use for sparsity ({name}: 0), so such calls run dense; if "
                "other programs were busy, measure again with `twell tune --device cpu` and your sizes"
            )
        _keep(name, value)
        return value


def _doubt(name: str, value: float, usual: float) -> float:
    """What to go by after a measurement amid noise, which is not kept: it must not decide for long."""
    _doubted.add(name)
    log_once("other programs are busy: what is measured of this CPU now holds for this process only")
    if value >= usual:
        return value
    log_once(
        f"measured {name}: {value:.2g} while other programs were busy; using {usual:.2g}, less than other "
        "CPUs have, in this process or training run; on a quiet machine: `twell tune --device cpu` and your "
        "sizes"
    )
    return usual


def is_busy() -> bool:
    """Whether more wants to run than this machine has cores: what is measured then may be far off."""
    try:
        return os.getloadavg()[0] > _BUSY * (os.cpu_count() or 1)
    except (AttributeError, OSError):  # not on every system
        return False


@contextmanager
def _only_process() -> Iterator[None]:
    """Keep other processes from measuring meanwhile, if the lock can be had in time."""
    global _alone
    path = measurements_file()
    if path is None or _alone:
        yield
        return
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f"{path.name}.lock"), wait=_LOCK_SECONDS):
        _alone = True
        try:
            yield
        finally:
            _alone = False


def _learn(name: str, value: float) -> float:
    _known[name] = value
    if _run_file is not None:
        machines = _read(_run_file)
        machines[_machine()] = machines.get(_machine(), {}) | _known
        _write(_run_file, machines)
    return value


def _keep(name: str, value: float) -> None:
    path = measurements_file()
    if path is None:
        return
    _write(path, {"cpu": cpu_name(), _machine(): _kept() | {name: value}})


def _write(path: Path, content: dict[str, object]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content)
    except OSError as error:
        log_once(f"measurements of this CPU cannot be kept ({error}): every process measures again")


def _kept() -> dict[str, float]:
    path = measurements_file()
    return {} if path is None else _read(path).get(_machine(), {})


def _read(path: Path) -> dict[str, dict[str, float]]:
    """machine -> name -> number; empty without a readable file."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(stored, dict):
        return {}
    return {
        machine: {name: float(value) for name, value in numbers.items() if _is_number(value)}
        for machine, numbers in stored.items()
        if isinstance(numbers, dict)
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LARGEST


def _machine() -> str:
    caps = (os.environ.get(variable, "") for variable in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"))
    return fingerprint(str(torch.__version__), __version__, *caps)
