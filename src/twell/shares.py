"""Shares of active neurons, measured on text and kept in a model's config.

    config.twell_sparsity = {"1": [0.004, 0.011, ...], ..., "128": [0.19, 0.41, ...]}

Number of tokens -> by layer, the share of neurons that at least one of so many tokens activates. Up to 64
tokens come from different places of the text, as those of a decode batch do; 128 are neighbours, as in a
prompt.

Layers find out by themselves what they need. An engine that captures CUDA graphs on made-up input, as vLLM
does, leaves them no time to, so there they go by these (`LayerState.expect`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ._errors import reject
from .kernels.gpu.sizes import DECODE_TOKENS, DEFAULT_ROWS
from .nn import SparseMLP
from .problem import Tensors, are_plain
from .pruning.firing import eval_mode
from .sparsify.blocks import named_blocks

FIELD = "twell_sparsity"
# Limits change above 16, 32 and 64 tokens (`crossover`).
SIZES = (1, 4, 16, 32, DECODE_TOKENS, DEFAULT_ROWS)
_MOST_TOKENS = 8192  # of a call that are looked at
_DIGITS = 4

Look = Callable[[SparseMLP, tuple[Any, ...]], None]


def measure_shares(model: nn.Module, batches: Iterable[Any]) -> dict[str, list[float]]:
    """What `FIELD` of the model's config should hold, from batches of text that the model is called with.

    Calls of fewer than 128 tokens are not looked at. Empty if the model has no block that could be looked at.
    """
    seen = [_Seen() for _ in named_blocks(model)]
    looks = [(block, unions.look) for (_, block), unions in zip(named_blocks(model), seen, strict=True)]
    for batch in batches:
        run_observed(model, batch, looks)
    if not seen or not all(unions.calls for unions in seen):
        return {}
    return {str(size): [unions.mean(size) for unions in seen] for size in SIZES}


class _Seen:
    """How active one block was, over its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self._sums = dict.fromkeys(SIZES, 0.0)

    def look(self, block: SparseMLP, inputs: tuple[Any, ...]) -> None:
        weights, x = block._plain_weights(), inputs[0]
        if weights is None or x.numel() < SIZES[-1] * x.shape[-1]:
            return
        if not are_plain(weights):  # sharded
            return
        active = active_neurons(block, x.detach().reshape(-1, x.shape[-1])[:_MOST_TOKENS], weights)
        for size in SIZES:
            self._sums[size] += _mean_union(active, size)
        self.calls += 1

    def mean(self, size: int) -> float:
        return round(self._sums[size] / self.calls, _DIGITS)


def active_neurons(block: SparseMLP, x: Tensor, weights: Tensors) -> Tensor:
    """Bool [M, H]: which neurons the tokens x [M, D] activate; weights: up, down, gate and their biases."""
    up, _down, gate, up_bias, _down_bias, gate_bias = weights
    selector, bias = (up, up_bias) if gate is None else (gate, gate_bias)
    return block.activation(linear(x, selector, bias)) != 0


def _mean_union(active: Tensor, size: int) -> float:
    """active: bool [M, H], M at least `size`."""
    groups = active.shape[0] // size
    active = active[: groups * size]
    if size > DECODE_TOKENS:
        union = active.view(groups, size, -1).any(1)
    else:
        union = active.view(size, groups, -1).any(0)
    return float(union.double().mean())


def run_observed(model: nn.Module, batch: Any, looks: Iterable[tuple[SparseMLP, Look]]) -> None:
    """Run `model` on `batch` (a tensor, keyword arguments or arguments) in eval mode, without gradients; each
    look sees its block's inputs before every call."""
    hooks = [block.register_forward_pre_hook(look) for block, look in looks]
    try:
        with torch.no_grad(), eval_mode(model):
            if isinstance(batch, Mapping):
                model(**batch)
            elif isinstance(batch, Tensor):
                model(batch)
            elif isinstance(batch, Sequence) and not isinstance(batch, str):
                model(*batch)
            else:
                reject("batch", f"a {type(batch).__name__}", "a tensor, a mapping or a sequence of arguments")
    finally:
        for hook in hooks:
            hook.remove()


def keep_shares(config: Any, shares: dict[str, list[float]]) -> None:
    """Put them in a model's config; none take away what it had."""
    if shares:
        setattr(config, FIELD, shares)
    elif hasattr(config, FIELD):
        delattr(config, FIELD)


def stored_shares(config: Any) -> list[dict[int, float]]:
    """By layer, number of tokens -> share, as a model's config has it; empty if it has none."""
    stored = getattr(config, FIELD, None)
    if not stored:
        return []
    layers = config.num_hidden_layers
    if not isinstance(stored, Mapping) or not all(_is_size(key) for key in stored):
        reject(FIELD, repr(stored), "numbers of tokens, each with the shares of all layers")
    for key, shares in stored.items():
        if not isinstance(shares, list) or len(shares) != layers or not all(map(_is_share, shares)):
            reject(f"{FIELD}[{key!r}]", repr(shares), f"{layers} shares from 0 to 1, one for each layer")
    sizes = sorted(stored, key=int)
    return [{int(size): stored[size][layer] for size in sizes} for layer in range(layers)]


def _is_size(key: Any) -> bool:
    return isinstance(key, str) and key.isdecimal() and int(key) > 0


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1
