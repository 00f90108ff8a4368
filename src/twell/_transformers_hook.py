"""Makes transformers' `AutoConfig` know the model types of `twell.hf`, without importing either of them.

`install()` registers stand-ins for the config classes: at once if transformers' auto module is loaded, else
right after it is. A stand-in imports `twell.hf` when somebody asks it for anything. Any earlier, that would
import parts of transformers while transformers itself is half imported.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from ._after_import import after_import
from ._log import log_once

_AUTO_MODULE = "transformers.models.auto.configuration_auto"
_FAILURE = "the models of twell.hf are not registered with transformers"
_CONFIGS = {"llama_sparse_relu": "SparseLlamaConfig", "qwen2_sparse_relu": "SparseQwen2Config"}


def install() -> None:
    """Register the model types now, or as soon as transformers' auto module is loaded; may run twice."""
    auto_module = sys.modules.get(_AUTO_MODULE)
    if auto_module is not None and hasattr(auto_module, "CONFIG_MAPPING"):
        _register(auto_module)
    else:
        after_import(_AUTO_MODULE, _register, _FAILURE)


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
        log_once(f"{_FAILURE}: {error!r}")
