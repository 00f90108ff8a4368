"""Makes transformers' `AutoConfig` know the model types of `twell.hf`, without importing either of them.

`install()` registers stand-ins for the config classes: at once if transformers' auto module is loaded, else
right after it is. A stand-in imports `twell.hf` when somebody asks it for anything. Any earlier, that would
import parts of transformers while transformers itself is half imported.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ._log import log_once

_AUTO_MODULE = "transformers.models.auto.configuration_auto"
_CONFIGS = {"llama_sparse_relu": "SparseLlamaConfig", "qwen2_sparse_relu": "SparseQwen2Config"}


def install() -> None:
    """Register the model types now, or as soon as transformers' auto module is loaded; may run twice."""
    auto_module = sys.modules.get(_AUTO_MODULE)
    if auto_module is not None and hasattr(auto_module, "CONFIG_MAPPING"):
        _register(auto_module)
    elif not any(isinstance(finder, _AutoModuleFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AutoModuleFinder())


class _StandIn(type):
    """A class in a config's place: asked for anything, it registers the real ones and passes that on."""

    def _config_class(cls) -> type:
        # By name: `twell.hf` is a layer above this one.
        importlib.import_module("twell.hf.registration").register_configs()
        return getattr(importlib.import_module("twell.hf.config"), cls.__name__)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._config_class()(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(cls._config_class(), name)


def _register(auto_module: ModuleType) -> None:
    """Never raises: an import of transformers must not fail because of twell."""
    try:
        for model_type, name in _CONFIGS.items():
            if model_type not in auto_module.CONFIG_MAPPING:
                stand_in = _StandIn(name, (), {"model_type": model_type})
                auto_module.CONFIG_MAPPING.register(model_type, stand_in, exist_ok=True)
    except Exception as error:
        log_once(f"the models of twell.hf are not registered with transformers: {error!r}")


class _AutoModuleFinder:
    """Finds transformers' auto module as the other finders do, and has `_register` run after its code."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != _AUTO_MODULE:
            return None
        for finder in list(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            spec = None if finder is self or find_spec is None else find_spec(fullname, path, target)
            if spec is not None:
                self._register_after(spec)
                return spec
        return None

    def _register_after(self, spec: ModuleSpec) -> None:
        execute = getattr(spec.loader, "exec_module", None)

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == _AUTO_MODULE:  # a loader may serve many modules: that of a zip file does
                _register(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)

        try:
            if execute is not None:
                spec.loader.exec_module = execute_and_register
        except AttributeError:
            log_once(
                f"the models of twell.hf are not registered with transformers: {spec.loader!r} is closed"
            )
