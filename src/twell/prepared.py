"""Calls that repeat what was decided before: with few tokens, deciding costs more than computing.

Everything here is counted in microseconds of the host, before every call. A prepared call computes what the
call that was decided about computed, with the same operations on operands of the same shapes. It holds no
tensor: a layer's state must not keep its weights alive.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._ran import note_path
from .activations import Activation
from .backends import Repeat, registry_version
from .kernels.args import Decision, FfnArgs
from .kernels.dense import dense_forward, products_for
from .layer_state import LayerState
from .plan import ENVIRONMENT_VARIABLE, Plan, is_automatic
from .saving import wants_the_same_again

Tensors = tuple[Tensor | None, ...]  # x, up, down, gate, up_bias, down_bias, gate_bias

_override = os.environ.get  # a microsecond; looking the method up is a tenth of one


class Prepared:
    """So many more calls like one that was decided."""

    __slots__ = (
        "_activation",
        "_calls",
        "_device_type",
        "_hooked",
        "_kind",
        "_left",
        "_outcome",
        "_override",
        "_plan",
        "_reading",
        "_reason",
        "_registry",
        "_spec",
        "_threads",
        "_training",
    )

    def __init__(
        self, tensors: Tensors, activation: Activation, plan: Plan | None, decision: Decision
    ) -> None:
        self._kind, self._device_type = self._kind_of(tensors), tensors[0].device.type
        self._activation, self._spec, self._plan = activation, activation.spec, plan
        self._calls = self._left = decision.ahead
        self._reading, self._reason = decision.reading, decision.reason
        self._outcome = decision.layer.ran["forward"]
        self._override, self._registry = _override(ENVIRONMENT_VARIABLE), registry_version()
        self._threads = torch.get_num_threads()
        self._training, self._hooked = is_trained(tensors), wants_the_same_again()

    def run(
        self, tensors: Tensors, activation: str | Activation, plan: Plan | None, layer: LayerState
    ) -> Tensor | None:
        """y [..., D] if this call is like the one that was decided, else None.

        That one passed every check with operands of the same kind, so none is repeated.
        """
        if self._left <= 0 or not self._holds(tensors, activation, plan):
            return None
        y = self._compute(tensors)
        if y is None:
            return None
        self._left -= 1
        if self._left <= 0:
            self.settle()
        layer.ran["forward"] = self._outcome
        return y

    def settle(self) -> None:
        """Tell the reading how many calls were made; none is left."""
        if self._reading is not None and self._calls:
            self._reading.count(self._calls - max(self._left, 0))
        self._calls = self._left = 0

    def _compute(self, tensors: Tensors) -> Tensor | None:
        raise NotImplementedError

    def _holds(self, tensors: Tensors, activation: str | Activation, plan: Plan | None) -> bool:
        return (
            not torch._C._are_functorch_transforms_active()
            and forward_ad._current_level < 0
            and plan is self._plan
            and (activation is self._activation or activation == self._spec or activation == self._activation)
            and _override(ENVIRONMENT_VARIABLE) == self._override
            and torch.get_num_threads() == self._threads
            and registry_version() == self._registry
            and self._kind_of(tensors) == self._kind
            and self._gradients_as_before(tensors)
            and torch._C._len_torch_dispatch_stack() == 0
            and not torch.is_autocast_enabled(self._device_type)
            and not (self._device_type == "cuda" and torch.cuda.is_current_stream_capturing())
        )

    def _gradients_as_before(self, tensors: Tensors) -> bool:
        """Recorded for a backward, a block follows other rules."""
        if not torch.is_grad_enabled():
            return not self._training
        return is_trained(tensors) == self._training and wants_the_same_again() == self._hooked

    @staticmethod
    def _kind_of(tensors: Tensors) -> list:
        """Of every operand in turn, what makes the call as valid as the one that was checked."""
        return [None if t is None else (type(t), t.shape, t.dtype, t.device, t.layout) for t in tensors]


class PreparedDense(Prepared):
    """Calls that run dense, as PyTorch computes them."""

    __slots__ = ("_products", "_tuned")

    def __init__(
        self, tensors: Tensors, activation: Activation, plan: Plan | None, decision: Decision
    ) -> None:
        super().__init__(tensors, activation, plan, decision)
        self._tuned = is_automatic(plan)
        # None where more than values may matter.
        args = FfnArgs(*tensors, activation)
        self._products = None if self._training else products_for(args, self._tuned)

    def _compute(self, tensors: Tensors) -> Tensor:
        x = tensors[0]
        if self._products is not None and x.dim() > 1 and x.is_contiguous():
            return self._values(*tensors)
        args = FfnArgs(*tensors, self._activation)
        if x.dim() == 2:
            return dense_forward(args, False, self._tuned, self._reason).y
        args = args._replace(x=x.reshape(-1, x.shape[-1]))
        y = dense_forward(args, False, self._tuned, self._reason).y
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))

    def _values(self, x, up, down, gate, up_bias, down_bias, gate_bias) -> Tensor:
        """The block from as few operations as it takes; nobody differentiates it or looks."""
        note_path("dense", x, up.shape[0], reason=self._reason)
        select, lift, lower = self._products
        if gate is None:
            hidden = self._activation.apply_(lift(x, up, up_bias))
        else:
            hidden = self._activation.apply_(select(x, gate, gate_bias))
            hidden.mul_(lift(x, up, up_bias))
        return lower(hidden, down, down_bias)


class PreparedSparse(Prepared):
    """Calls that launch what was launched before."""

    __slots__ = ("_repeat",)

    def __init__(
        self,
        tensors: Tensors,
        activation: Activation,
        plan: Plan | None,
        decision: Decision,
        repeat: Repeat,
    ) -> None:
        super().__init__(tensors, activation, plan, decision)
        self._repeat = repeat

    def _compute(self, tensors: Tensors) -> Tensor | None:
        y = self._repeat(*tensors)
        if y is not None:
            note_path(self._repeat.path, tensors[0], tensors[1].shape[0], reason=self._reason)
        return y

    @staticmethod
    def _kind_of(tensors: Tensors) -> list:
        """The kernels were compiled for these strides, too. (Layouts that have none are none of them.)"""
        return [
            None if t is None else (type(t), t.shape, t.dtype, t.device, t.layout is _STRIDED and t.stride())
            for t in tensors
        ]


_STRIDED = torch.strided


def is_trained(tensors: Tensors) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
