"""Optional packages: which extra brings them, and one way to say so."""

from __future__ import annotations

import importlib
from types import ModuleType

# The extras of pyproject.toml, by the modules that only they bring.
EXTRAS = {
    "plot": ("matplotlib",),
    "hf": ("transformers", "safetensors", "accelerate"),
    "train": ("tokenizers", "datasets", "pyarrow", "yaml"),
    "eval": ("lm_eval",),
}


def how_to_install(extra: str) -> str:
    """The command that brings an extra. No package index has twell, so it names a checkout."""
    return f'pip install -e ".[{extra}]" in a checkout of twell'


def missing_extra(what: str, extra: str) -> ImportError:
    """The error for something that needs an extra; `what` says so: "plots need matplotlib"."""
    return ImportError(f"{what}: {how_to_install(extra)}")


def explained(error: ImportError) -> str:
    """The message of a failed import, with the command that helps if an extra has the module."""
    for extra, modules in EXTRAS.items():
        if isinstance(error, ModuleNotFoundError) and error.name in modules:
            return f"{error}: {how_to_install(extra)}"
    return str(error)


def needed(module: str, purpose: str, *, extra: str) -> ModuleType:
    """Import `module`, or say what it is for and how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != missing:
            raise  # the package is there, something it needs is not
        raise missing_extra(f"{purpose} needs {missing}", extra) from error
