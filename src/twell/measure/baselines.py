"""Dense baselines of whole models: compiled layer by layer, and the best that a dense model can do.

Layers are compiled one by one, and all of a model share the code of the first: compiling takes seconds and
not minutes, and loses the fusion of one addition per layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from .models import decoder_layers, shared_twin

# All contenders compile the same code of torch, each for its own weights and shapes. Beyond the limit, torch
# would run them uncompiled with no more than a warning.
_RECOMPILATIONS = 256
AUTOTUNE = "max-autotune-no-cudagraphs"  # with thousands of tokens, graphs save nothing and cost memory


@contextmanager
def many_compilations() -> Iterator[None]:
    import torch._dynamo.config as config

    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    total = (
        "accumulated_recompile_limit"
        if hasattr(config, "accumulated_recompile_limit")
        else "accumulated_cache_size_limit"
    )
    with config.patch({limit: _RECOMPILATIONS, total: 4 * _RECOMPILATIONS}):
        yield


@contextmanager
def quiet_autotuning(wanted: bool = True) -> Iterator[None]:
    """Without the tables of `max-autotune` and the traces of kernels that it could not build: hundreds of
    lines about what it did not choose. wanted: False does nothing."""
    if not wanted:
        yield
        return
    import torch._inductor.config as config
    import torch._inductor.select_algorithm as selection

    logger = logging.getLogger(selection.__name__)
    level, printed = logger.level, selection.PRINT_AUTOTUNE
    logger.setLevel(logging.CRITICAL + 1)
    selection.PRINT_AUTOTUNE = False
    reports = "max_autotune_report_choices_stats"
    try:
        with config.patch({reports: False} if hasattr(config, reports) else {}):
            yield
    finally:
        selection.PRINT_AUTOTUNE = printed
        logger.setLevel(level)


def compile_layers(model: nn.Module, *, fullgraph: bool = True, **options: Any) -> nn.Module:
    """Compile the layers of a model, and its last norm, in place; options go to `torch.compile`.

    fullgraph: also raises where torch would give up compiling.
    """
    norm = getattr(getattr(model, "model", None), "norm", None)
    parts = [*decoder_layers(model), *([norm] if isinstance(norm, nn.Module) else [])]
    for part in parts:
        part.compile(dynamic=False, fullgraph=fullgraph, **options)
    return model


class MergedReglu(nn.Module):
    """A stock gated block whose gate and up projections are one product; a compiler fuses what follows."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        weight = torch.cat((block.gate_proj.weight.detach(), block.up_proj.weight.detach()))
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.down_proj = block.down_proj

    def forward(self, x: Tensor) -> Tensor:
        gate, up = linear(x, self.weight).chunk(2, -1)
        return self.down_proj(torch.relu(gate) * up)


def can_merge(model: nn.Module) -> bool:
    """Whether every layer has a stock gated block with ReLU and without biases."""
    return all(_is_plain_reglu(getattr(layer, "mlp", None)) for layer in decoder_layers(model))


def _is_plain_reglu(block: nn.Module | None) -> bool:
    projections = [getattr(block, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    return isinstance(getattr(block, "act_fn", None), nn.ReLU) and all(
        type(one) is nn.Linear and one.bias is None for one in projections
    )


@dataclass(frozen=True)
class Way:
    """One attempt at the fastest dense model. build: makes it; meaning: in plain words."""

    meaning: str
    build: Callable[[], nn.Module]


def dense_ways(dense: nn.Module, sparse: nn.Module, *, all_active: bool) -> dict[str, Way]:
    """What "best dense" is the fastest of. Parameters are shared where they can be.

    all_active:  whether feature 0 is the constant of `build_pair`, so that its weight can make every neuron
                 fire.
    """
    ways = {
        "max-autotune": Way(
            "compiled with max-autotune: torch tries its matrix kernels on these shapes",
            lambda: compile_layers(shared_twin(dense), mode=AUTOTUNE),
        )
    }
    if can_merge(dense):
        ways["merged gate-up"] = Way(
            "gate and up projection as one product, ReLU and product fused, compiled",
            lambda: compile_layers(_merged(dense)),
        )
    if all_active:
        ways["our kernels, all neurons active"] = Way(
            "our model with gates that always fire, compiled: no sparsity, our kernels (other outputs)",
            lambda: compile_layers(_all_active(sparse)),
        )
    return ways


def _merged(dense: nn.Module) -> nn.Module:
    twin = shared_twin(dense)
    for layer in decoder_layers(twin):
        layer.mlp = MergedReglu(layer.mlp)
    return twin


@torch.no_grad()
def _all_active(sparse: nn.Module) -> nn.Module:
    twin = shared_twin(sparse)
    for layer in decoder_layers(twin):
        gate = layer.mlp.gate_proj
        weight = gate.weight.clone()
        weight[:, 0] = 2.0  # times 8, the constant feature: 16 standard deviations above zero
        gate.weight = nn.Parameter(weight, requires_grad=False)
        # Scaled for a few active neurons: all of them would drown feature 0 for the next layer.
        down = layer.mlp.down_proj
        down.weight = nn.Parameter(down.weight * 1e-3, requires_grad=False)
    return twin


def has_liger() -> bool:
    return find_spec("liger_kernel") is not None


def with_liger(dense: nn.Module) -> nn.Module:
    """A twin of a stock Llama with Liger's norms and its loss without whole logits, its layers compiled.

    Liger has no ReGLU; its rotary embedding would replace the one of every Llama in this process.
    """
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss, LigerRMSNorm

    twin = shared_twin(dense)
    for module in list(twin.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ == "LlamaRMSNorm":
                norm = LigerRMSNorm(child.weight.shape[0], eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)
    fused = LigerFusedLinearCrossEntropyLoss()

    def loss(ids: Tensor) -> Tensor:
        hidden = twin.model(ids, use_cache=False).last_hidden_state[:, :-1]
        return fused(twin.lm_head.weight, hidden.reshape(-1, hidden.shape[-1]), ids[:, 1:].reshape(-1))

    twin.fused_loss = loss
    return twin
