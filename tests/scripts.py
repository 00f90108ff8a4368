"""The scripts of benchmarks/, as modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@contextmanager
def benchmark_modules(*names: str) -> Iterator[tuple[ModuleType, ...]]:
    """Inside the `with` they also find each other."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield tuple(map(importlib.import_module, names))
    finally:
        sys.path.remove(str(BENCHMARKS))
