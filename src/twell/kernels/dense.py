"""The dense path: plain PyTorch, differentiable, traceable, and the fallback of every other path."""

from __future__ import annotations

import torch
from torch import Tensor
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
    args: FfnArgs, grad_y: Tensor, grad_l1: Tensor | None, needed: FfnArgs
) -> tuple[Tensor | None, ...]:
    """Gradients of (x, up, down, gate, up_bias, down_bias, gate_bias) from recomputed activations.

    grad_y:   [M, D].
    grad_l1:  [] or None.
    needed:   an `FfnArgs` of bools; a False entry gives None.
    Every operation is a traceable torch op, so a compiled backward fuses it.
    """
    x, gate, activation = args.x, args.gate, args.activation
    pre = linear(x, args.selector, args.selector_bias)
    activated = activation(pre)
    up = linear(x, args.up, args.up_bias) if gate is not None else None
    hidden = activated if gate is None else activated * up

    grad_hidden = grad_y @ args.down
    if grad_l1 is not None:
        grad_hidden = grad_hidden + hidden.sign() * (grad_l1 / max(x.shape[0], 1)).to(x.dtype)
    if gate is None:
        grad_gate_pre = None
        grad_up = activation.backward(grad_hidden, pre)
    else:
        grad_gate_pre = activation.backward(grad_hidden * up, pre)
        grad_up = grad_hidden * activated

    grad_x = None
    if needed.x:
        grad_x = grad_up @ args.up
        if gate is not None:
            grad_x = grad_x + grad_gate_pre @ gate
    gated = grad_gate_pre is not None
    return (
        grad_x,
        grad_up.mT @ x if needed.up else None,
        grad_y.mT @ hidden if needed.down else None,
        grad_gate_pre.mT @ x if gated and needed.gate else None,
        grad_up.sum(0) if needed.up_bias else None,
        grad_y.sum(0) if needed.down_bias else None,
        grad_gate_pre.sum(0) if gated and needed.gate_bias else None,
    )


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
    if flat.shape[0] < _FEW_TOKENS and down.mT.is_contiguous() and not torch.is_grad_enabled():
        return sum_all_rows(flat, down, bias).view(*hidden.shape[:-1], down.shape[0])
    return linear(hidden, down.contiguous(), bias)
