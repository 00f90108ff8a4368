"""One way to refuse bad input, and one way to ask for a missing package.

Errors name the argument, the value received and the values accepted; or how to install the package.
"""

from __future__ import annotations

import difflib
import importlib
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MOST_SAID = 300  # characters of an error in one line
# The extras of pyproject.toml and the modules that only they bring.
EXTRAS = {
    "plot": ("matplotlib",),
    "hf": ("transformers", "safetensors", "accelerate"),
    "train": ("tokenizers", "datasets", "pyarrow", "yaml"),
    "eval": ("lm_eval",),
    "serve": ("fastapi", "uvicorn", "openai"),
    "vllm": ("vllm",),
}


def reject(argument: str, received: Any, accepted: str) -> NoReturn:
    """Raise the library's standard `ValueError`."""
    raise ValueError(f"{argument}: got {received}; accepted: {accepted}")


def require_matrix(argument: str, value: Any) -> None:
    """`value` must be a 2-D floating-point tensor."""
    if not isinstance(value, Tensor):
        reject(argument, f"a {type(value).__name__}", "a 2-D floating-point torch.Tensor")
    if value.dim() != 2:
        reject(argument, f"shape {tuple(value.shape)}", "a 2-D tensor")
    if value.dtype not in FLOAT_DTYPES:
        reject(argument, f"dtype {value.dtype}", ", ".join(map(str, FLOAT_DTYPES)))


def require_int(argument: str, value: Any, least: int, note: str = "") -> None:
    """`value` must be an int of at least `least` (bools are refused); note: what to add to the error."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        reject(argument, repr(value), f"an integer >= {least}{note}")


def require_positive_int(argument: str, value: Any) -> None:
    require_int(argument, value, 1)


def require_text(argument: str, value: Any, accepted: str = "a non-empty string") -> None:
    """`value` must be a string that is not blank."""
    if not isinstance(value, str) or not value.strip():
        reject(argument, repr(value), accepted)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What to put behind the accepted names: the one that is spelt like `name`, if any is."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def require_choice(argument: str, value: Any, choices: tuple[str, ...]) -> None:
    """`value` must be one of `choices`."""
    if value not in choices:
        reject(argument, repr(value), " | ".join(map(repr, choices)))


def is_local(path: str) -> bool:
    """Whether a path that does not exist was meant to: names on the Hub are OWNER/NAME, and no folder."""
    return path.startswith((".", "/", "~")) or path.count("/") != 1 or Path(path).parent.is_dir()


def how_to_install(extra: str) -> str:
    """The command that installs an extra. No package index has twell, so it names a checkout."""
    return f'pip install -e ".[{extra}]" in a checkout of twell'


def missing_extra(what: str, extra: str) -> ImportError:
    """The error to raise without an extra. what: as "plots need matplotlib"."""
    return ImportError(f"{what}: {how_to_install(extra)}")


def explained(error: ImportError) -> str:
    """The message of a failed import, with the command that helps if an extra has the module."""
    for extra, modules in EXTRAS.items():
        if isinstance(error, ModuleNotFoundError) and error.name in modules:
            return f"{error}: {how_to_install(extra)}"
    return str(error)


# The CPU's allocator says one of the first two, CUDA, its libraries and Triton the others.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "_STATUS_ALLOC_FAILED")


class OtherProcessError(RuntimeError):
    """With the traceback of that process, whose words say nothing about memory."""


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says so, whoever raised it."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if isinstance(error, OtherProcessError):
        return False
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


# Errors of these packages' own classes are about compiling. Triton's own search for a compiler, and the
# compilers that it starts, fail with Python's.
_COMPILERS = ("torch._dynamo", "torch._inductor", "triton")
_NO_COMPILER = ("Failed to find C compiler", "Failed to find C++ compiler")


def failed_to_compile(error: BaseException) -> bool:
    """Whether `error` says that torch.compile or Triton could not compile something."""
    if isinstance(error, subprocess.CalledProcessError):
        return True
    if isinstance(error, RuntimeError) and str(error).startswith(_NO_COMPILER):
        return True
    return any(kind.__module__.startswith(_COMPILERS) for kind in type(error).__mro__)


def in_one_line(error: BaseException) -> str:
    """What an error says, without the code and the advice that compilers add."""
    lines = str(error).strip().partition("\n\n")[0].splitlines() or [""]
    said = lines[0] if len(lines) == 1 or not lines[0].endswith(":") else f"{lines[0]} {lines[-1].strip()}"
    # These are raised for the reader, in words; of others the class says more.
    told = isinstance(error, ValueError | RuntimeError | OSError)
    said = said if told and said else f"{type(error).__name__}: {said}".removesuffix(": ")
    return said if len(said) <= _MOST_SAID else f"{said[:_MOST_SAID]}..."


def asked_too_much(error: RuntimeError) -> str | None:
    """What was asked for, in torch's words, if `error` says that memory ran out; None for any other."""
    said = str(error)
    if not ran_out_of_memory(error):
        return None
    amount = re.search(r"tried to allocate [\d.]+ \w+", said, re.IGNORECASE)
    return said.splitlines()[0] if amount is None else f"t{amount[0][1:]}"


def needed(module: str, purpose: str, *, extra: str) -> ModuleType:
    """Import `module`, or say what it is for and how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != missing:
            raise  # the package is there, something it needs is not
        raise missing_extra(f"{purpose} needs {missing}", extra) from error
