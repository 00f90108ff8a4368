"""One walk through a model for every request: whether anything hinders captured steps, and whether earlier
ones still read the memory and run the code that the model has now."""

from __future__ import annotations

import os
import types
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..activations import Activation
from ..plan import ENVIRONMENT_VARIABLE, Plan

# Without None: what is None before a first forward and something of ours afterwards is no setting.
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, partial)
_SETTINGS = (bool, int, float, str, tuple, torch.dtype, Plan, Activation, *_FUNCTIONS)


class Snapshot(NamedTuple):
    """modules, and their own parameters and buffers, all as `nn.Module` lists them, with repetitions."""

    modules: list[nn.Module]
    parameters: list[Tensor]
    buffers: list[Tensor]

    def why_not(self) -> str | None:
        """What a captured step would not do as these modules do it."""
        reasons = (
            (any(map(_drops, self.modules)), "a module in training mode"),
            (_hooked(self.modules), "hooks on modules"),
            (any(hasattr(kind, "adapter_layer_names") for kind in set(map(type, self.modules))), "adapters"),
            (len({p.device for p in self.parameters}) > 1, "a model on several devices"),
            (any("forward" in vars(m) for m in self.modules), "a module whose forward was replaced"),
            (any(type(p) is not nn.Parameter for p in self.parameters), "parameters of another kind"),
            (any(map(_turns_by_length, self.modules)), "rotary embeddings that depend on the length"),
        )
        return next((reason for wrong, reason in reasons if wrong), None)

    def fingerprint(self, *configured: str | int | None) -> int:
        """Changes where a captured step would read other memory than the model, or run other code.

        configured: what the model's forward asks its config for.
        """
        tensors = (*self.parameters, *self.buffers)
        parts: list[Any] = [(t.data_ptr(), t.dtype, t.shape) for t in tensors]
        for module in self.modules:
            values = vars(module).items()
            settings = tuple([(name, value) for name, value in values if type(value) in _SETTINGS])
            # Tensors that are neither parameters nor buffers are read where they lie, too.
            parts += [(name, t.data_ptr(), t.dtype, t.shape) for name, t in values if type(t) is Tensor]
            parts.append((type(module), id(module), _hash(settings)))
        around = torch.get_float32_matmul_precision(), os.environ.get(ENVIRONMENT_VARIABLE)
        return hash((*parts, *around, *configured))


def snapshot_of(model: nn.Module) -> Snapshot:
    modules = list(model.modules())
    parameters = [p for module in modules for p in module._parameters.values() if p is not None]
    buffers = [b for module in modules for b in module._buffers.values() if b is not None]
    return Snapshot(modules, parameters, buffers)


def _hash(settings: tuple) -> int:
    try:
        return hash(settings)
    except TypeError:  # a tuple of lists, say
        return hash(str(settings))


def _drops(module: nn.Module) -> bool:
    """Whether it drops values at random. (Embeddings that were resized are left in training mode.)"""
    return module.training and bool(getattr(module, "p", 0) or getattr(module, "attention_dropout", 0))


def _hooked(modules: list[nn.Module]) -> bool:
    """Whether somebody hooks into a forward: a graph would not call them. Hooks of transformers itself, which
    it leaves behind after a call that asked for hidden states, do nothing unasked."""
    everywhere = nn.modules.module
    hooks = [*everywhere._global_forward_hooks.values(), *everywhere._global_forward_pre_hooks.values()]
    for module in modules:
        if module._forward_hooks or module._forward_pre_hooks:
            hooks += [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(not str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks)


def _turns_by_length(module: nn.Module) -> bool:
    """Whether its rotary embeddings are made anew, and the device waited for, when a text gets longer."""
    kinds = vars(module).get("rope_type", "")  # asking the module itself is slow where it has none
    kinds = kinds.values() if isinstance(kinds, dict) else (kinds,)
    return any("dynamic" in str(kind) or kind == "longrope" for kind in kinds)
