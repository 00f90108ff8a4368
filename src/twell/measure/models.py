"""The paper's models without downloads: stock and sparse Llamas with the same random weights, whose gates are
calibrated so that every layer fires as many neurons as a trained one does.

Random weights alone would fire half of the neurons. Here feature 0 of every hidden state is a constant (no
projection writes to it), and each neuron's weight of that feature is its threshold. `calibrate_` sets the
thresholds layer by layer on the inputs that the layers really get, to firing rates as skewed as those of
trained models (`twell.synthetic`). It scales each block's output so that a block that is left out shows in
the logits.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from .._errors import did_you_mean, reject, require_positive_int
from .._numbers import time_left
from ..shares import active_neurons, run_observed
from ..sparsify.blocks import named_blocks
from ..synthetic import firing_rates

_CONSTANT = 8.0  # feature 0; exact in bf16
_NEVER = 12.0  # standard deviations above which a neuron practically never fires
_SAMPLE = 4096  # tokens that thresholds are set on
_HEAD = 64  # features of an attention head
# Root mean square of what a block adds to hidden states, which begin at 1. With 38 layers bf16 rounds logits
# to 0.018 of themselves; without the first, middle or last block they differ by 0.15, 0.11 and 0.085. With
# 0.3 the last was lost in rounding (0.12 against 0.056), and unions of 128 tokens grew with depth.
_STEP = 0.1


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A gated Llama. nnz: active neurons per token to build it with."""

    hidden: int
    neurons: int
    layers: int
    vocabulary: int = 49_152
    positions: int = 8192
    nnz: float = 24.0

    def __post_init__(self) -> None:
        for name in ("hidden", "neurons", "layers", "vocabulary", "positions"):
            require_positive_int(name, getattr(self, name))
        if self.hidden % _HEAD:
            reject("hidden", self.hidden, f"a multiple of {_HEAD}, the size of a head")

    @property
    def layer_parameters(self) -> int:
        return self.hidden * (4 * self.hidden + 3 * self.neurons + 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.hidden * (2 * self.vocabulary + 1)

    def config(self) -> dict[str, Any]:
        """Arguments of transformers' config. The head has weights of its own: tied to these embeddings it
        would always predict the token it has just read."""
        heads = self.hidden // _HEAD
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.neurons,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
        }


def _paper(layers: int, nnz: float) -> ModelSize:
    return ModelSize(hidden=2048, neurons=5632, layers=layers, nnz=nnz)


# Sizes as in `train.presets`. The paper gives 39, 29 and 24 active neurons, and none for its 1B.
PRESETS: dict[str, ModelSize] = {
    "tiny": ModelSize(hidden=256, neurons=1536, layers=2, vocabulary=2048, positions=2048, nnz=12),
    "small": ModelSize(hidden=768, neurons=2560, layers=12, vocabulary=16_384, positions=2048, nnz=24),
    "paper-0.5b": _paper(8, 39),
    "paper-1b": _paper(18, 34),
    "paper-1.5b": _paper(28, 29),
    "paper-2b": _paper(38, 24),
}


def require_preset(name: str) -> None:
    """`name` must be a preset's; suggests one that is spelt like it."""
    if name not in PRESETS:
        reject("preset", repr(name), f"one of {', '.join(PRESETS)}{did_you_mean(name, PRESETS)}")


def preset_size(name: str, *, layers: int | None = None, nnz: float | None = None) -> ModelSize:
    """A preset, with other layers or another nnz where given."""
    require_preset(name)
    size = PRESETS[name]
    if layers is not None:
        require_positive_int("layers", layers)
        size = replace(size, layers=layers)
    return size if nnz is None else replace(size, nnz=float(nnz))


@dataclass(frozen=True)
class ModelPair:
    """The same weights as transformers' stock class and as ours, both in eval mode.

    wanted_nnz: active neurons per token that it was built to have; None for a model that was not built here.
    """

    dense: nn.Module
    sparse: nn.Module
    wanted_nnz: float | None = None


