"""Packages that only some sources need."""

from __future__ import annotations

import importlib
from types import ModuleType

from ..._checks import missing_extra


def needed(module: str, purpose: str) -> ModuleType:
    """Import `module`, or say what it is for and how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != missing:
            raise  # the package is there, something it needs is not
        raise missing_extra(f"{purpose} needs {missing}", "train") from error
