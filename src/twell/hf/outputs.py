"""What a sparse language model returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast


@dataclass
class SparseCausalLMOutput(CausalLMOutputWithPast):
    """transformers' output, and the sparsity of the call where it was recorded (else None).

    loss:     []                 ce_loss + l1_weight * l1_loss in training mode, ce_loss in eval mode; with
                                 `labels` only.
    ce_loss:  []                 the stock loss; with `labels` only.
    l1:       [layers]           mean over tokens of sum |hidden|; differentiable.
    l1_loss:  []                 its mean over layers.
    l0:       [layers]           active neurons per token.
    firing:   int64 [H], a tuple over layers: for how many tokens each neuron was active.

    Padding tokens count in l1, l0 and firing as any others.
    """

    ce_loss: Tensor | None = None
    l1_loss: Tensor | None = None
    l1: Tensor | None = None
    l0: Tensor | None = None
    firing: tuple[Tensor, ...] | None = None
