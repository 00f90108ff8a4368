"""The dense path: plain PyTorch, differentiable, traceable, and the fallback of every other path."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import linear

from .._ran import note_path
from .args import FfnArgs, FfnOutput
from .cpu_down import reads_badly, sum_all_rows

_FEW_TOKENS = 16  # more are faster through one copy of the weights (7 ms at H 4096, D 1024)


def dense_forward(args: FfnArgs, record: bool) -> FfnOutput:
    """The block as stock PyTorch runs it; `record` adds the statistics (l1 is differentiable).

    Without `record`, x may be [..., D].
    """
    note_path("dense", args.x, args.up.shape[0])
    activated, hidden = _hidden(args)
    y = _project_down(hidden, args.down, args.down_bias)
    if not record:
        return FfnOutput(y)
    active = activated.detach() != 0
    wide = torch.promote_types(hidden.dtype, torch.float32)
    l1 = hidden.abs().sum(dtype=wide) / max(args.x.shape[0], 1)
    return FfnOutput(y, l1, active.sum(dim=0))


def dense_backward(
    args: FfnArgs, grad_y: Tensor | None, grad_l1: Tensor | None, needed: FfnArgs
) -> tuple[Tensor | None, ...]:
    """Gradients of (x, up, down, gate, up_bias, down_bias, gate_bias) from recomputed activations.

    grad_y:   [M, D] or None, where y has no part in the loss: then neither `down` nor `down_bias` gets one.
    grad_l1:  [] or None.
    needed:   an `FfnArgs` of bools; a False entry gives None.
    Every operation is a traceable torch op, so a compiled backward fuses it.
    """
    x, gate, activation = args.x, args.gate, args.activation
    pre = linear(x, args.selector, args.selector_bias)
    activated = activation(pre)
    up = linear(x, args.up, args.up_bias) if gate is not None else None
    hidden = activated if gate is None else activated * up
    grad_down = grad_y.mT @ hidden if needed.down and grad_y is not None else None
    grad_down_bias = grad_y.sum(0) if needed.down_bias and grad_y is not None else None

    grad_x = grad_up = grad_gate_pre = None
    grad_hidden = _grad_hidden(args, hidden, grad_y, grad_l1) if _reaches_hidden(needed) else None
    if grad_hidden is not None and gate is None:
        grad_up = activation.backward(grad_hidden, pre)
    elif grad_hidden is not None:
        grad_gate_pre = activation.backward(grad_hidden * up, pre)
        grad_up = grad_hidden * activated
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
    """Whether a gradient is needed that comes through the hidden activations."""
    return needed.x or needed.up or needed.gate or needed.up_bias or needed.gate_bias


def _grad_hidden(
    args: FfnArgs, hidden: Tensor, grad_y: Tensor | None, grad_l1: Tensor | None
) -> Tensor | None:
    """[M, H], from y, from L1 or from both."""
    from_y = None if grad_y is None else grad_y @ args.down
    if grad_l1 is None:
        return from_y
    from_l1 = hidden.sign() * (grad_l1 / max(args.x.shape[0], 1)).to(hidden.dtype)
    return from_l1 if from_y is None else from_y + from_l1


def _hidden(args: FfnArgs) -> tuple[Tensor, Tensor]:
    """(activation of the selector, what the down projection multiplies), both [M, H]."""
    activated = args.activation(linear(args.x, args.selector, args.selector_bias))
    if args.gate is None:
        return activated, activated
    return activated, activated * linear(args.x, args.up, args.up_bias)


def _project_down(hidden: Tensor, down: Tensor, bias: Tensor | None) -> Tensor:
    """`linear`, but for weights that a CPU's matrix product reads badly: summed by rows or copied."""
    if torch.compiler.is_compiling() or not reads_badly(down):
        return linear(hidden, down, bias)
    flat = hidden.reshape(-1, hidden.shape[-1])
    if flat.shape[0] < _FEW_TOKENS and down.mT.is_contiguous() and _only_values_matter():
        return sum_all_rows(flat, down, bias).view(*hidden.shape[:-1], down.shape[0])
    return linear(hidden, down.contiguous(), bias)


def _only_values_matter() -> bool:
    """Whether nobody differentiates, transforms or watches the operations: sums of rows have no tangent, and
    count as no product."""
    return not (
        torch.is_grad_enabled()
        or forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
    )
