"""The dense path: plain PyTorch, differentiable, traceable, and the fallback of every other path."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import linear

from .._log import note_path
from .._observers import operations_are_observed
from ..activations import Activation
from ..problem import FfnArgs, FfnOutput, Gradients, Tensors, are_plain
from .cpu.gemm import Form, form_for, reads_badly, sum_all_rows

_SUM_ROWS_TOKENS = 16  # from here on one copy of the weights is faster (7 ms at H 4096, D 1024)


def dense_forward(args: FfnArgs, record: bool, tuned: bool = False, reason: str = "") -> FfnOutput:
    """The block as stock PyTorch runs it; `record` adds the statistics (l1 is differentiable).

    Without `record`, x may be [..., D].
    tuned:   on a CPU, products of few tokens may take the form that is fastest there if only values matter.
    reason:  why it runs dense, for `recorded_paths`.
    """
    note_path("dense", args.x, args.up.shape[0], reason=reason)
    if not record and args.x.device.type == "cpu" and _only_values_matter() and are_plain(args[:-1]):
        return FfnOutput(in_place(products_for(args, tuned), args.activation, args[:-1]))
    return _finish(args, *_projections(args), record)


def dense_forward_keeping(args: FfnArgs, record: bool, reason: str) -> tuple[FfnOutput, DenseActivations]:
    """`dense_forward`, and the activations that `dense_backward` would otherwise compute again."""
    note_path("dense", args.x, args.up.shape[0], reason=reason)
    kept = _projections(args)
    return _finish(args, *kept, record), kept


class DenseActivations(NamedTuple):
    """pre [M, H]: the activation's input; up [M, H], None without a gate."""

    pre: Tensor
    up: Tensor | None


def _projections(args: FfnArgs) -> DenseActivations:
    pre = linear(args.x, args.selector, args.selector_bias)
    return DenseActivations(pre, None if args.gate is None else linear(args.x, args.up, args.up_bias))


def _finish(args: FfnArgs, pre: Tensor, up: Tensor | None, record: bool) -> FfnOutput:
    activated = args.activation(pre)
    hidden = activated if up is None else activated * args.activation.factor(up)
    y = _project_down(hidden, args.down, args.down_bias)
    if not record:
        return FfnOutput(y)
    return FfnOutput(y, *statistics_of(activated, hidden))


