"""Llama's and Qwen2's layers on kernels of our own, for one token per sequence: see `kernels/gpu/token`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP, Qwen2RMSNorm

from .._log import log_once
from ..nn import SparseMLP
from ..sparsify.blocks import named_blocks
from .cache import StepCache
from .merged import Merged, can_merge, may_merge, merged_projections, refresh

_NORMS = (LlamaRMSNorm, Qwen2RMSNorm)
_BLOCKS = (LlamaMLP, Qwen2MLP)
_TYPES = (torch.bfloat16, torch.float16, torch.float32)
DEVICES = ("cuda",)


class _Layer(NamedTuple):
    layer: nn.Module
    merged: Merged
    block: Callable[[Tensor], Tensor]


class KernelLayers:
    """A `Decoder`."""

    def __init__(self, model: nn.Module, cache: StepCache) -> None:
        backbone, self._cache = model.model, cache
        self._embed, self._rotate = backbone.embed_tokens, backbone.rotary_emb
        self._norm, self._head = backbone.norm, model.lm_head
        self._layers = [
            _Layer(layer, merged_projections(layer.self_attn), _block_of(layer.mlp))
            for layer in layers_of(model)
        ]

    def begin(self) -> None:
        refresh((merged, layer.self_attn) for layer, merged, _ in self._layers)

    def __call__(self, token: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        from ..kernels.gpu.token import add_and_norm, attend, linear_of_few

        cache, change = self._cache, None
        x = self._embed(token)
        cosines, sines = (t[:, 0].contiguous() for t in self._rotate(x, position_ids=position[:, None]))
        mask = mask[:, 0, 0]
        for (layer, merged, block), keys, values in zip(self._layers, cache.keys, cache.values, strict=True):
            attention, out = layer.self_attn, layer.self_attn.o_proj
            norm = layer.input_layernorm
            x, normed = add_and_norm(x, change, norm.weight, norm.variance_epsilon)
            projected = linear_of_few(normed, merged.weight, merged.bias)
            seen = attend(projected, cosines, sines, mask, cache.column, keys, values, attention.scaling)
            change = linear_of_few(seen, out.weight, out.bias)
            norm = layer.post_attention_layernorm
            x, normed = add_and_norm(x, change, norm.weight, norm.variance_epsilon)
            change = block(normed)
        _, normed = add_and_norm(x, change, self._norm.weight, self._norm.variance_epsilon)
        return self._head(normed)


def layers_of(model: nn.Module) -> list[nn.Module]:
    return list(model.model.layers)[: model.config.num_hidden_layers]


def why_no_kernels(model: nn.Module) -> str | None:
    """Why the kernels do not compute what the layers of a Llama or Qwen2 do, or None if they do."""
    layers = layers_of(model)
    norms = [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    norms.append(model.model.norm)
    modules = *layers, model.model.norm, model.get_input_embeddings()
    kinds = {(tensor.dtype, tensor.device) for module in modules for tensor in module.parameters()}
    dtype, device = next(iter(kinds))
    attentions = [layer.self_attn for layer in layers]
    read = [p for module in (*norms, *attentions) for p in module.parameters()]
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if torch.version.hip is not None:
        return "they are written for NVIDIA GPUs"
    if len(kinds) > 1:
        return "weights of several dtypes, or on several devices"
    if dtype not in _TYPES or device.type not in DEVICES:
        return f"weights in {dtype} on {device.type!r}"
    if any(type(norm) not in _NORMS for norm in norms):
        return "norms of another class than transformers'"
    if any(type(one.o_proj) is not nn.Linear or not can_merge(one) for one in attentions):
        return "projections of attention that are not plain nn.Linear modules"
    if any(not tensor.is_contiguous() or tensor.data_ptr() % 16 for tensor in read):
        return "weights that are not contiguous, or begin at an address that is no multiple of 16"
    if not may_merge(layers):
        return "too little free memory for a copy of the query, key and value projections"
    return None


def _block_of(mlp: nn.Module) -> Callable[[Tensor], Tensor]:
    """Sparse blocks have kernels of their own; a compiler fuses what it can of others, once for all."""
    if not named_blocks(mlp):
        return lambda x: _compiled_block()(mlp, x)
    if isinstance(mlp, SparseMLP) and _reads_parameters(mlp):
        return lambda x: _run_steadily(mlp, x)
    return mlp if is_known(mlp) else lambda x: feed_forward(mlp, x)


def _reads_parameters(block: SparseMLP) -> bool:
    """Whether kernels read the selector's parameter itself, not what another kernel has just made of it."""
    from ..kernels.gpu.operands import is_readable

    selector = block.up_proj if block.gate_proj is None else block.gate_proj
    return type(selector) is nn.Linear and is_readable(selector.weight)


def _run_steadily(block: SparseMLP, x: Tensor) -> Tensor:
    from ..kernels.gpu.launch import steady_weights

    with steady_weights():  # a norm is in front of it, which writes no weights
        return block(x)


def is_known(mlp: nn.Module) -> bool:
    """Whether it computes every token by itself: ours, or a stock block, sparsified or not."""
    kind = type(mlp)
    return isinstance(mlp, SparseMLP) or getattr(kind, "_twell_stock", kind) in _BLOCKS


def feed_forward(mlp: nn.Module, x: Tensor) -> Tensor:
    """[B, D] of x [B, D]. Blocks of which nothing is known see a sequence of one token, as from the model."""
    if is_known(mlp):
        return mlp(x)
    return mlp(x[:, None]).expand(*x[:, None].shape)[:, 0].contiguous()


@lru_cache(maxsize=1)
def _compiled_block() -> Callable[..., Any]:
    return compiled_or_plain(feed_forward)


def compiled_or_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, compiled; as it is where a compiler is missing or fails."""
    compiled = torch.compile(function)
    broken: list[str] = []

    def run(*given: Any) -> Any:
        if broken:
            return function(*given)
        try:
            return compiled(*given)
        except torch._dynamo.exc.TorchDynamoException as error:
            broken.append(str(error))
            log_once(f"generation runs without a compiler: {str(error).splitlines()[0]}")
            return function(*given)

    return run
