"""Training on the CPU: the forward of inference, and a backward that finds the active set by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from .args import Decision, FfnArgs, FfnOutput, Gradients, Saved
from .cpu import cpu_forward
from .cpu_backward import cpu_backward


def train_forward(args: FfnArgs, decision: Decision, record: bool) -> tuple[FfnOutput, Saved]:
    empty = (torch.empty(0, dtype=torch.int32, device=args.x.device) for _ in range(2))
    return cpu_forward(args, decision, record), Saved(*empty)


def train_backward(
    args: FfnArgs,
    saved: Saved,
    decision: Decision,
    grad_y: Tensor,
    grad_l1: Tensor | None,
    needed: FfnArgs,
) -> Gradients:
    return cpu_backward(args, decision, grad_y, grad_l1, needed)


def sizes(tokens: int, neurons: int, block_rows: int) -> tuple[int, int]:
    return 0, 0