def build_pair(
    size: ModelSize,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> ModelPair:
    """Stock Llama with relu, and ours with the same weights, each layer with about `size.nnz` active.

    say:  called before weights are drawn and before each layer's thresholds are set: seconds each, on a CPU.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    from ..hf import SparseLlamaConfig, SparseLlamaForCausalLM

    say(f"drawing the weights of layers 1 to {size.layers}")
    where = torch.device(device)
    cuda = where.type == "cuda"
    devices = [torch.cuda.current_device() if where.index is None else where.index] if cuda else []
    with torch.random.fork_rng(devices=devices), _default_dtype(dtype):
        torch.manual_seed(seed)
        with where:
            dense = LlamaForCausalLM(LlamaConfig(**size.config(), hidden_act="relu"))
            sparse = SparseLlamaForCausalLM(SparseLlamaConfig(**size.config()))
        _draw_weights(dense, size)
        sequence = min(size.positions, 1024)
        ids = torch.randint(size.vocabulary, (max(_SAMPLE // sequence, 1), sequence), device=where)
    dense.eval()
    calibrate_(dense, ids, size.nnz, seed=seed, say=say)
    sparse.load_state_dict(dense.state_dict())
    return ModelPair(dense, sparse.eval(), float(size.nnz))


class _default_dtype:  # noqa: N801 - a context manager, used like torch's own
    """New parameters in this dtype: the largest models would not fit in float32 first. Rotary frequencies
    stay in float32, as in checkpoints that are loaded."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *_error: object) -> None:
        torch.set_default_dtype(self._before)


@torch.no_grad()
def _draw_weights(model: nn.Module, size: ModelSize) -> None:
    hidden, scale = size.hidden, size.hidden**-0.5
    model.model.embed_tokens.weight.normal_()[:, 0] = _CONSTANT
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight.normal_(std=scale)
        layer.mlp.up_proj.weight.normal_(std=scale)
        # No projection writes to feature 0. `calibrate_` scales the blocks' steps. Attention's stay small:
        # random weights average over all positions, which makes hidden states alike.
        layer.mlp.down_proj.weight.normal_()[0] = 0
        layer.self_attn.o_proj.weight.mul_(0.02)[0] = 0
        # Undoes the scaling of the norm before the block, whose input is then normal but for feature 0.
        layer.post_attention_layernorm.weight.fill_(((_CONSTANT**2 + hidden - 1) / hidden) ** 0.5)


@torch.no_grad()
def calibrate_(
    model: nn.Module,
    ids: Tensor,
    nnz: float,
    *,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Set thresholds and scale of every block of a stock Llama from `_draw_weights`, on the tokens `ids`."""
    neurons = model.config.intermediate_size
    generator = torch.Generator().manual_seed(seed)
    # As in `make_ffn`: layers with most neurons active have no dead ones.
    usual = {} if nnz <= 0.9 * 0.7 * 0.5 * neurons else {"dead": 0.0, "max_rate": 1.0}
    rates = firing_rates(neurons, nnz, **usual, generator=generator)
    quantiles = torch.special.ndtri(1 - rates).clamp(-_NEVER, _NEVER).float().to(ids.device)

    def set_thresholds(mlp: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].reshape(-1, inputs[0].shape[-1])[:_SAMPLE].float()
        weight = mlp.gate_proj.weight
        weight[:, 0] = 0
        scores = linear(x, weight.float()) / x[:, :1]  # a neuron fires where this is above its threshold
        wanted = quantiles[torch.randperm(neurons, generator=generator).to(quantiles.device)]
        mean, deviation = scores.mean(0), scores.std(0)
        low, high = -2.0, 2.0  # standard deviations, where less than a tenth is usual
        for _ in range(14):  # a layer's rate is exact on these tokens; its skew is the normal distribution's
            shift = (low + high) / 2
            threshold = (mean + (wanted + shift) * deviation).to(weight.dtype)
            active = torch.count_nonzero(scores > threshold.float()).item() / len(scores)
            low, high = (shift, high) if active > nnz else (low, shift)
        weight[:, 0] = -threshold
        step = mlp(inputs[0]).float().square().mean().sqrt().item()
        mlp.down_proj.weight.mul_(_STEP / step if step else 1e-3)  # 0: no neuron fires on these tokens

    set_up: set[nn.Module] = set()
    layers, began = model.model.layers, perf_counter()

    def once(mlp: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if mlp not in set_up:  # setting up calls the block, too
            done = len(set_up)
            ahead = (perf_counter() - began) / done * (len(layers) - done) if done else None
            left = "" if ahead is None else f"; {time_left(ahead)}"
            say(f"building layer {done + 1} of {len(layers)}{left}")
            set_up.add(mlp)
            set_thresholds(mlp, inputs)

    hooks = [layer.mlp.register_forward_pre_hook(once) for layer in layers]
    try:
        model.model(ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def active_by_layer(model: nn.Module, ids: Tensor) -> list[float]:
    """Active neurons per token in every block of a sparse model, on the tokens `ids`."""
    counts: list[list[Tensor]] = []

    def look_at(place: int) -> Any:
        def look(block: Any, inputs: tuple[Any, ...]) -> None:
            x = inputs[0].detach().reshape(-1, inputs[0].shape[-1])
            for part in x.split(_SAMPLE):
                counts[place].append(active_neurons(block, part, block._plain_weights()).sum(1))

        return look

    looks = []
    for _, block in named_blocks(model):
        if block._plain_weights() is not None:
            counts.append([])
            looks.append((block, look_at(len(counts) - 1)))
    run_observed(model, {"input_ids": ids, "use_cache": False}, looks)
    return [torch.cat(layer).double().mean().item() for layer in counts if layer]


def shared_twin(model: nn.Module) -> nn.Module:
    """A copy of the modules around the same parameters and buffers, to compile or to change."""
    tensors = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, tensors)


def tensor_bytes(model: nn.Module) -> int:
    """Memory of the model's parameters and buffers."""
    seen = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return sum(tensor.nbytes for tensor in seen.values())


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of a transformers model: the longest list of modules around its blocks."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=()))


def free_bytes(device: torch.device | str) -> int | None:
    """Memory that a process can still get on a device; None where that cannot be known."""
    where = torch.device(device)
    if where.type == "cuda":
        free, _ = torch.cuda.mem_get_info(where)
        return free + torch.cuda.memory_reserved(where) - torch.cuda.memory_allocated(where)
    for line in _meminfo():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _meminfo() -> Iterator[str]:
    path = Path("/proc/meminfo")
    if os.access(path, os.R_OK):
        yield from path.read_text().splitlines()


def layers_in(free: float, size: ModelSize, bytes_per_parameter: float) -> int:
    """How many layers of a model `free` bytes hold next to its embeddings; no more than it has."""
    rest = (size.parameters - size.layers * size.layer_parameters) * bytes_per_parameter
    return min(int(max(free - rest, 0) / (size.layer_parameters * bytes_per_parameter)), size.layers)


def require_room(
    size: ModelSize, *, bytes_per_parameter: float, device: torch.device | str, name: str
) -> None:
    """Refuse a model whose weights cannot fit, and say how many layers would.

    bytes_per_parameter:  of all that is kept for each: copies, gradients, the optimiser's state.
    """
    free = free_bytes(device)
    if free is None:
        return
    needed = size.parameters * bytes_per_parameter
    if needed <= free:
        return
    layers = layers_in(free, size, bytes_per_parameter)
    accepted = f"--layers {layers}, or less" if layers else "a smaller preset, or a device with more memory"
    reject(
        "preset",
        f"{name} with {size.layers} layers, which needs {needed / 2**30:.1f} GiB of the "
        f"{free / 2**30:.1f} GiB that are free on {device}",
        accepted,
    )
