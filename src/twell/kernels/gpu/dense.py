"""What lies between the products of the dense path in one kernel, where PyTorch takes two or three, and
passes over the hidden values as often: at 8,192 tokens of D 2048, H 5632 that is a twentieth of the block.
With statistics, in training, it takes nine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...activations import Activation, largest_at_most
from ..dense import HiddenGradients, HiddenValues
from .launch import launch
from .operands import readable
from .sizes import cdiv
from .triton.hidden import hidden_gradients, hidden_values, hidden_with_statistics

_SPAN = 4096  # numbers of one program
_LARGE = 2**31  # from here on their number is another type of argument
_TILE = {"ROWS": 16, "STEPS": 8, "COLUMNS": 128}  # of a program with statistics


class FusedHidden:
    """(pre [..., H], up [..., H] or None) -> hidden values, in the memory of pre; both contiguous, on the
    current device."""

    def __init__(self, activation: Activation, dtype: torch.dtype, gated: bool) -> None:
        self._threshold = largest_at_most(activation.threshold, dtype)
        self._constants = {**_constants_of(activation, gated), "SPAN": _SPAN}
        self._kind = dtype, *self._constants.values()

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


def _constants_of(activation: Activation, gated: bool) -> dict[str, bool]:
    return {"GATED": gated, "SQUARE": activation.name == "relu2", "CLAMP_UP": activation.clamps_up}


class FusedStep:
    """`hidden_forward` and `hidden_backward` of `kernels.dense`, on tensors [M, H] of the current device."""

    def __init__(self, activation: Activation, dtype: torch.dtype, gated: bool) -> None:
        self.activation = activation
        self._threshold = largest_at_most(activation.threshold, dtype)
        self._constants = _constants_of(activation, gated)
        self._kind = dtype, *self._constants.values()

    def forward(self, pre: Tensor, up: Tensor | None, record: bool) -> HiddenValues:
        pre, up = readable(pre), readable(up)
        hidden = torch.empty_like(pre)
        tokens, neurons = pre.shape
        across, along = cdiv(neurons, _TILE["COLUMNS"]), cdiv(tokens, _TILE["ROWS"] * _TILE["STEPS"])
        firing = pre.new_empty((along, neurons), dtype=torch.int32)
        sums = pre.new_empty(along * across, dtype=torch.float32)
        if pre.numel():
            arguments = pre, pre if up is None else up, hidden, firing, sums, tokens, neurons, self._threshold
            constants = {**self._constants, **_TILE}
            kind = self._forward_kind(neurons)
            launch(kind, hidden_with_statistics, (across, along), arguments, constants, num_warps=4)
            _launched.add((kind, pre.device))
        if not record:
            return HiddenValues(hidden)
        l1 = (sums.sum(dtype=torch.float64) / max(tokens, 1)).float()
        return HiddenValues(hidden, l1, firing.sum(0, dtype=torch.int64))

    def backward(
        self,
        pre: Tensor,
        up: Tensor | None,
        grad_hidden: Tensor | None,
        grad_l1: Tensor | None,
        again: bool = True,
    ) -> HiddenGradients:
        """again: whether to compute the hidden values again, too."""
        pre, up, grad_hidden = readable(pre), readable(up), readable(grad_hidden)
        grad_pre = torch.empty_like(pre)
        grad_up = None if up is None else torch.empty_like(pre)
        hidden = torch.empty_like(pre) if again else None
        size = pre.numel()
        if size:
            arguments = [grad_hidden, grad_l1, pre, up, grad_pre, grad_up, hidden]
            constants = {
                **self._constants,
                "FROM_Y": grad_hidden is not None,
                "FROM_L1": grad_l1 is not None,
                "HIDDEN": again,
                "SPAN": _SPAN,
            }
            l1_type = None if grad_l1 is None else (grad_l1.dtype, grad_l1.data_ptr() % 16 == 0)
            kind = *self._kind, *constants.values(), l1_type, size < _LARGE
            launch(
                kind,
                hidden_gradients,
                (cdiv(size, _SPAN),),
                (*(pre if one is None else one for one in arguments), size, pre.shape[0], self._threshold),
                constants,
                num_warps=4,
            )
        return HiddenGradients(grad_pre, grad_up, hidden)

    def is_loaded(self, neurons: int, device: torch.device) -> bool:
        """Whether a step of so many neurons has run before."""
        return (self._forward_kind(neurons), device) in _launched

    def _forward_kind(self, neurons: int) -> tuple:
        return *self._kind, neurons, "statistics"


def fused_hidden(activation: Activation, dtype: torch.dtype, gated: bool) -> FusedHidden | None:
    """None where one operation of PyTorch does the same, or the kernel is not made for it."""
    if dtype.itemsize != 2 or not (gated or activation.name == "relu2"):
        return None
    return FusedHidden(activation, dtype, gated)
