"""`torch.ops.twell.ffn`: the registered op that every sparse backend runs behind.

The op takes tokens flattened to [M, D] and a resolved plan; `twell.functional` is the public face.
With `record` it also returns the L1 value and per-neuron firing counts, else empty tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .activations import Activation
from .backends import get_backend
from .kernels.args import FfnArgs
from .kernels.dense import dense_backward

_library = torch.library.Library("twell", "DEF")
_library.define(
    "ffn(Tensor x, Tensor up, Tensor down, Tensor? gate, Tensor? up_bias, Tensor? down_bias, "
    "Tensor? gate_bias, str activation, str path, int block_rows, str backend, bool record) "
    "-> (Tensor, Tensor, Tensor)"
)


def _forward(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    gate: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    gate_bias: Tensor | None,
    activation: str,
    path: str,
    block_rows: int,
    backend: str,
    record: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    act = Activation.parse(activation)
    args = FfnArgs(x, up, down, gate, up_bias, down_bias, gate_bias, act)
    y, l1, firing = get_backend(backend).forward(args, path, block_rows, record)
    if record:
        return y, l1, firing
    return y, *_no_statistics(x)


def _fake(x: Tensor, up: Tensor, down: Tensor, *rest) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty(x.shape[0], down.shape[0])
    record = rest[-1]
    if not record:
        return y, *_no_statistics(x)
    l1 = x.new_empty((), dtype=_statistics_dtype(x))
    return y, l1, x.new_empty(up.shape[0], dtype=torch.int64)


def _no_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(0, dtype=_statistics_dtype(x)), x.new_empty(0, dtype=torch.int64)


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _setup_context(ctx, inputs, output) -> None:
    *tensors, activation, _path, _block_rows, backend, record = inputs
    ctx.save_for_backward(*tensors)
    ctx.activation, ctx.backend, ctx.record = activation, backend, record
    ctx.mark_non_differentiable(output[2])


def _backward(ctx, grad_y: Tensor, grad_l1: Tensor, grad_firing) -> tuple[Tensor | None, ...]:
    args = FfnArgs(*ctx.saved_tensors, Activation.parse(ctx.activation))
    needed = FfnArgs(*ctx.needs_input_grad[: len(args) - 1], args.activation)
    backward = get_backend(ctx.backend).backward or dense_backward
    gradients = backward(args, grad_y, grad_l1 if ctx.record else None, needed)
    return (*gradients, None, None, None, None, None)


_library.impl("ffn", _forward, "CompositeExplicitAutograd")
torch.library.register_fake("twell::ffn", _fake, lib=_library)
torch.library.register_autograd("twell::ffn", _backward, setup_context=_setup_context, lib=_library)

ffn_op = torch.ops.twell.ffn.default
