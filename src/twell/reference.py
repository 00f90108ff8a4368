"""The definition of correct: feed-forward blocks in plain PyTorch, written to be read.

Every kernel, test and benchmark is compared with these functions, and with nothing else written here. They
favour clarity over speed: nothing is skipped, nothing is packed.

Shapes: x [..., D]; up, gate [H, D]; down [D, H]; biases [H], [H], [D]; output [..., D].
M is the number of tokens, the product of x's leading dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .activations import Activation


@dataclass(frozen=True)
class ReferenceResult:
    """Output and activation statistics of one block.

    y:       [..., D]  the block's output.
    hidden:  [M, H]    what the down projection multiplies: act(gate) * up (drelu: relu(gate) * relu(up)), or
                       act(up) if not gated.
    l1:      []        mean over tokens of sum over neurons |hidden|.
    l0:      []        mean over tokens of the number of active neurons.
    firing:  [H] int64 for how many tokens each neuron was active.

    The gate alone decides what is active, with drelu as well: a hidden value of 0 may be an active neuron's.
    """

    y: Tensor
    hidden: Tensor
    l1: Tensor
    l0: Tensor
    firing: Tensor


def ffn(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    gate: Tensor | None = None,
    *,
    activation: str | Activation = "relu",
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_bias: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> ReferenceResult:
    """`twell.ffn`, computed densely in `dtype` (use float32 or float64); differentiable."""
    act = Activation.parse(activation)
    act.check_gated(gate is not None)

    def wide(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(dtype)

    def project(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product = tokens @ wide(weight).mT
        return product if bias is None else product + wide(bias)

    tokens_MD = wide(x).reshape(-1, x.shape[-1])
    up_MH = project(tokens_MD, up, up_bias)
    if gate is None:
        activated_MH = act(up_MH)
        hidden_MH = activated_MH
    else:
        activated_MH = act(project(tokens_MD, gate, gate_bias))
        hidden_MH = activated_MH * act.factor(up_MH)
    y_MD = project(hidden_MH, down, down_bias)

    # NaN != 0 is True, so a NaN gate counts as active; -0.0 != 0 is False.
    active_MH = activated_MH.detach() != 0
    tokens = max(tokens_MD.shape[0], 1)
    return ReferenceResult(
        y=y_MD.reshape(*x.shape[:-1], down.shape[0]),
        hidden=hidden_MH,
        l1=hidden_MH.abs().sum() / tokens,
        l0=active_MH.sum().to(dtype) / tokens,
        firing=active_MH.sum(dim=0),
    )


def relative_error(result: Tensor, exact: Tensor) -> float:
    """||result - exact|| / ||exact||, in float64; 0 when both are all zero, inf when only exact is."""
    difference = (result.double() - exact.double()).norm().item()
    scale = exact.double().norm().item()
    if scale == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / scale
