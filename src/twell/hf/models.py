"""Sparse Llama and Qwen2: transformers' classes with `SparseMLP` blocks and the L1 term in the loss.

Attention, caches, generation, checkpointing and everything else is transformers' own code.
"""

from __future__ import annotations

import os
from itertools import islice
from typing import Any, Self

from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen2PreTrainedModel,
)
from transformers.utils import can_return_tuple

from ..generation import CapturedGeneration
from ..nn import SparseMLP
from .config import SparseLlamaConfig, SparseQwen2Config
from .layers import install_sparse_mlps, restore_layout, set_neuron_major, sparse_mlps
from .recording import RecordsSparsity, SparseCausalLMOutput
from .spellings import IGNORED_KEYS, load_pretrained


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


class _SparseCausalLM(CapturedGeneration, _SparsePreTrained, RecordsSparsity):
    backbone: type[nn.Module]
    pre_trained: type[nn.Module]

    def __init__(self, config: SparseLlamaConfig | SparseQwen2Config) -> None:
        # Skips the stock class, which would build the stock backbone.
        self.pre_trained.__init__(self, config)
        self.model = self.backbone(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.start_recording(config.sparsity_l1_coeff)
        self.post_init()

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
        if num_items_in_batch is not None:
            kwargs["num_items_in_batch"] = num_items_in_batch
        return self.forward_recorded(
            super().forward,
            record_sparsity,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )

    forward.is_stock_with_blocks = True  # what `twell.generation` asks before it calls the layers itself

    def recorded_blocks(self) -> list[SparseMLP]:
        return [layer.mlp for layer in islice(self.model.layers, self.config.num_hidden_layers)]


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
