"""Prepared calls skip the decision: with few tokens, deciding costs more than computing.

Every microsecond here delays every call. A prepared call runs the operations of the decided call again, on
operands of the same shapes. It holds no tensor: a layer's state must not keep its weights alive.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._log import note_path, paths_are_recorded
from ._observers import must_save_the_same
from .activations import Activation
from .backends import Site, get_backend
from .kernels.dense import dense_forward, in_place, products_for
from .kernels.gpu.sizes import bucket
from .layer_state import LayerState
from .plan import ENVIRONMENT_VARIABLE, Plan
from .problem import (
    Decision,
    FfnArgs,
    FfnOutput,
    Repeat,
    Tensors,
    are_plain,
    flattened,
    is_trained,
    unflattened,
)

if TYPE_CHECKING:
    from .kernels.gpu.dense import FusedHidden

# The dictionary behind `os.environ`, whose `get` takes a microsecond.
_environment = getattr(os.environ, "_data", None) if os.name == "posix" else None
_VARIABLE = os.fsencode(ENVIRONMENT_VARIABLE)
is_capturing = torch._C._cuda_isCurrentStreamCapturing if torch.backends.cuda.is_built() else bool  # no


def _override() -> object:
    """The environment variable's raw value."""
    return os.environ.get(ENVIRONMENT_VARIABLE) if _environment is None else _environment.get(_VARIABLE)


IN_GRAPH = 8  # the mode of a registered op, besides those of `call_mode`


def call_mode(record: bool) -> int:
    """Tells calls of one shape apart; 0 without gradients, statistics or inference mode. A model may be
    called both ways by turns."""
    return torch.is_grad_enabled() + 2 * torch.is_inference_mode_enabled() + 4 * record


class Kinds:
    """Checks that operands equal the decided call's in type, dtype, device, shape, strides and
    `requires_grad`, or are None as they were.

    any_strides: whether the first may have other strides.
    """

    def __init__(self, tensors: Tensors, any_strides: bool = False) -> None:
        self._types, self._any_strides = [type(t) for t in tensors], any_strides
        self._kinds = self._of(tensors)
        free = "strides" if any_strides else "nothing"
        self._check = _compiled_check([t for t in tensors if t is not None], free)

    def hold(self, tensors: Tensors) -> bool:
        if [type(t) for t in tensors] != self._types:
            return False
        if self._check is not None:
            return self._check(*[t for t in tensors if t is not None])
        return self._of(tensors) == self._kinds

    def _of(self, tensors: Tensors) -> list:
        kinds = [None if t is None else _kind(t) for t in tensors]
        if self._any_strides:
            kinds[0] = *kinds[0][:-1], tensors[0].layout
        return kinds


def _kind(t: Tensor) -> tuple:
    strides = t.layout is _STRIDED and t.stride()
    return type(t), t.dtype, t.device, t.shape, t.requires_grad, t.is_neg(), strides


def _compiled_check(tensors: list[Tensor], free: str) -> Callable[..., bool] | None:
    """The check in C that guards the graphs of torch.compile. It takes a quarter of the time, and also looks
    at dispatch keys, so at autocast and transforms. None where this version of torch has none.

    free: what may differ in the first tensor: "nothing", "strides", or also "leading" sizes.
    """
    try:
        shapes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
        if free != "nothing":
            strides[0] = [None] * len(strides[0])
        if free == "leading":
            shapes[0][:-1] = [None] * (len(shapes[0]) - 1)
        guards = torch._C._dynamo.guards.TensorGuards
        check = guards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
        return check if check(*tensors) else None
    except (AttributeError, TypeError, RuntimeError):
        return None


_STRIDED = torch.strided


class Decided(NamedTuple):
    """A call that has run, and the decision it ran by.

    plan: the very object that later calls bring, whatever it is; a registered op has its arguments for one.
    """

    tensors: Tensors
    activation: Activation
    plan: Plan | tuple | None
    decision: Decision


