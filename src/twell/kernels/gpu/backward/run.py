"""Gradients of a block from what its forward pass listed."""

from __future__ import annotations

import torch
from torch import Tensor

from ...args import FfnArgs
from ..operands import prepare, readable
from .stages import Active, BackwardStages, Gradients


def gpu_backward(
    args: FfnArgs,
    active: Active,
    grad_y: Tensor,
    grad_l1: Tensor | None,
    needed: FfnArgs,
    crowded: bool = False,
) -> tuple[Tensor | None, ...]:
    """Gradients of (x, up, down, gate, up_bias, down_bias, gate_bias); never waits for the device.

    grad_y:   [M, E].
    grad_l1:  [] or None.
    needed:   an `FfnArgs` of bools; a False entry gives None.
    crowded:  whether more than a third of the neurons is expected to be active; see `BackwardStages`.
    """
    if args.x.is_cuda and args.x.device.index != torch.cuda.current_device():
        with torch.cuda.device(args.x.device):  # Triton launches on the current device
            return gpu_backward(args, active, grad_y, grad_l1, needed, crowded)
    operands = prepare(args)
    gated = args.gate is not None

    def new(like: Tensor | None, wanted: bool) -> Tensor | None:
        return torch.empty_like(like) if wanted else None

    gradients = Gradients(
        x=new(operands.x, needed.x),
        select=new(operands.select, needed.gate if gated else needed.up),
        up=new(operands.up, gated and needed.up),
        down=new(operands.down, needed.down),
        select_bias=new(operands.select_bias, needed.gate_bias if gated else needed.up_bias),
        up_bias=new(operands.up_bias, gated and needed.up_bias),
    )
    grad_y = readable(grad_y)
    stages = BackwardStages(operands, active, grad_y, grad_l1, gradients, crowded)
    stages.run()
    return (
        gradients.x,
        gradients.up if gated else gradients.select,
        None if gradients.down is None else gradients.down.mT,
        gradients.select if gated else None,
        gradients.up_bias if gated else gradients.select_bias,
        grad_y.sum(0) if needed.down_bias else None,
        gradients.select_bias if gated else None,
    )
