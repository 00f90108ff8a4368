"""Sparse Llama and Qwen2: transformers' classes with `SparseMLP` blocks and the L1 term in the loss.

Attention, caches, generation, checkpointing and everything else is transformers' own code.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen2PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from .._errors import reject
from .._log import log_once
from ..functional import FfnStats
from ..nn import SparseMLP
from .checkpoints import IGNORED_KEYS, load_pretrained
from .config import SparseLlamaConfig, SparseQwen2Config
from .layers import install_sparse_mlps, restore_layout, set_neuron_major, sparse_mlps

_NOT_A_LABEL = -100
# Training searches this many masks for padding. Padded batches show it in the first one or two.
_FIRST_MASKS = 4


@dataclass
class SparseCausalLMOutput(CausalLMOutputWithPast):
    """transformers' output, and the sparsity of the call where it was recorded (else None).

    loss:     []                 ce_loss + l1_weight * l1_loss in training mode, ce_loss in eval mode; with
                                 `labels` only.
    ce_loss:  []                 the stock loss; with `labels` only.
    l1:       [layers]           mean over tokens of sum |hidden|; differentiable.
    l1_loss:  []                 mean of l1 over layers.
    l0:       [layers]           active neurons per token.
    firing:   int64 [H], a tuple over layers: for how many tokens each neuron was active.

    l1, l0 and firing count padding tokens like any others.
    """

    ce_loss: Tensor | None = None
    l1_loss: Tensor | None = None
    l1: Tensor | None = None
    l0: Tensor | None = None
    firing: tuple[Tensor, ...] | None = None


class _SparsePreTrained:
    """Loading, which backbone and language model share."""

    _keys_to_ignore_on_load_unexpected = IGNORED_KEYS

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str] | None, *model_args: Any, **kwargs: Any
    ) -> Self:
        """transformers' `from_pretrained`; also reads the spellings of released checkpoints.

        Raises ValueError where feed-forward weights are missing, unknown or do not fit the config.
        """
        with_info = kwargs.pop("output_loading_info", False)
        model, info = load_pretrained(
            cls, super().from_pretrained, pretrained_model_name_or_path, *model_args, **kwargs
        )
        for mlp in sparse_mlps(model):
            restore_layout(mlp)
        return (model, info) if with_info else model


class _SparseBackbone(_SparsePreTrained):
    def post_init(self) -> None:
        # Before weights are drawn: the stock initialisation then draws the sparse blocks' weights too.
        install_sparse_mlps(self.layers, self.config)
        super().post_init()
        set_neuron_major(self, True)


class _SparseCausalLM(_SparsePreTrained):
    backbone: type[nn.Module]
    pre_trained: type[nn.Module]

    def __init__(self, config: SparseLlamaConfig | SparseQwen2Config) -> None:
        # Skips the stock class, which would build the stock backbone.
        self.pre_trained.__init__(self, config)
        self.model = self.backbone(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.l1_weight = config.sparsity_l1_coeff
        self._masks_to_look_at = _FIRST_MASKS
        self._recording = False  # whether the last forward recorded statistics
        self.post_init()

    @property
    def l1_weight(self) -> float:
        """Weight of the L1 term. It may change every step: compiled code does not recompile."""
        return self._l1_weight.item()

    @l1_weight.setter
    def l1_weight(self, weight: float) -> None:
        if not 0 <= weight < math.inf:
            reject("l1_weight", repr(weight), "a finite number >= 0")
        if "_l1_weight" in self.__dict__:
            self._l1_weight.fill_(weight)  # in place: wrappers may run a shallow copy of the model
        else:
            # A tensor: a compiler treats a float as a constant. float64 keeps the value as given.
            with torch.inference_mode(False):  # an inference tensor could not be changed later
                self._l1_weight = torch.tensor(weight, dtype=torch.float64, device="cpu")

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        record_sparsity: bool = False,
        **kwargs: Any,
    ) -> SparseCausalLMOutput:
        """transformers' forward, with the L1 term in the training loss and the sparsity of every layer.

        labels [batch, tokens]:  give loss = cross-entropy + l1_weight * L1 in training mode and the
                                 cross-entropy alone in eval mode; both modes return `ce_loss` and `l1_loss`.
        attention_mask:          reaches the attention only. Blocks never see it, so L1, L0 and firing count
                                 padding tokens; the first training steps check for padding and warn.
        num_items_in_batch:      label tokens of all micro-batches of a step. Both terms are then this
                                 micro-batch's share, so that the micro-batches' losses add up to the mean.
        record_sparsity:         record statistics in eval mode without labels too. Training mode and labels
                                 always record, generation does not.
        """
        if self.training and labels is not None:
            self._warn_of_padding(attention_mask)
        if use_cache is None and self.training and labels is not None:
            use_cache = False  # nobody reads it, and each compiled layer would be guarded on it
        record = self.training or labels is not None or record_sparsity
        # Generation skips this: visiting every block takes as long as a layer takes for one token.
        mlps = self._mlps() if record or self._recording else []
        for mlp in mlps:
            # Stays on until the next call: a checkpointed backward runs the block once more, the same way.
            if mlp.record != record:
                mlp.record = record
        self._recording = record
        if num_items_in_batch is not None:
            kwargs["num_items_in_batch"] = num_items_in_batch
        stock = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            return_dict=True,
            **kwargs,
        )
        output = SparseCausalLMOutput(
            loss=stock.loss,
            logits=stock.logits,
            past_key_values=stock.past_key_values,
            hidden_states=stock.hidden_states,
            attentions=stock.attentions,
        )
        if not record:
            return output
        stats = _take_stats(mlps)
        self._check_l1_gradient(mlps, stats)
        device = stock.logits.device  # layers may be spread over devices
        output.ce_loss = stock.loss
        output.l1 = torch.stack([layer.l1.to(device) for layer in stats])
        output.l1_loss = output.l1.mean()
        output.l0 = torch.stack([layer.l0.to(device) for layer in stats])
        output.firing = tuple(layer.firing for layer in stats)
        if labels is not None and self.training:
            # A copy: the next step's weight may be set before this one's backward.
            weight = self._l1_weight.to(output.l1_loss.dtype, copy=True)
            if num_items_in_batch is not None:
                shifted = kwargs.get("shift_labels")
                shifted = labels[..., 1:] if shifted is None else shifted
                weight = weight * _share_of(shifted, num_items_in_batch, kwargs).to(output.l1_loss)
            output.loss = stock.loss + weight * output.l1_loss
        return output

    def _mlps(self) -> list[SparseMLP]:
        return [layer.mlp for layer in islice(self.model.layers, self.config.num_hidden_layers)]

    def _warn_of_padding(self, attention_mask: Any) -> None:
        """Search the first readable masks for padding. Few, since reading one on a GPU waits for it."""
        if torch.compiler.is_compiling() or not self._masks_to_look_at or not _is_readable(attention_mask):
            return
        self._masks_to_look_at -= 1
        if not attention_mask.all():
            self._masks_to_look_at = 0
            log_once(
                "training on padding: the attention mask has zeros, but the L1 term and the statistics (l1, "
                "l0, firing) count padding tokens like others; pack sequences, or group them by length"
            )

    def _check_l1_gradient(self, mlps: list[SparseMLP], stats: list[FfnStats]) -> None:
        if torch.compiler.is_compiling() or not (self.training and torch.is_grad_enabled()):
            return
        lost = any(
            mlp.up_proj.weight.requires_grad and not layer.l1.requires_grad
            for mlp, layer in zip(mlps, stats, strict=True)
        )
        if lost and self.l1_weight > 0:
            reject(
                "use_reentrant",
                "True: gradient checkpointing loses the gradient of the L1 term",
                "gradient_checkpointing_kwargs={'use_reentrant': False}, or l1_weight = 0",
            )


def _is_readable(mask: Any) -> bool:
    """Whether `mask` is a padding mask [batch, tokens] that the host may read now."""
    return (
        type(mask) is Tensor
        and mask.dim() == 2
        and not mask.is_meta
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and not torch.jit.is_tracing()
        and not (mask.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _take_stats(mlps: list[SparseMLP]) -> list[FfnStats]:
    """The statistics of a forward. The blocks release them and the graph behind them."""
    stats = [mlp.last_stats for mlp in mlps]
    for mlp in mlps:
        mlp.last_stats = None
    return stats


def _share_of(shifted_labels: Tensor, num_items: Tensor | int, loss_options: dict[str, Any]) -> Tensor:
    """This micro-batch's share of a step's label tokens, counted as the stock loss does."""
    here = (shifted_labels != loss_options.get("ignore_index", _NOT_A_LABEL)).sum().to(torch.float32)
    return here / (num_items.to(here.device) if isinstance(num_items, Tensor) else num_items)


class SparseLlamaModel(_SparseBackbone, LlamaModel):
    """`LlamaModel` with sparse feed-forward blocks."""

    config: SparseLlamaConfig
    config_class = SparseLlamaConfig


class SparseLlamaForCausalLM(_SparseCausalLM, LlamaForCausalLM):
    """`LlamaForCausalLM` with sparse feed-forward blocks and the L1 term in its loss."""

    config: SparseLlamaConfig
    config_class = SparseLlamaConfig
    backbone = SparseLlamaModel
    pre_trained = LlamaPreTrainedModel


class SparseQwen2Model(_SparseBackbone, Qwen2Model):
    """`Qwen2Model` with sparse feed-forward blocks."""

    config: SparseQwen2Config
    config_class = SparseQwen2Config


class SparseQwen2ForCausalLM(_SparseCausalLM, Qwen2ForCausalLM):
    """`Qwen2ForCausalLM` with sparse feed-forward blocks and the L1 term in its loss."""

    config: SparseQwen2Config
    config_class = SparseQwen2Config
    backbone = SparseQwen2Model
    pre_trained = Qwen2PreTrainedModel
