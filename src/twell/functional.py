"""`twell.ffn`: the feed-forward block as one function, with or without activation statistics."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._errors import FLOAT_DTYPES, reject
from ._log import log_once
from ._observers import must_save_the_same
from .activations import Activation
from .backends import get_backend
from .kernels.dense import dense_forward
from .layer_state import LayerState, layer_of
from .ops import ffn_op, tell_flop_counters, train_op
from .plan import Plan, is_automatic, resolution_state
from .policy import Resolution, decide, resolve_cached, resolve_observed
from .prepared import (
    Decided,
    PreparedDense,
    PreparedSparse,
    bucket_of,
    call_mode,
    captured_dense,
    is_capturing,
)
from .problem import (
    PLAIN,
    FfnArgs,
    FfnOutput,
    Tensors,
    are_plain,
    cast_of,
    flattened,
    is_trained,
    unflattened,
)
from .training_step import PreparedStep, run_training_step

_TRANSFORMED = "inside a torch.func transform or forward-mode differentiation"


class FfnStats(NamedTuple):
    """Activation statistics of one call.

    l1:      []        mean over tokens of sum |hidden|; differentiable.
    l0:      []        mean number of active neurons per token.
    firing:  int64 [H] for how many tokens each neuron was active.
    """

    l1: Tensor
    l0: Tensor
    firing: Tensor


def ffn(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    gate: Tensor | None = None,
    *,
    activation: str | Activation = "relu",
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_bias: Tensor | None = None,
    plan: Plan | None = None,
) -> Tensor:
    """A feed-forward block that skips inactive neurons.

    gated:      y = (act(x gate^T + gate_bias) * (x up^T + up_bias)) down^T + down_bias
    drelu:      y = (relu(x gate^T + gate_bias) * relu(x up^T + up_bias)) down^T + down_bias
    non-gated:  y = act(x up^T + up_bias) down^T + down_bias

    x:           [..., D] float32, float64, bfloat16 or float16, any strides.
    up, gate:    [H, D], as `nn.Linear` stores them, in x's dtype and on x's device.
    down:        [D_out, H]; fastest when each neuron's weights lie together (`down.mT` contiguous).
    activation:  "relu", "relu2", "fatrelu(THRESHOLD)", "drelu" (gated only) or a `twell.Activation`.
    plan:        how to run it; None decides by itself. See `twell.Plan`.
    Returns [..., D_out]. Differentiable. Under autocast, float tensors are cast as for `linear`.

    The gate, if there is one, decides which neurons are active; a NaN pre-activation counts as active. A NaN
    or Inf in an operand reaches the output if it meets an active neuron; if it meets inactive ones only,
    sparse paths may skip it where dense gives NaN.
    No host synchronisation on accelerators.
    """
    tensors = (x, up, down, gate, up_bias, down_bias, gate_bias)
    return run_ffn(tensors, activation, plan, record=False).y


def ffn_with_stats(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    gate: Tensor | None = None,
    *,
    activation: str | Activation = "relu",
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_bias: Tensor | None = None,
    plan: Plan | None = None,
) -> tuple[Tensor, FfnStats]:
    """`ffn`, and the call's L1, L0 and firing counts, gathered in the same pass."""
    tensors = (x, up, down, gate, up_bias, down_bias, gate_bias)
    return stats_of(run_ffn(tensors, activation, plan, record=True), x)


