"""Runs code after some module is imported, without importing it: torch and transformers have slow corners."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ._log import log_once


def after_import(name: str, run: Callable[[ModuleType], None], failure: str) -> None:
    """Have `run(module)` called right after module `name` has been imported. Asked twice, it runs once.

    failure: how the log line begins that says why it was not. An import of theirs never fails because of us.
    """
    if not any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, run, failure))


class _Finder:
    """Finds one module as the other finders do, and has something run after its code."""

    def __init__(self, name: str, run: Callable[[ModuleType], None], failure: str) -> None:
        self.name, self._run, self._failure = name, run, failure

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        for finder in list(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            spec = None if finder is self or find_spec is None else find_spec(fullname, path, target)
            if spec is not None:
                self._run_after(spec)
                return spec
        return None

    def _run_after(self, spec: ModuleSpec) -> None:
        execute = getattr(spec.loader, "exec_module", None)

        def execute_and_run(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == self.name:  # a loader may serve many modules: that of a zip file does
                self._run_safely(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)

        try:
            if execute is not None:
                spec.loader.exec_module = execute_and_run
        except AttributeError:
            log_once(f"{self._failure}: {spec.loader!r} is closed")

    def _run_safely(self, module: ModuleType) -> None:
        try:
            self._run(module)
        except Exception as error:
            log_once(f"{self._failure}: {error!r}")