class Prepared:
    """A number of further calls like one that was decided."""

    def __init__(self, decided: Decided, operands: Kinds) -> None:
        tensors, activation, plan, decision = decided
        self._operands = operands
        self._device_type = tensors[0].device.type
        self._activation, self._spec, self._plan = activation, activation.spec, plan
        self._calls = self._left = decision.ahead
        self._reading, self._reason = decision.reading, decision.reason
        self._version = decision.known[1]
        self._outcome = decision.layer.ran["forward"]
        self._override = _override()
        self._threads = torch.get_num_threads()
        self._training, self._hooked = is_trained(tensors), must_save_the_same()

    def run(
        self, tensors: Tensors, activation: str | Activation, plan: Plan | tuple | None, layer: LayerState
    ) -> FfnOutput | None:
        """The output if this call is like the decided one, else None.

        The decided call passed every check with operands of the same kind, so none is repeated.
        """
        if self._left <= 0 or self._has_news():
            return None
        if not self._holds(tensors, activation, plan):
            return None
        output = self._compute(tensors, layer)
        if output is None:
            return None
        self._left -= 1
        if self._left <= 0:
            self.settle()
        self._note(layer)
        return output

    def _has_news(self) -> bool:
        """Whether more is known of the layer than when this was decided."""
        reading = self._reading
        return reading is not None and (reading.has_news or reading.version != self._version)

    def _note(self, layer: LayerState) -> None:
        layer.ran["forward"] = self._outcome
        if len(layer.ran) > 1:
            layer.ran.pop("backward", None)  # an earlier step's

    def settle(self) -> None:
        """Tell the reading how many calls were made, and make no more."""
        if self._reading is not None and self._calls:
            self._reading.count(self._calls - max(self._left, 0))
        self._calls = self._left = 0

    def _compute(self, tensors: Tensors, layer: LayerState) -> FfnOutput | None:
        raise NotImplementedError

    def _holds(self, tensors: Tensors, activation: str | Activation, plan: Plan | tuple | None) -> bool:
        return (
            not torch._C._are_functorch_transforms_active()
            and forward_ad._current_level < 0
            and plan is self._plan
            and (activation is self._activation or activation == self._spec or activation == self._activation)
            and _override() == self._override
            and torch.get_num_threads() == self._threads
            and self._are_of_their_kinds(tensors)
            and self._gradients_as_before(tensors)
            and torch._C._len_torch_dispatch_stack() == 0
            and not torch.is_autocast_enabled(self._device_type)
            and not (self._device_type == "cuda" and is_capturing())
        )

    def _gradients_as_before(self, tensors: Tensors) -> bool:
        """Whether autograd records as before: a recorded block follows other rules."""
        if not torch.is_grad_enabled():
            return not self._training
        return is_trained(tensors) == self._training and must_save_the_same() == self._hooked

    def _are_of_their_kinds(self, tensors: Tensors) -> bool:
        """Whether the call is as valid as the one that was checked."""
        return self._operands.hold(tensors)


class PreparedDense(Prepared):
    """Calls that run dense, as PyTorch computes them; tuned: see `dense_forward`."""

    def __init__(self, decided: Decided, tuned: bool) -> None:
        super().__init__(decided, Kinds(decided.tensors, any_strides=True))
        self._tuned = tuned
        # None where more than values may matter.
        args = FfnArgs(*decided.tensors, decided.activation)
        only_values = not self._training and are_plain(decided.tensors)
        self._products = products_for(args, self._tuned) if only_values else None
        self._fused = _fused(args) if only_values else None

    def _compute(self, tensors: Tensors, layer: LayerState) -> FfnOutput:
        x = tensors[0]
        if self._products is not None and x.dim() > 1 and x.is_contiguous():
            note_path("dense", x, tensors[1].shape[0], reason=self._reason)
            fused = self._fused
            if fused is not None and torch._C._cuda_getDevice() != x.device.index:
                fused = None  # it would be launched elsewhere
            return FfnOutput(in_place(self._products, self._activation, tensors, fused))
        args = FfnArgs(flattened(x), *tensors[1:], self._activation)
        return FfnOutput(unflattened(dense_forward(args, False, self._tuned, self._reason).y, x))


