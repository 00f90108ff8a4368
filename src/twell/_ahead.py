"""Calls that a backend has left to dense PyTorch ahead of time: asking it takes longer than few tokens do.

Everything here is counted in microseconds of the host, before every call. A granted call computes what the
call that was asked about computed, with the same operations on operands of the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

import torch
from torch import Tensor

from .activations import Activation
from .kernels.args import FfnArgs
from .kernels.dense import dense_forward
from .plan import Plan, is_automatic, resolution_state

Tensors = tuple[Tensor | None, ...]  # x, up, down, gate, up_bias, down_bias, gate_bias

_MOST = 4096


class _Grant:
    """`left` more calls like one that was asked about; `settle` is told how many were made of it."""

    __slots__ = (
        "activation",
        "calls",
        "hooked",
        "kind",
        "left",
        "place",
        "plan",
        "settle",
        "spec",
        "state",
        "training",
        "tuned",
        "up",
    )

    def __init__(
        self,
        tensors: Tensors,
        activation: Activation,
        plan: Plan | None,
        calls: int,
        settle: Callable[[int], None],
    ) -> None:
        # Another tensor may get the identity of one that is gone, and its address.
        self.kind, self.up, self.place = _kind(tensors), ref(tensors[1]), tensors[1].data_ptr()
        self.activation, self.spec, self.plan = activation, activation.spec, plan
        self.calls = self.left = calls
        self.settle = settle
        self.state, self.tuned = resolution_state(), is_automatic(plan)
        self.training, self.hooked = _training(tensors), saving_is_watched()

    def holds(self, tensors: Tensors, activation: str | Activation, plan: Plan | None) -> bool:
        x = tensors[0]
        return (
            type(x) is Tensor
            and not torch._C._are_functorch_transforms_active()  # wrapped tensors have no address
            and plan is self.plan
            and (activation is self.activation or activation == self.spec or activation == self.activation)
            and tensors[1] is self.up()
            and _kind(tensors) == self.kind
            and tensors[1].data_ptr() == self.place
            and resolution_state() == self.state
            # Recorded for a backward, a block follows other rules.
            and _training(tensors) == self.training
            and saving_is_watched() == self.hooked
            and not torch.is_autocast_enabled(x.device.type)
            and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
        )


_grants: dict[tuple[int, torch.Size], _Grant] = {}  # by the identity of `up` and the shape of x


def grant_dense(
    tensors: Tensors,
    activation: Activation,
    plan: Plan | None,
    calls: int,
    settle: Callable[[int], None],
) -> None:
    """The next `calls` calls like this one may run dense without the backend being asked."""
    key = id(tensors[1]), tensors[0].shape
    if key in _grants:
        _end(key)
    elif len(_grants) >= _MOST:
        for other in list(_grants):
            _end(other)
    _grants[key] = _Grant(tensors, activation, plan, calls, settle)


def granted_dense(tensors: Tensors, activation: str | Activation, plan: Plan | None) -> Tensor | None:
    """y [..., D] as dense PyTorch computes it if this call is one of those granted, else None.

    The call before it passed every check with operands of the same kind, so none is repeated.
    """
    x = tensors[0]
    key = id(tensors[1]), getattr(x, "shape", None)
    grant = _grants.get(key)
    if grant is None or grant.left <= 0:
        return None
    try:
        if not grant.holds(tensors, activation, plan):
            return None
    except AttributeError:  # something that is not a tensor: `ffn` says which
        return None
    grant.left -= 1
    if grant.left <= 0:
        _end(key)
    if x.dim() > 1 and not grant.training and x.is_contiguous():
        # As it is: flattening x and shaping y would take as long as a product with few tokens.
        return dense_forward(FfnArgs(x, *tensors[1:], grant.activation), record=False, tuned=grant.tuned).y
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    y = dense_forward(FfnArgs(flat, *tensors[1:], grant.activation), record=False, tuned=grant.tuned).y
    return y if x.dim() == 2 else torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))


def _end(key: tuple[int, torch.Size]) -> None:
    grant = _grants.pop(key, None)
    if grant is not None:
        grant.settle(grant.calls - max(grant.left, 0))


def _kind(tensors: Tensors) -> list:
    """Of every operand in turn, what makes the call as valid as the one that was checked."""
    kind = []
    for tensor in tensors:
        kind += (None,) if tensor is None else (tensor.shape, tensor.dtype, tensor.device, tensor.layout)
    return kind


def saving_is_watched() -> bool:
    """Whether hooks watch what is saved for the backward: those of checkpoints, or of offloading."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _training(tensors: Tensors) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
