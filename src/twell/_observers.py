"""Who observes a call: a compiler, a dispatch mode, a function transform, or hooks on what a step saves."""

from __future__ import annotations

import torch

_SAVING_OBSERVERS = {"torch.utils.checkpoint": "checkpoint", "torch.autograd.graph": "offloading"}


def operations_are_observed() -> bool:
    """Whether somebody traces, intercepts or transforms the operations, so that more than values matter."""
    return (
        torch.compiler.is_compiling()  # first: a compiler cannot trace the other two
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )


def saving_observer() -> str | None:
    """Who sees what a step saves for its backward: "checkpoint" (torch's own), "offloading" (to the CPU),
    "unknown", or None."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        return None
    return _SAVING_OBSERVERS.get(getattr(hooks[0], "__module__", None), "unknown")


def must_save_the_same() -> bool:
    """Whether a step that runs again, as in a checkpoint, must save the same tensors again."""
    return saving_observer() not in (None, "offloading")
