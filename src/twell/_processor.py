"""Which CPU this is, and whether its 16-bit matrix units work.

Some virtual machines advertise AMX and kill the process that executes it: stock PyTorch's 16-bit products
then end with SIGILL, or fail to create a primitive. A child process tries them, the answer is kept by boot
and CPU, and oneDNN is capped before its first product, since it reads the cap only once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from ._files import cache_folder, write_atomically

CAP_VARIABLE = "ONEDNN_MAX_CPU_ISA"
_OLD_CAP_VARIABLE = "DNNL_MAX_CPU_ISA"

# Tried in turn until the products survive. The first forbids only AMX, which was enough on such machines.
CAPS = ("AVX512_CORE_FP16", "AVX512_CORE", "AVX2")
_NOTHING_HELPS = "nothing helps"
_TRIAL_SECONDS = 120
_CPUINFO = "/proc/cpuinfo"

# What stock models do in 16 bits: matrix products with a bias, for one token and for many.
_TRIAL = """
import torch
print("begun", flush=True)
for dtype in (torch.bfloat16, torch.float16):
    weight, bias = torch.ones(96, 64, dtype=dtype), torch.ones(96, dtype=dtype)
    for tokens in (1, 3, 40):
        y = torch.nn.functional.linear(torch.ones(tokens, 64, dtype=dtype), weight, bias)
        assert (y == 65).all(), y
"""

_log = logging.getLogger("twell")


class Verdict(NamedTuple):
    """Whether this CPU's 16-bit products work.

    cap:    the ONEDNN_MAX_CPU_ISA they need; "" for none.
    words:  the same in words.
    """

    cap: str
    words: str


_applied: Verdict | None = None  # in this process


@lru_cache(maxsize=1)
def cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine() or "unknown"


@lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str]:
    """The instruction sets the system lists; empty if it lists none."""
    return frozenset(_cpuinfo("flags").split())


def _cpuinfo(field: str) -> str:
    """The first value of `field` in /proc/cpuinfo, or ""."""
    try:
        with open(_CPUINFO, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() == field:
                    return value.strip()
    except OSError:
        pass
    return ""


def fingerprint(*more: str) -> str:
    """Twelve hexadecimal digits for this CPU and `more`."""
    parts = (cpu_name(), *sorted(cpu_flags()), *more)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def names_amx() -> bool:
    return any(flag.startswith("amx") for flag in cpu_flags())


def apply_kept_verdict() -> Verdict | None:
    """Cap oneDNN if a trial since the last boot found that it needs it; starts no process."""
    if not names_amx() or _is_capped():
        return None
    verdict = _kept_verdict()
    if verdict is not None:
        _apply(verdict)
    return verdict


def make_products_safe() -> Verdict:
    """Try whether 16-bit products work here (a few seconds, once per boot) and cap oneDNN if not."""
    if _applied is not None:
        return _applied
    if _is_capped():
        value = os.environ.get(CAP_VARIABLE) or os.environ[_OLD_CAP_VARIABLE]
        return Verdict("", f"oneDNN is capped at {value} by the environment")
    if not names_amx():
        return Verdict("", "no AMX: oneDNN is used as it is")
    verdict = _kept_verdict()
    if verdict is None:
        verdict = _try_products()
        if verdict is None:
            return Verdict("", "AMX is there, but could not be tried")
        if verdict.words != _NOTHING_HELPS:
            _keep(verdict)
    _apply(verdict)
    return verdict


def _is_capped() -> bool:
    return bool(os.environ.get(CAP_VARIABLE) or os.environ.get(_OLD_CAP_VARIABLE))


def _apply(verdict: Verdict) -> None:
    global _applied
    _applied = verdict
    if verdict.cap:
        os.environ[CAP_VARIABLE] = verdict.cap
        _log.warning("twell: %s; %s=%s", verdict.words, CAP_VARIABLE, verdict.cap)
    elif verdict.words == _NOTHING_HELPS:
        _log.warning("twell: 16-bit products fail on this CPU under every oneDNN cap; use float32")


def _try_products() -> Verdict | None:
    """None if no trial finished."""
    survives = _survives("")
    if survives is None:
        return None
    if survives:
        return Verdict("", "AMX works")
    for cap in CAPS:
        if _survives(cap):
            return Verdict(cap, "this CPU lists AMX but fails on it, so oneDNN is capped")
    return Verdict("", _NOTHING_HELPS)


def _survives(cap: str) -> bool | None:
    """Whether a child process survives 16-bit products under `cap`; None if it could not be tried."""
    environment = {name: value for name, value in os.environ.items() if name != CAP_VARIABLE}
    if cap:
        environment[CAP_VARIABLE] = cap
    try:
        finished = subprocess.run(
            [sys.executable, "-c", _TRIAL],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_TRIAL_SECONDS,
        )
    except (OSError, TypeError, subprocess.TimeoutExpired):  # TypeError: embedded Python has no executable
        return None
    if not finished.stdout.startswith(b"begun"):
        return None  # it never reached a product
    return finished.returncode == 0


def _keep(verdict: Verdict) -> None:
    path = _verdict_file()
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(verdict._asdict()) + "\n")
    except OSError:  # the next process tries again
        _log.info("twell: could not keep the verdict on this CPU in %s", path)


def _kept_verdict() -> Verdict | None:
    path = _verdict_file()
    try:
        fields = json.loads(path.read_text(encoding="utf-8")) if path is not None else None
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or set(fields) != set(Verdict._fields):
        return None
    known = fields["cap"] in ("", *CAPS) and isinstance(fields["words"], str)
    return Verdict(**fields) if known else None


def _verdict_file() -> Path | None:
    """Named by CPU, boot and torch: a virtual machine may restart on other hardware."""
    folder = cache_folder()
    if folder is None:
        return None
    return folder / f"processor-{fingerprint(_boot(), _torch_version())}.json"


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown boot"


def _torch_version() -> str:
    from importlib import metadata  # instead of importing torch

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "unknown"
