"""Gradients of a block from what its forward pass listed."""

from __future__ import annotations

import torch
from torch import Tensor

from ...args import Existing, FfnArgs
from ..operands import prepare, readable
from .stages import Active, BackwardStages, Gradients


def gpu_backward(
    args: FfnArgs,
    active: Active,
    grad_y: Tensor,
    grad_l1: Tensor | None,
    needed: FfnArgs,
    crowded: bool | None = None,
    into: Existing | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of (x, up, down, gate, up_bias, down_bias, gate_bias); never waits for the device.

    grad_y:   [M, E].
    grad_l1:  [] or None.
    needed:   an `FfnArgs` of bools; a False entry gives None.
    crowded:  whether more than a third of the neurons is expected to be active, if that is known; see
              `BackwardStages`.
    into:     gradients of up, down and gate to add to, those that are needed; the result then has None there.
    """
    if args.x.is_cuda and args.x.device.index != torch.cuda.current_device():
        with torch.cuda.device(args.x.device):  # Triton launches on the current device
            return gpu_backward(args, active, grad_y, grad_l1, needed, crowded, into)
    operands = prepare(args)
    gated = args.gate is not None

    def new(like: Tensor | None, wanted: bool) -> Tensor | None:
        return torch.empty_like(like) if wanted else None

    if into is None:
        gate = new(operands.select, gated and needed.gate)
        up = new(operands.up if gated else operands.select, needed.up)
        down = new(operands.down, needed.down)
    else:
        up, gate = into.up, into.gate
        down = None if into.down is None else into.down.mT
    gradients = Gradients(
        x=new(operands.x, needed.x),
        select=gate if gated else up,
        up=up if gated else None,
        down=down,
        select_bias=new(operands.select_bias, needed.gate_bias if gated else needed.up_bias),
        up_bias=new(operands.up_bias, gated and needed.up_bias),
        add=into is not None,
    )
    grad_y = readable(grad_y)
    stages = BackwardStages(operands, active, grad_y, grad_l1, gradients, crowded)
    stages.run()
    return (
        gradients.x,
        None if gradients.add else up,
        None if gradients.add or down is None else down.mT,
        None if gradients.add else gate,
        gradients.up_bias if gated else gradients.select_bias,
        grad_y.sum(0) if needed.down_bias else None,
        gradients.select_bias if gated else None,
    )
