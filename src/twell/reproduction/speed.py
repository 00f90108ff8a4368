"""How fast a trained model is, against the same weights run dense: forward passes and training steps.

Timed on held-out text, in turn, as `twell bench` does. The dense model is transformers' own class, with plain
PyTorch blocks in the place of ours where that has none of their kind, as for non-gated ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._interval import ENOUGH_ROUNDS
from ..evaluation import load_model
from ..hf import sparse_mlps, to_stock
from ..measure.contest import Setting
from ..measure.inference import Batch, bench_forward
from ..measure.models import ModelPair, ModelSize, decoder_layers
from ..measure.results import Measured, merge
from ..measure.training import Trained, TrainingCase, bench_training
from ..nn import SparseMLP
from ..train.config import RunConfig
from ..train.data import prepare

_CONTENDERS = ["dense-eager", "ours-eager"]
_ROUNDS = {"cuda": 10, "cpu": ENOUGH_ROUNDS}


def measure_speed(
    folder: Path, config: RunConfig, shape: tuple[int, int], say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Figures for JSON: by workload ("forward", "step") tokens per ms of dense and ours, and how many times
    faster ours is, with the bounds of 95%; empty for a model without zeros.

    folder:  of the finished run.
    shape:   sequences, and tokens per sequence.
    """
    if config.model.dense:
        return {}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ids, origin = held_out_batch(config, shape)
    ids = ids.to(device)
    found: list[Measured] = []
    setting = Setting(
        device=device, rounds=_ROUNDS[device.type], memory=device.type == "cuda", emit=found.append, say=say
    )
    wide = config.train.precision if device.type == "cuda" else "float32"
    pair = model_pair(folder, wide, device)
    bench_forward(pair, folder.name, Batch(ids=ids, origin=origin), _CONTENDERS, setting, calibrated=False)
    del pair
    # Weights in float32 and autocast, as in training.
    trained = Trained(model_pair(folder, "float32", device), _case(config, folder.name, ids, wide, device))
    bench_training(trained, False, _CONTENDERS, setting, ids)
    return {"tokens": ids.numel(), "device": device.type} | _figures(found)


def model_pair(folder: Path, dtype: str, device: torch.device) -> ModelPair:
    """A run's model beside the same weights in transformers' own class, with plain PyTorch blocks where that
    has none of their kind."""
    model, _ = load_model(str(folder), dtype=dtype, device=str(device))
    block = sparse_mlps(model)[0]
    if block.gated and block.activation.name in ("relu", "relu2"):
        return ModelPair(to_stock(model).to(device).eval(), model)
    dense = copy.deepcopy(model)
    for layer in decoder_layers(dense):
        layer.mlp = PlainBlock(layer.mlp)
    dense.l1_weight = 0.0
    return ModelPair(dense, model)


class PlainBlock(nn.Module):
    """A block as PyTorch runs it, with the weights of one of ours. It records no statistics."""

    record, last_stats = False, None  # what our model asks its blocks for

    def __init__(self, block: SparseMLP) -> None:
        super().__init__()
        self.activation = block.activation
        self.gate_proj, self.up_proj, self.down_proj = block.gate_proj, block.up_proj, block.down_proj
        for projection in (self.gate_proj, self.up_proj, self.down_proj):
            if projection is not None:  # ours lie in memory neuron by neuron
                projection.weight = nn.Parameter(projection.weight.detach().contiguous())

    def hidden(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        if self.gate_proj is None:
            return self.activation(up)
        return self.activation(self.gate_proj(x)) * (torch.relu(up) if self.activation.clamps_up else up)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.hidden(x))


def _case(config: RunConfig, name: str, ids: Tensor, precision: str, device: torch.device) -> TrainingCase:
    model = config.model
    size = ModelSize(
        hidden=model.hidden_size,
        neurons=model.intermediate_size,
        layers=model.layers,
        positions=model.positions,
    )
    return TrainingCase(
        size=size,
        name=name,
        batch=ids.shape[0],
        sequence=ids.shape[1],
        precision="mixed" if precision == "bfloat16" else "float32",
        device=device,
    )


def held_out_batch(config: RunConfig, shape: tuple[int, int]) -> tuple[Tensor, str]:
    """Token ids [B, S], and where they come from; text that is too short is repeated."""
    data = prepare(config.data, quiet=True)
    source = data.train if data.held_out is None else data.held_out
    sequences, length = shape
    origin = "training text" if data.held_out is None else "held-out text"
    pieces: list[Tensor] = []
    wanted, place = sequences * length, 0
    while sum(piece.numel() for piece in pieces) < wanted:
        pieces.append(torch.as_tensor(source[place % len(source)]["input_ids"]).flatten())
        place += 1
    if place > len(source):
        origin += ", repeated"
    return torch.cat(pieces)[:wanted].view(sequences, length), origin


def _figures(found: list[Measured]) -> dict[str, Any]:
    last = {one.key: one for one in found}  # a contender is emitted again when more is known
    result: dict[str, dict[str, Any]] = {}
    for one in merge(last.values()):
        entries = result.setdefault(one.first.workload, {})
        ours = one.first.contender == "ours-eager"
        kind = "ours" if ours else "dense"
        if one.detail("doubtful"):
            entries["failure"] = f"{kind} computes something else, so its speed means nothing"
            continue
        if one.failure is not None:
            entries["failure"] = f"{kind}: {one.failure}"
        entries[f"{kind}_tokens_per_ms"] = one.tokens_per_ms
        peak = one.detail("peak_bytes")
        if peak is not None:
            entries[f"{kind}_peak_bytes"] = peak
        if ours and one.gain is not None:
            entries |= {"gain": one.gain.middle, "low": one.gain.low, "high": one.gain.high}
            entries["sparse_share"] = one.detail("sparse_share")
            entries["difference"] = one.difference
    return result
