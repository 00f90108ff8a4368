"""Hidden values of the dense path in one kernel, where PyTorch takes two or three and passes over them as
often: at 8,192 tokens of D 2048, H 5632 that is a twentieth of the block."""

from __future__ import annotations

import torch
from torch import Tensor

from ...activations import Activation, largest_at_most
from .launch import launch
from .sizes import cdiv
from .triton.hidden import hidden_values

_SPAN = 4096  # numbers of one program
_LARGE = 2**31  # from here on their number is another type of argument


class FusedHidden:
    """(pre [..., H], up [..., H] or None) -> hidden values, in the memory of pre; both contiguous, on the
    current device."""

    def __init__(self, activation: Activation, dtype: torch.dtype, gated: bool) -> None:
        square = activation.name == "relu2"
        self._threshold = largest_at_most(activation.threshold, dtype)
        self._constants = {
            "GATED": gated,
            "SQUARE": square,
            "CLAMP_UP": activation.clamps_up,
            "SPAN": _SPAN,
        }
        self._kind = dtype, gated, square, activation.clamps_up

    def __call__(self, pre: Tensor, up: Tensor | None) -> Tensor:
        size = pre.numel()
        if size:
            arguments = pre, pre if up is None else up, size, self._threshold
            kind = self._kind_of(size)
            launch(kind, hidden_values, (cdiv(size, _SPAN),), arguments, self._constants, num_warps=4)
            _launched.add((kind, pre.device))
        return pre

    def is_loaded(self, size: int, device: torch.device) -> bool:
        """Whether the kernel for so many values was launched before: a capture must not load one."""
        return (self._kind_of(size), device) in _launched

    def _kind_of(self, size: int) -> tuple:
        return *self._kind, size < _LARGE


_launched: set[tuple] = set()


def fused_hidden(activation: Activation, dtype: torch.dtype, gated: bool) -> FusedHidden | None:
    """None where one operation of PyTorch does the same, or the kernel is not made for it."""
    if dtype.itemsize != 2 or not (gated or activation.name == "relu2"):
        return None
    return FusedHidden(activation, dtype, gated)
