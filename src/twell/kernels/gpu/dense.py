"""Hidden values of the dense path in one kernel, where PyTorch takes two or three and passes over them as
often: at 8,192 tokens of D 2048, H 5632 that is a twentieth of the block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...activations import Activation, largest_at_most
from .launch import launch
from .sizes import cdiv
from .triton.hidden import hidden_values

_SPAN = 4096  # numbers of one program
_LARGE = 2**31  # from here on their number is another type of argument


def fused_hidden(
    activation: Activation, dtype: torch.dtype, gated: bool
) -> Callable[[Tensor, Tensor | None], Tensor] | None:
    """(pre [..., H], up [..., H] or None) -> hidden values, in the memory of pre; both contiguous, on the
    current device. None where one operation of PyTorch does the same, or the kernel is not made for it."""
    square = activation.name == "relu2"
    if dtype.itemsize != 2 or not (gated or square):
        return None
    threshold = largest_at_most(activation.threshold, dtype)
    constants = {"GATED": gated, "SQUARE": square, "CLAMP_UP": activation.clamps_up, "SPAN": _SPAN}

    def hidden(pre: Tensor, up: Tensor | None) -> Tensor:
        size = pre.numel()
        if size:
            arguments = pre, pre if up is None else up, size, threshold
            kind = dtype, gated, square, activation.clamps_up, size < _LARGE
            launch(kind, hidden_values, (cdiv(size, _SPAN),), arguments, constants, num_warps=4)
        return pre

    return hidden
