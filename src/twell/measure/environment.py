"""Describes where a figure was measured: the device, the machine, the versions and the commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from .._errors import reject
from .._processor import cpu_name
from .._version import __version__
from .nvml import Nvml

_GIT_TIMEOUT_SECONDS = 20


def checked_device(device: torch.device | str) -> torch.device:
    """`device` as a `torch.device`: the CPU, or a CUDA device that exists."""
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError):
        reject("device", repr(device), "'cpu' | 'cuda' | 'cuda:<index>'")
    if where.type not in ("cpu", "cuda"):
        reject("device", repr(str(where)), "'cpu' | 'cuda' | 'cuda:<index>'")
    if where.type == "cuda":
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not found:
            reject("device", repr(str(where)), f"'cpu'; {why_no_gpu()} (`twell doctor`)")
        if (where.index or 0) >= found:
            reject("device", repr(str(where)), f"'cpu', or one of the {found} CUDA devices found here")
    return where


def why_no_gpu() -> str:
    """Why torch sees no GPU."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    return "torch finds no driver or no GPU; look whether nvidia-smi does"


def hardware(device: torch.device | str = "cpu") -> dict[str, str | int | float | None]:
    """The machine, and the GPU of a CUDA device with its clocks, power and temperature at this moment, as
    JSON-ready entries. Unknown entries are None."""
    where = checked_device(device)
    machine: dict[str, str | int | float | None] = {
        "device": where.type,
        "cpu": cpu_name(),
        "logical_cores": _usable_cores(),
        "torch_threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
    }
    if where.type == "cuda":
        gpu = torch.cuda.get_device_properties(where)
        machine |= {
            "gpu": gpu.name,
            "sm_count": gpu.multi_processor_count,
            "gpu_memory_gib": round(gpu.total_memory / 2**30, 1),
            "l2_mib": round(gpu.L2_cache_size / 2**20, 1),
            "capability": f"{gpu.major}.{gpu.minor}",
            "driver": _nvidia_driver(),
            **gpu_state(where),
        }
    return machine


def versions() -> dict[str, str | None]:
    """Versions of Python, torch, triton and transformers (None if absent), twell and the platform."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": _installed_version("triton") or _installed_version("pytorch-triton"),
        "transformers": _installed_version("transformers"),
        "twell": __version__,
        "platform": platform.platform(),
    }


def commit(path: str | os.PathLike[str] | None = None) -> str:
    """Short hash of the commit checked out in the repository that holds `path`; never raises.

    `path` defaults to the file of twell that runs, as long as its repository tracks it: an installed copy may
    lie inside somebody else's. "+dirty" marks modified tracked files. Without git, a repository or a commit
    the result is "unknown".
    """
    try:
        place = Path(__file__).resolve() if path is None else Path(path).absolute()
        folder = place if place.is_dir() else place.parent
        if path is None:
            _git(folder, "ls-files", "--error-unmatch", place.name)
        head = _git(folder, "rev-parse", "--short", "HEAD")
        changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, ValueError, subprocess.SubprocessError):
        return "unknown"
    return f"{head}+dirty" if changes else head


def _git(folder: Path, *arguments: str) -> str:
    """Output of a git command in the repository around `folder`, whatever GIT_DIR says."""
    ignored = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
    finished = subprocess.run(
        ["git", "--no-optional-locks", "-C", str(folder), *arguments],
        env={name: value for name, value in os.environ.items() if name not in ignored},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=_GIT_TIMEOUT_SECONDS,
    )
    return finished.stdout.strip()


def _usable_cores() -> int | None:
    """Logical cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (AttributeError, OSError, ValueError):
        return None


def _nvidia_driver() -> str | None:
    """The driver's version, from its management library."""
    try:
        return Nvml().driver()
    except OSError:
        return None


def gpu_state(device: torch.device) -> dict[str, int | float | None]:
    """Clocks, power, its limit and temperature of a GPU now; empty without its management library."""
    try:
        state = Nvml().device(device.index or 0).state()
    except OSError:
        return {}
    return {
        "sm_clock_mhz": state.sm_clock_mhz,
        "memory_clock_mhz": state.memory_clock_mhz,
        "power_w": state.watts,
        "power_limit_w": state.power_limit_watts,
        "temperature_c": state.temperature_c,
    }


def _installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
