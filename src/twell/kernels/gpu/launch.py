"""Kernel launches without Triton's look at every argument: that takes longer than small kernels run.

The first launch of a kind goes through Triton, which compiles and returns the compiled kernel; later ones
call that directly, as Triton itself does in the end.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

try:
    from triton import knobs
    from triton.compiler import CompiledKernel
except ImportError:  # an older Triton: always through its front door
    knobs = CompiledKernel = None

_MOST = 4096
_compiled: dict[Hashable, Any] = {}


def launch(
    kind: Hashable,
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple,
    constants: dict[str, Any],
    **options: int | bool,
) -> None:
    """Launch `kernel` on the current device and stream.

    kind:       everything that decides which compiled kernel it is: two launches of a kernel may share a kind
                only if their arguments agree in types, in integer values and in alignment to 16 bytes, and
                constants and options are the same. The device is added here.
    arguments:  in the order of the kernel's signature, which ends with the constants in their order.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
    key = kernel.__name__, kind, device
    known = _compiled.get(key)
    if known is None or _watched():
        compiled = kernel[grid](*arguments, **constants, **options)
        if CompiledKernel is not None and isinstance(compiled, CompiledKernel):
            if len(_compiled) >= _MOST:
                _compiled.clear()
            _compiled[key] = compiled
        return
    x, y, z = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(device)
    hooks = (None, None, None)
    known.run(x, y, z, stream, known.function, known.packed_metadata, *hooks, *arguments, *constants.values())


def _watched() -> bool:
    """Whether a profiler wants to hear of launches; Triton tells it."""
    runtime = knobs.runtime
    return any(getattr(hook, "calls", hook) for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook))