def captured_dense(args: FfnArgs, tuned: bool, reason: str) -> FfnOutput:
    """`dense_forward` while a CUDA graph is captured and only values matter, as `PreparedDense` runs it."""
    fused = _fused(args) if are_plain(args[:-1]) and args.x.is_contiguous() else None
    size, device = args.x.shape[0] * args.up.shape[0], args.x.device
    if fused is None or device.index != torch._C._cuda_getDevice() or not fused.is_loaded(size, device):
        return dense_forward(args, False, tuned, reason)
    note_path("dense", args.x, args.up.shape[0], reason=reason)
    return FfnOutput(in_place(products_for(args, tuned), args.activation, args[:-1], fused))


def _fused(args: FfnArgs) -> FusedHidden | None:
    """What computes hidden values in one kernel on a GPU that has our kernels."""
    x, (neurons, features) = args.x, args.selector.shape
    site = Site(x.device.type, x.dtype, None, features, neurons, args.gate is not None, training=False)
    if not x.is_cuda or get_backend("gpu").refusal(site) is not None:
        return None
    from .kernels.gpu.dense import fused_hidden  # not before: it imports Triton

    return fused_hidden(args.activation, x.dtype, args.gate is not None)


class PreparedSparse(Prepared):
    """Calls that launch what was launched before, for any number of tokens in the same `bucket`."""

    def __init__(self, decided: Decided, repeat: Repeat) -> None:
        tensors = decided.tensors
        super().__init__(decided, Kinds(tensors[1:]))
        self._x, self._repeat = self._kind_of(tensors[0]), repeat
        # For gated blocks without biases, and calls with as many dimensions.
        there = [t is not None for t in tensors]
        self._check = _compiled_check(list(tensors[:4]), "leading") if there == _GATED else None

    def run(
        self, tensors: Tensors, activation: str | Activation, plan: Plan | tuple | None, layer: LayerState
    ) -> FfnOutput | None:
        # Every token waits for this in every layer, so it calls as little as possible.
        reading = self._reading
        if self._left <= 0 or (
            reading is not None and (reading.has_news or reading.version != self._version)
        ):
            return None
        x, up, down, gate, up_bias, down_bias, gate_bias = tensors
        if not (
            self._check is not None
            and up_bias is None
            and down_bias is None
            and gate_bias is None
            and gate is not None
            and self._check(x, up, down, gate)
            and x.is_contiguous()
            and activation is self._activation
            and plan is self._plan
            and not torch.is_grad_enabled()
            and forward_ad._current_level < 0
            and _override() == self._override
            and torch._C._len_torch_dispatch_stack() == 0
            and not (x.is_cuda and is_capturing())
        ) and not self._holds(tensors, activation, plan):
            return None
        y = self._repeat(x, up, down, gate, up_bias, down_bias, gate_bias)
        if y is None:
            return None
        self._left -= 1
        if self._left <= 0:
            self.settle()
        self._note(layer)
        if paths_are_recorded():
            note_path(self._repeat.path, x, up.shape[0], reason=self._reason)
        return FfnOutput(y)

    def _are_of_their_kinds(self, tensors: Tensors) -> bool:
        return self._kind_of(tensors[0]) == self._x and self._operands.hold(tensors[1:])

    @staticmethod
    def _kind_of(x: Tensor) -> tuple:
        plain = x.layout is _STRIDED and x.is_contiguous() and not x.is_neg()  # as kernels read it
        return type(x), x.shape[-1], x.dtype, x.device, plain


_GATED = [True] * 4 + [False] * 3


def bucket_of(x: Tensor) -> tuple[int, int] | None:
    """The `bucket` of x's tokens, x [..., D]; None without any."""
    tokens = x.numel() // max(x.shape[-1], 1) if x.dim() else 0
    return bucket(tokens) if tokens else None
