"""The forward of a prompt as a CUDA graph: kernels of a short one take longer to launch than to run.

Prompts are padded on the left to one of few lengths, so that the graph of one serves others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from .._log import log_once
from ..sparsify.blocks import named_blocks
from .graphs import captured_graph, paths_of
from .kernel_layers import is_known, layers_of

MOST_TOKENS = 1536  # of a batch: from about here on the GPU takes longer than the host (2B model)
_SHORTEST = 16
_FIRST_RUNS = 2  # before a capture: kernels are compiled and loaded, layers are read
_LOOK_AGAIN = 64  # uses after which layers are read again
_ATTENTION = ("sdpa", "eager")  # take the mask that is made here


class Padded(NamedTuple):
    """tokens, attended, positions: [B, length], see `generate.Request`; extra: columns that were added."""

    tokens: Tensor
    attended: Tensor
    positions: Tensor
    extra: int


def padded_length(length: int) -> int:
    """The next power of two, or the one and a half times a power of two below it."""
    whole = max(_SHORTEST, 1 << (length - 1).bit_length())
    return 3 * whole // 4 if length <= 3 * whole // 4 and whole > _SHORTEST else whole


def fits_prompt(model: nn.Module, batch: int, length: int) -> bool:
    """Whether a model that `decoder.is_understood` takes them padded; unknown blocks may see the padding."""
    return (
        batch * padded_length(length) <= MOST_TOKENS
        and model.config._attn_implementation in _ATTENTION
        and all(is_known(layer.mlp) for layer in layers_of(model))
    )


def padded(tokens: Tensor, attended: Tensor, positions: Tensor) -> Padded:
    """With the first token repeated in front, so that no token is there that was not."""
    extra = padded_length(tokens.shape[1]) - tokens.shape[1]
    batch = tokens.shape[0]
    return Padded(
        torch.cat((tokens[:, :1].expand(batch, extra), tokens), 1),
        torch.cat((attended.new_zeros(batch, extra), attended), 1),
        torch.cat((positions.new_zeros(batch, extra), positions), 1),
        extra,
    )


class Prompt:
    """A model's forward for prompts [batch, length]."""

    def __init__(self, model: nn.Module, batch: int, length: int) -> None:
        weight = model.get_input_embeddings().weight
        shape, device = (batch, length), weight.device
        self._tokens, self._positions = (
            torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2)
        )
        self._mask = torch.zeros(batch, 1, length, length, dtype=weight.dtype, device=device)
        self._earlier = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        self._blocks = [block for _, block in named_blocks(model)]
        self._uses, self._uncapturable = 0, device.type != "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: tuple[Tensor, Cache] | None = None
        self._captured: tuple[str, ...] = ()

    def run(self, model: nn.Module, given: Padded) -> tuple[Tensor, Cache]:
        """Logits [B, V] after the prompt, and its keys and values; both until the next run."""
        self._uses += 1
        self._tokens.copy_(given.tokens)
        self._positions.copy_(given.positions)
        seen = self._earlier & (given.attended != 0)[:, None, None]
        self._mask.fill_(torch.finfo(self._mask.dtype).min).masked_fill_(seen, 0.0)
        if self._graph is not None and self._uses % _LOOK_AGAIN == 0:
            result = self._forward(model)
            torch.cuda.synchronize(self._tokens.device)
            if paths_of(self._blocks) != self._captured:
                self._graph = None
            return result
        if self._graph is None and (self._uses <= _FIRST_RUNS or not self._capture(model)):
            return self._forward(model)
        self._graph.replay()
        return self._result

    def _forward(self, model: nn.Module) -> tuple[Tensor, Cache]:
        cache = DynamicCache(config=model.config)
        outputs = model(
            input_ids=self._tokens,
            attention_mask=self._mask,
            position_ids=self._positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            return_dict=True,
        )
        return outputs.logits[:, -1], cache

    def _capture(self, model: nn.Module) -> bool:
        if self._uncapturable:
            return False
        graph, result = captured_graph(lambda: self._forward(model), self._tokens.device)
        if graph is None:
            self._uncapturable = True
            log_once(f"prompts are launched operation by operation, since one cannot be captured: {result}")
            return False
        self._graph, self._result, self._captured = graph, result, paths_of(self._blocks)
        return True

    @property
    def is_captured(self) -> bool:
        return self._graph is not None