def statistics_of(activated: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """l1 [], differentiable, and firing int64 [H], of activations [..., H]."""
    activated, hidden = (t.reshape(-1, t.shape[-1]) for t in (activated.detach(), hidden))
    wide = torch.promote_types(hidden.dtype, torch.float32)
    l1 = hidden.abs().sum(dtype=wide) / max(hidden.shape[0], 1)
    return l1, count_rows(activated != 0).long()


def count_rows(active: Tensor) -> Tensor:
    """int32 [H]: in how many rows of bool [m, H], fewer than 2**31, each column is set."""
    # CPUs count slowly in int64: 2,048 x 4,096 on two Zen 4 cores 24 ms, in int32 6 to 12.
    return active.sum(dim=0, dtype=torch.int32)


def dense_backward(
    args: FfnArgs,
    grad_y: Tensor | None,
    grad_l1: Tensor | None,
    needed: FfnArgs,
    kept: DenseActivations | None = None,
) -> Gradients:
    """Gradients of (x, up, down, gate, up_bias, down_bias, gate_bias).

    grad_y:   [M, D]; None if y has no part in the loss: then `down` and `down_bias` get no gradient.
    grad_l1:  [] or None.
    needed:   an `FfnArgs` of bools; a False entry gives None.
    kept:     from `dense_forward_keeping`; None computes it again.
    Every operation is a traceable torch op, so a compiled backward fuses them.
    """
    x, gate, activation = args.x, args.gate, args.activation
    pre, up = _projections(args) if kept is None else kept
    activated = activation(pre)
    factor = None if gate is None else activation.factor(up)
    hidden = activated if gate is None else activated * factor
    grad_down = grad_y.mT @ hidden if needed.down and grad_y is not None else None
    grad_down_bias = grad_y.sum(0) if needed.down_bias and grad_y is not None else None

    grad_x = grad_up = grad_gate_pre = None
    grad_hidden = _grad_hidden(args, hidden, grad_y, grad_l1) if _reaches_hidden(needed) else None
    if grad_hidden is not None and gate is None:
        grad_up = activation.backward(grad_hidden, pre)
    elif grad_hidden is not None:
        grad_gate_pre = activation.backward(grad_hidden * factor, pre)
        grad_up = activation.factor_backward(grad_hidden * activated, up)
    if grad_up is not None and needed.x:
        grad_x = grad_up @ args.up
        if grad_gate_pre is not None:
            grad_x = grad_x + grad_gate_pre @ gate
    return (
        grad_x,
        grad_up.mT @ x if grad_up is not None and needed.up else None,
        grad_down,
        grad_gate_pre.mT @ x if grad_gate_pre is not None and needed.gate else None,
        grad_up.sum(0) if grad_up is not None and needed.up_bias else None,
        grad_down_bias,
        grad_gate_pre.sum(0) if grad_gate_pre is not None and needed.gate_bias else None,
    )


def _reaches_hidden(needed: FfnArgs) -> bool:
    """Whether any needed gradient comes through the hidden activations."""
    return needed.x or needed.up or needed.gate or needed.up_bias or needed.gate_bias


def _grad_hidden(
    args: FfnArgs, hidden: Tensor, grad_y: Tensor | None, grad_l1: Tensor | None
) -> Tensor | None:
    """[M, H]: from y, from L1 or from both."""
    from_y = None if grad_y is None else grad_y @ args.down
    if grad_l1 is None:
        return from_y
    from_l1 = hidden.sign() * (grad_l1 / max(args.x.shape[0], 1)).to(hidden.dtype)
    return from_l1 if from_y is None else from_y + from_l1


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # F.linear, or the same in another form


def products_for(args: FfnArgs, tuned: bool) -> tuple[Product, Product, Product]:
    """How to multiply selector, up and down where only values matter.

    tuned: on a CPU, in the form that is fastest there.
    """
    tuned = tuned and args.x.device.type == "cpu"
    forms = _forms(args) if tuned else (None, None, None)
    select, lift, lower = (linear if form is None else partial(_project, form) for form in forms)
    return select, lift, _project_down if lower is linear and reads_badly(args.down) else lower


def in_place(
    products: tuple[Product, Product, Product],
    activation: Activation,
    tensors: Tensors,
    fused: Callable[[Tensor, Tensor | None], Tensor] | None = None,
) -> Tensor:
    """y [..., D], the same numbers from fewer buffers. Little happens between products: threads that fall
    asleep there take 50 us to wake.

    fused: computes hidden values at once; see `kernels.gpu.dense`.
    """
    x, up, down, gate, up_bias, down_bias, gate_bias = tensors
    select, lift, lower = products
    if fused is not None:
        pre, other = (up, None) if gate is None else (gate, up)
        bias = up_bias if gate is None else gate_bias
        hidden = fused(select(x, pre, bias), None if other is None else lift(x, other, up_bias))
    elif gate is None:
        hidden = activation.apply_(select(x, up, up_bias))
    else:
        hidden = activation.apply_(select(x, gate, gate_bias))
        hidden.mul_(activation.factor_(lift(x, up, up_bias)))
    return lower(hidden, down, down_bias)


def _forms(args: FfnArgs) -> tuple[Form | None, ...]:
    """How to multiply selector, up and down; None: F.linear."""
    x, features = args.x, max(args.x.shape[-1], 1)
    tokens = x.numel() // features
    return form_for(tokens, args.selector), form_for(tokens, args.up), form_for(tokens, args.down)


def _project(form: Form, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = form(x.reshape(-1, x.shape[-1]), weight)
    if bias is not None:
        product += bias
    return product if x.dim() == 2 else product.view(*x.shape[:-1], weight.shape[0])


def _project_down(hidden: Tensor, down: Tensor, bias: Tensor | None) -> Tensor:
    """`linear`; weights that a CPU's matrix product reads badly are summed by rows, or copied first."""
    if torch.compiler.is_compiling() or not reads_badly(down):
        return linear(hidden, down, bias)
    flat = hidden.reshape(-1, hidden.shape[-1])
    if flat.shape[0] < _SUM_ROWS_TOKENS and down.mT.is_contiguous() and _only_values_matter():
        return sum_all_rows(flat, down, bias).view(*hidden.shape[:-1], down.shape[0])
    return linear(hidden, down.contiguous(), bias)


def _only_values_matter() -> bool:
    """Whether nobody observes or differentiates the operations: sums of rows have no tangent, and flop
    counters do not know them as products."""
    return not (operations_are_observed() or torch.is_grad_enabled() or forward_ad._current_level >= 0)
