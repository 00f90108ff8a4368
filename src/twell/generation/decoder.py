"""One token through a model: Llama's and Qwen2's layers as one compiled function, other models as they are.

A layer of transformers knows its number, and a compiler takes it for a constant: every layer would be
compiled anew. `_layer` gets what a layer needs as arguments, so all layers share its code.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2 import modeling_qwen2 as qwen2

from .._log import log_once
from .cache import StepCache
from .kernel_layers import KernelLayers, compiled_or_plain, feed_forward, layers_of, why_no_kernels
from .merged import Merged, may_merge, merged_projections, refresh

_LAYERS = (llama.LlamaDecoderLayer, qwen2.Qwen2DecoderLayer)
_HEADS = (llama.LlamaForCausalLM.forward, qwen2.Qwen2ForCausalLM.forward)
_BACKBONES = (llama.LlamaModel.forward, qwen2.Qwen2Model.forward)
_ATTENTION = (llama.LlamaAttention, qwen2.Qwen2Attention)

_SAME_ATTENTION = ("sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3", None)


class Decoder(Protocol):
    def __call__(self, token: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        """Logits [B, V] after token [B] at position [B]; mask [B, 1, 1, columns] is added to the scores."""

    def begin(self) -> None:
        """Another request; weights may have other values."""


def decoder_of(model: nn.Module, cache: StepCache, compiled: bool) -> Decoder:
    """compiled: whether layers that our kernels do not fit are compiled, which is logged."""
    if not is_understood(model):
        return _WholeModel(model, cache)
    reason = why_no_kernels(model)
    if reason is None:
        return KernelLayers(model, cache)
    if compiled:
        log_once(f"generation compiles layers instead of running its own kernels: {reason}")
    return _OwnLayers(model, cache, compiled)


def is_understood(model: nn.Module) -> bool:
    """Whether `model` is a stock Llama or Qwen2 around its feed-forward blocks."""
    backbone = getattr(model, "model", None)
    layers = getattr(backbone, "layers", ())
    if type(model).forward not in _HEADS and not getattr(type(model).forward, "is_stock_with_blocks", False):
        return False
    if type(backbone).forward not in _BACKBONES or not len(layers):
        return False
    kinds = getattr(model.config, "layer_types", None)
    dtype = model.get_input_embeddings().weight.dtype  # of masks: those of wider layers would not fit
    return (
        all(p.dtype == dtype for layer in layers for p in layer.self_attn.parameters())
        and all(type(layer) in _LAYERS and type(layer.self_attn) in _ATTENTION for layer in layers)
        and (kinds is None or set(kinds) == {"full_attention"})
        and model.config._attn_implementation in _SAME_ATTENTION
    )


class _WholeModel:
    """The model's own forward. The model keeps its steps, so they do not keep the model."""

    def __init__(self, model: nn.Module, cache: StepCache) -> None:
        self._model, self._cache = weakref.ref(model), cache.for_transformers()

    def begin(self) -> None:
        """It reads the weights themselves."""

    def __call__(self, token: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        output = self._model()(
            input_ids=token[:, None],
            position_ids=position[:, None],
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            return_dict=True,
        )
        return output.logits[:, -1]


class _OwnLayers:
    def __init__(self, model: nn.Module, cache: StepCache, compiled: bool) -> None:
        backbone, self._cache = model.model, cache
        self._embed, self._rotate = backbone.embed_tokens, backbone.rotary_emb
        self._norm, self._head = backbone.norm, model.lm_head
        self._layer = _compiled_layer() if compiled else _layer
        layers = layers_of(model)
        merges = may_merge(layers)
        self._layers = [(layer, merged_projections(layer.self_attn) if merges else None) for layer in layers]

    def begin(self) -> None:
        refresh((merged, layer.self_attn) for layer, merged in self._layers if merged is not None)

    def __call__(self, token: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        cache = self._cache
        x = self._embed(token)
        turns = self._rotate(x, position_ids=position[:, None])
        for (layer, merged), keys, values in zip(self._layers, cache.keys, cache.values, strict=True):
            x = self._layer(layer, merged, x, turns, mask, cache.column, keys, values)
        return self._head(self._norm(x))


def _layer(
    layer: nn.Module,
    merged: Merged | None,
    x: Tensor,
    turns: tuple[Tensor, Tensor],
    mask: Tensor,
    column: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """x [B, D] after a layer.

    turns:         cosines and sines, [B, 1, size].
    keys, values:  [B, heads, columns, size].
    """
    attention = layer.self_attn
    normed = layer.input_layernorm(x)
    if merged is None:
        projected = attention.q_proj(normed), attention.k_proj(normed), attention.v_proj(normed)
    else:
        projected = linear(normed, merged.weight, merged.bias).split(merged.sizes, -1)
    queries, key, value = (part.view(x.shape[0], -1, 1, attention.head_dim) for part in projected)
    cosines, sines = (turn[:, None] for turn in turns)
    queries, key = (_turned(t, cosines, sines) for t in (queries, key))
    keys.index_copy_(2, column, key)
    values.index_copy_(2, column, value)
    shared = queries.shape[1] != keys.shape[1]
    seen = scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, scale=attention.scaling, enable_gqa=shared
    )
    x = x + attention.o_proj(seen.reshape(x.shape[0], -1))
    return x + feed_forward(layer.mlp, layer.post_attention_layernorm(x))


def _turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary embedding of x [B, heads, 1, size]."""
    half = x.shape[-1] // 2
    return x * cosines + torch.cat((-x[..., half:], x[..., :half]), -1) * sines


@lru_cache(maxsize=1)
def _compiled_layer() -> Callable[..., Any]:
    return compiled_or_plain(_layer)
