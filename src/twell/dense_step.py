"""Dense training steps on a GPU: what lies between their products in one kernel each way, statistics and L1
with it.

A model whose layers all ran dense trained at 0.95x of stock without them, eager, with PyTorch's operations
(`docs/reproduce.md`, lambda 0), and trains at 0.97x with these kernels (`docs/benchmarks.md`, 1,500 active).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._log import note_path
from .activations import Activation
from .backends import Site, get_backend
from .kernels.dense import HiddenValues, dense_forward, hidden_backward, project_down, projections
from .ops import only_values_matter
from .prepared import is_capturing
from .problem import FfnArgs, FfnOutput, are_plain

if TYPE_CHECKING:
    from .kernels.gpu.dense import FusedStep


class FusedHidden(torch.autograd.Function):
    """(step, pre [M, H], up [M, H] or None) -> hidden values [M, H], l1 [] and firing int64 [H]."""

    @staticmethod
    def forward(ctx, step: FusedStep, pre: Tensor, up: Tensor | None) -> HiddenValues:
        ctx.step = step
        ctx.save_for_backward(pre, up)
        ctx.set_materialize_grads(False)
        values = step.forward(pre, up, record=True)
        ctx.mark_non_differentiable(values.firing)
        return tuple(values)

    @staticmethod
    def backward(
        ctx, grad_hidden: Tensor | None, grad_l1: Tensor | None, _grad_firing: None
    ) -> tuple[None, Tensor | None, Tensor | None]:
        if grad_hidden is None and grad_l1 is None:
            return None, None, None
        pre, up = ctx.saved_tensors
        if torch.is_grad_enabled() or not only_values_matter((pre, up, grad_hidden, grad_l1)):
            found = hidden_backward(ctx.step.activation, pre, up, grad_hidden, grad_l1)
        else:
            found = ctx.step.backward(pre, up, grad_hidden, grad_l1, again=False)
        return None, found.pre, found.up


def run_dense_step(args: FfnArgs, record: bool, reason: str) -> FfnOutput:
    """`dense_forward` of a training step that nobody observes, with its backward."""
    step = fused_step(args) if record else None  # without statistics there is little to fuse
    if step is None:
        return dense_forward(args, record, reason=reason)
    note_path("dense", args.x, args.up.shape[0], reason=reason)
    return project_down(args, HiddenValues(*FusedHidden.apply(step, *projections(args))))


def fused_step(args: FfnArgs) -> FusedStep | None:
    """What computes between the products of a training step; None where PyTorch does."""
    x, neurons = args.x, args.up.shape[0]
    if not x.is_cuda or x.device.index != torch._C._cuda_getDevice() or not are_plain(args[:-1]):
        return None
    step = _step(args.activation, x.dtype, x.shape[1], neurons, args.gate is not None)
    if step is None or (is_capturing() and not step.is_loaded(neurons, x.device)):
        return None  # a capture must not load a kernel
    return step


@lru_cache(maxsize=256)
def _step(
    activation: Activation, dtype: torch.dtype, features: int, neurons: int, gated: bool
) -> FusedStep | None:
    site = Site("cuda", dtype, None, features, neurons, gated, training=True)
    if dtype.itemsize != 2 or get_backend("gpu").refusal(site) is not None:
        return None
    from .kernels.gpu.dense import FusedStep  # not before: it imports Triton

    return FusedStep(activation, dtype, gated)