def stats_of(output: FfnOutput, x: Tensor) -> tuple[Tensor, FfnStats]:
    """y and statistics of a recorded call on x."""
    tokens = max(x.numel() // max(x.shape[-1], 1), 1)
    l0 = output.firing.sum().to(output.l1.dtype) / tokens
    return output.y, FfnStats(l1=output.l1, l0=l0, firing=output.firing)


def run_ffn(
    tensors: Tensors,
    activation: str | Activation,
    plan: Plan | None,
    record: bool,
    compile_dense: bool = False,
    layer: LayerState | None = None,
    train_dense: bool = True,
) -> FfnOutput | None:
    """`ffn` on (x, up, down, gate, up_bias, down_bias, gate_bias), with all that is known of the call.

    compile_dense: for a call from between compiled graphs: should it turn out dense, it is compiled as well.
    layer: what is known of it; None: found by its weights.
    train_dense: False for a caller that has a better dense step: one that is decided dense gives None.
    """
    if not torch.compiler.is_compiling():
        if layer is None:
            layer = _layer_of(tensors)
        if layer is not None and not compile_dense:
            output = _repeated(tensors, activation, plan, record, layer)
            if output is not None:
                return output
    act = Activation.parse(activation)
    if plan is not None and not isinstance(plan, Plan):
        reject("plan", f"a {type(plan).__name__}", "a twell.Plan or None")
    x = tensors[0]
    if not isinstance(x, Tensor):
        reject("x", f"a {type(x).__name__}", "a floating-point torch.Tensor [..., D]")
    device_type = x.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        tensors = tuple(_autocast(tensor, dtype) for tensor in tensors)
        with torch.autocast(device_type, enabled=False):
            return _run(tensors, act, plan, record, compile_dense, layer, False, train_dense)
    return _run(tensors, act, plan, record, compile_dense, layer, not compile_dense, train_dense)


def _layer_of(tensors: Tensors) -> LayerState | None:
    """What is known of a bare call's layer; None where its weights are no plain tensors."""
    _x, up, _down, gate, *_ = tensors
    selector = up if gate is None else gate
    if type(selector) in PLAIN and not torch._C._are_functorch_transforms_active():
        return layer_of(selector)
    return None


def _repeated(
    tensors: Tensors, activation: str | Activation, plan: Plan | None, record: bool, layer: LayerState
) -> FfnOutput | None:
    """The output, if this call repeats one that was decided before, else None."""
    x, output = tensors[0], None
    if not isinstance(x, Tensor):  # the checks say so
        return None
    mode = call_mode(record)
    prepared = layer.prepared.get((x.shape, mode) if mode else x.shape)
    if prepared is not None:
        output = prepared.run(tensors, activation, plan, layer)
    if output is None and layer.buckets and not record:
        prepared = layer.buckets.get((bucket_of(x), mode))
        if prepared is not None:
            output = prepared.run(tensors, activation, plan, layer)
    return output


def _run(
    tensors: Tensors,
    activation: Activation,
    plan: Plan | None,
    record: bool,
    compile_dense: bool,
    layer: LayerState | None,
    lasting: bool,
    train_dense: bool,
) -> FfnOutput | None:
    """Check, decide, run. lasting: whether later calls may repeat this one: its operands are no casts."""
    x, up, _down, gate, *_ = tensors
    _validate(*tensors)
    activation.check_gated(gate is not None)
    training = is_trained(tensors)
    args = FfnArgs(flattened(x), *tensors[1:], activation)
    if _transformed():
        if layer is not None:
            layer.note("forward", "dense", _TRANSFORMED)
        return _shaped(dense_forward(args, record, reason=_TRANSFORMED), x)
    resolution = _resolve_constant(
        None if plan is None else plan.spec,
        x.device.type,
        x.dtype,
        _power_of_tokens(x),
        # index() makes a compiler specialise on the weights' sizes; tokens stay dynamic.
        index(up.shape[1]),
        index(up.shape[0]),
        gate is not None,
        training,
    )
    if _is_observed(tensors):
        tell_flop_counters()
        return _shaped(_run_observed(args, Resolution(*resolution), training, record), x)
    layer = layer or LayerState()
    decision = decide(
        args,
        Resolution(*resolution),
        layer,
        training=training,
        record=record,
        hooked=training and must_save_the_same(),
    )
    if decision.backend == "dense":
        if training and not train_dense:
            return None
        if compile_dense and x.is_cuda:
            output = _compiled_dense()(args, record)
        elif x.is_cuda and not training and not record and is_capturing():
            output = captured_dense(args, is_automatic(plan), decision.reason)
        else:
            output = dense_forward(args, record, is_automatic(plan), decision.reason)
        if decision.ahead and lasting and not record and x.device.type != "meta":
            prepared = PreparedDense(Decided(tensors, activation, plan, decision), is_automatic(plan))
            layer.keep_prepared(x.shape, call_mode(record), prepared)
    elif training:
        output = run_training_step(args, decision, record)
    else:
        output = get_backend(decision.backend).forward(args, decision, record)
    if decision.ahead and lasting and decision.backend != "dense" and x.is_contiguous():
        _keep_repeat(Decided(tensors, activation, plan, decision), args, training, record, layer)
    return _shaped(output, x)


def _keep_repeat(decided: Decided, args: FfnArgs, training: bool, record: bool, layer: LayerState) -> None:
    """For calls like this one, which has just run on a sparse path, with an x that kernels read as it is."""
    x, decision = decided.tensors[0], decided.decision
    backend = get_backend(decision.backend)
    if training:
        repeats = None if backend.training is None else backend.training.repeat
        # A checkpoint wants what this step has saved when it is computed again: no other kind of step.
        repeat = None if repeats is None or must_save_the_same() else repeats(args, decision, record)
        if repeat is not None:
            prepared = PreparedStep(decided, repeat, record)
            layer.keep_prepared(x.shape, call_mode(record), prepared)
    elif backend.repeat is not None and not record:
        repeat = backend.repeat(args, decision, False)
        if repeat is not None:
            prepared = PreparedSparse(decided, repeat)
            layer.keep_prepared(x.shape, call_mode(record), prepared, bucket_of(x))


def _run_observed(args: FfnArgs, resolution: Resolution, training: bool, record: bool) -> FfnOutput:
    """Where something has to see the registered op: a compiler, a dispatch mode, a tensor subclass."""
    path, block_rows, backend, reason = resolve_observed(resolution, training)
    if backend == "dense":
        return dense_forward(args, record, reason=reason)
    op = train_op if training else ffn_op
    y, l1, firing, *_ = op(*args[:-1], args.activation.spec, path, block_rows, backend, record)
    return FfnOutput(y, l1, firing)


@lru_cache(maxsize=1)
def _compiled_dense() -> Callable[[FfnArgs, bool], FfnOutput]:
    """`dense_forward` with its activations fused, by Inductor whatever compiles the rest; for all layers."""
    return torch.compile(dense_forward)


def _is_observed(tensors: Tensors) -> bool:
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.jit.is_tracing()
        or not are_plain(tensors)
    )


