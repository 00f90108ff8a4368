"""Training on the CPU: the forward of inference, and a backward that finds the active set by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from .args import RUN, FfnArgs, FfnOutput, Gradients, Saved, Skip
from .cpu import cpu_forward
from .cpu_backward import _can_pay, _is_sparse, cpu_backward
from .cpu_weights import WeightViews


def train_forward(args: FfnArgs, path: str, block_rows: int, record: bool) -> tuple[FfnOutput, Saved]:
    empty = (torch.empty(0, dtype=torch.int32, device=args.x.device) for _ in range(2))
    return cpu_forward(args, path, block_rows, record), Saved(*empty)


def train_backward(
    args: FfnArgs, saved: Saved, block_rows: int, grad_y: Tensor, grad_l1: Tensor | None, needed: FfnArgs
) -> Gradients:
    return cpu_backward(args, grad_y, grad_l1, needed)


def sizes(tokens: int, neurons: int, block_rows: int) -> tuple[int, int]:
    return 0, 0


def skips_step(args: FfnArgs, hooked: bool = False) -> Skip:
    """Whether an automatic plan should leave this step to dense PyTorch, from a look at a few tokens: the
    same answer whenever it is computed again."""
    with torch.no_grad():
        sparse = _can_pay(args, WeightViews(args, tuned=False).site) and _is_sparse(args)
    return RUN if sparse else Skip(dense=True)
