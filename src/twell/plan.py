"""Plans: the path and backend that a caller, or the environment, asks for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from operator import index

import torch

from ._errors import reject, require_choice, require_int
from .backends import PATHS, get_backend

ENVIRONMENT_VARIABLE = "TWELL_PLAN"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to run a block.

    path:        "auto"   sparse where it pays (the default);
                 "dense"  stock PyTorch;
                 "row"    per token, active neurons only: the paper's path;
                 "block"  per block of tokens, the union of their active neurons.
    block_rows:  tokens per block of the block path; 0 leaves it to the backend. On a GPU 64 or 128.
    backend:     "dense", "cpu" or "gpu"; None takes the first that can run.
    """

    path: str = "auto"
    block_rows: int = 0
    backend: str | None = None

    def __post_init__(self) -> None:
        require_choice("path", self.path, PATHS)
        require_int("block_rows", self.block_rows, 0, " (0: the backend's default)")
        if self.backend is not None:
            if not isinstance(self.backend, str):
                reject("backend", repr(self.backend), "the name of a backend, or None")
            get_backend(self.backend)

    @property
    def spec(self) -> str:
        """The string that `parse` reads: "block,rows=16,backend=cpu"."""
        block_rows = index(self.block_rows)  # makes it a constant for compilers
        rows = f",rows={block_rows}" if block_rows else ""
        backend = f",backend={self.backend}" if self.backend is not None else ""
        return f"{self.path}{rows}{backend}"

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(text: str) -> Plan:
        """Read "block", "block,rows=16" or "row,backend=cpu", the form of TWELL_PLAN."""
        path, *options = (part.strip() for part in text.split(","))
        fields: dict[str, str | int] = {"path": path}
        for option in options:
            key, _, value = (part.strip() for part in option.partition("="))
            if key == "backend" and "backend" not in fields:
                fields["backend"] = value
            elif key == "rows" and value.isdecimal() and "block_rows" not in fields:
                fields["block_rows"] = int(value)
            else:
                reject("plan", repr(text), "PATH[,rows=N][,backend=NAME]")
        return Plan(**fields)


def parse_override(text: str) -> Plan:
    """The plan that TWELL_PLAN names."""
    try:
        return Plan.parse(text)
    except ValueError as error:
        raise ValueError(f"environment variable {ENVIRONMENT_VARIABLE}={text!r}: {error}") from None


def is_automatic(plan: Plan | None) -> bool:
    """Whether neither `plan` nor the environment names a path."""
    return (plan is None or plan.path == "auto") and not os.environ.get(ENVIRONMENT_VARIABLE)


def resolution_state() -> tuple[str | None, int]:
    """What a resolution depends on besides the call: a key for caches."""
    return os.environ.get(ENVIRONMENT_VARIABLE), torch.get_num_threads()