def _shaped(output: FfnOutput, x: Tensor) -> FfnOutput:
    return output if x.dim() == 2 else output._replace(y=unflattened(output.y, x))


def _transformed() -> bool:
    """Whether a function transform (jvp, vmap, grad) or forward-mode differentiation is on.

    The registered op has a reverse-mode rule only; behind it a tangent would silently become zero.
    """
    if torch.compiler.is_compiling():
        return torch._C._are_functorch_transforms_active() or _traced_forward_mode()
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        log_once(f"running dense: {_TRANSFORMED}")
        return True
    return False


def _traced_forward_mode() -> bool:
    """Whether the code being traced runs inside a dual level.

    A level that the traced code has entered itself is over when guards are checked, so only the constant sees
    it. Outside of any, reading the level makes it a guard: a later call inside of one compiles again.
    """
    level = forward_ad._current_level  # read in any case, for the guard
    return _in_dual_level() or level >= 0


def _in_dual_level() -> bool:
    return forward_ad._current_level >= 0


def _resolve_constant(*call: str | torch.dtype | int | bool | None) -> tuple[str, int, str, str]:
    """`resolve` on and to plain constants: under torch.compile it runs, and logs, once per trace."""
    return tuple(resolve_cached(resolution_state(), *call))


# What torch.compiler.assume_constant_result sets; calling it would import the compiler (2 s) with twell.
_resolve_constant._dynamo_marked_constant = True
_in_dual_level._dynamo_marked_constant = True


def _power_of_tokens(x: Tensor) -> int | None:
    """The power of two at or above x's tokens; None while tracing, where one graph serves many."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    tokens = x.numel() // max(x.shape[-1], 1)
    return 1 << max(tokens - 1, 0).bit_length()


def _autocast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if tensor is None or not isinstance(tensor, Tensor) or tensor.dtype == torch.float64:
        return tensor
    return cast_of(tensor, dtype) if tensor.is_floating_point() else tensor


def _validate(x, up, down, gate, up_bias, down_bias, gate_bias) -> None:
    if x.dtype not in FLOAT_DTYPES:
        reject("x", f"dtype {x.dtype}", ", ".join(map(str, FLOAT_DTYPES)))
    if x.dim() < 1:
        reject("x", "a 0-D tensor", "shape [..., D]")
    if x.shape[-1] == 0:
        reject("x", f"shape {tuple(x.shape)}", "at least one feature in the last dimension")
    if x.layout != torch.strided:
        reject("x", f"layout {x.layout}", "torch.strided, a dense tensor")
    _check_operand("up", up, x, (None, x.shape[-1]), "[H, D]")
    neurons = up.shape[0]
    _check_operand("down", down, x, (None, neurons), "[D, H]")
    if gate is not None:
        _check_operand("gate", gate, x, (neurons, x.shape[-1]), "[H, D]")
    elif gate_bias is not None:
        reject("gate_bias", "a tensor without a gate", "None for a non-gated block")
    for name, bias, size, layout in (
        ("up_bias", up_bias, neurons, "[H]"),
        ("gate_bias", gate_bias, neurons, "[H]"),
        ("down_bias", down_bias, down.shape[0], "[D]"),
    ):
        if bias is not None:
            _check_operand(name, bias, x, (size,), layout)


def _check_operand(name: str, tensor: Tensor, x: Tensor, shape: tuple[int | None, ...], layout: str) -> None:
    if not isinstance(tensor, Tensor):
        reject(name, f"a {type(tensor).__name__}", f"a torch.Tensor {layout}")
    received = tensor.shape
    rows, columns = (*shape, None)[:2]
    if (
        len(received) != len(shape)
        or (rows is not None and received[0] != rows)
        or (columns is not None and received[1] != columns)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        reject(name, f"shape {tuple(received)}", f"{layout} = ({wanted}) for x {tuple(x.shape)}")
    if tensor.dtype != x.dtype:
        reject(name, f"dtype {tensor.dtype}", f"{x.dtype}, the dtype of x")
    if tensor.layout != torch.strided:
        reject(name, f"layout {tensor.layout}", "torch.strided, a dense tensor")
    if tensor.device != x.device:
        reject(name, f"device {tensor.device}", f"{x.device}, the device of x")
