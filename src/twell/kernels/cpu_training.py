"""Training on the CPU: the forward of inference, and a backward that finds the active set by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from .args import RUN, FfnArgs, FfnOutput, Gradients, Saved, Skip
from .cpu import cpu_forward
from .cpu_backward import can_pay, cpu_backward, is_sparse
from .cpu_weights import site_of


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
    site = site_of(args)
    if site.low_precision and not site.native_16_bit:
        return RUN  # computed in float32 however active: stock 16-bit products take forty times as long
    with torch.no_grad():
        return RUN if can_pay(args, site) and is_sparse(args) else Skip(dense=True)
