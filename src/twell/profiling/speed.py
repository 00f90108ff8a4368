"""Times a block on its own input against dense PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor

from .._interval import paired_gain
from ..explanation import dense_as_stock
from ..functional import run_ffn
from ..layer_state import LayerState
from ..measure.timing import compare, speedup
from ..nn import SparseMLP
from ..plan import Plan
from ..problem import Tensors
from ..shares import active_neurons
from .schema import FEWEST_LAYERS, Correlation, LayerProfile, Speed

PAPER_CORRELATION = -0.996  # between a layer's nnz and its speed-up, with the paper's kernels
_SETTLING = 5  # calls after which an automatic plan has read how active the layer is
_ALIKE = 1.1  # times the least active layer: within that, nnz tells layers apart no more than noise does
# A CPU takes a second for 1,024 tokens of a large block.
_MOST_TOKENS = {"cpu": 1024, "cuda": 65_536}


def measure_speed(block: SparseMLP, x: Tensor, weights: Tensors, repetitions: int) -> Speed:
    """x [M, D]; dense reads `down` as stock modules store it, ours as `SparseMLP` does."""
    x = x[: _MOST_TOKENS[x.device.type]]
    up, down, *rest = weights
    stock = (up, down.contiguous(), *rest)
    sparse_path = "block" if x.is_cuda else "row"
    named = Plan(path=sparse_path)
    state, auto_state = LayerState(), block._own_layer()
    calls = {
        "dense": lambda: dense_as_stock(x, stock, block.activation),
        "sparse": lambda: run_ffn((x, *weights), block.activation, named, record=False, layer=state),
        "auto": lambda: run_ffn((x, *weights), block.activation, None, record=False, layer=auto_state),
    }
    for _ in range(_SETTLING if x.is_cuda else 0):
        calls["auto"]()
        torch.cuda.synchronize(x.device)  # readings arrive behind their kernels
    times = compare(calls, device=x.device, warmup=3 if x.is_cuda else 1, repetitions=repetitions)
    interval = paired_gain([times["dense"].samples], [times["auto"].samples])
    ran = auto_state.ran["forward"]
    return Speed(
        tokens=len(x),
        nnz=float(active_neurons(block, x, weights).sum()) / len(x),
        dense_ms=times["dense"].median * 1e3,
        sparse_path=sparse_path,
        sparse_ms=times["sparse"].median * 1e3,
        sparse_speedup=speedup(times["dense"], times["sparse"]),
        auto_path="by its activations" if ran.path == "auto" else ran.path,
        auto_ms=times["auto"].median * 1e3,
        auto_speedup=speedup(times["dense"], times["auto"]),
        reason=ran.reason,
        auto_low=interval.low,
        auto_high=interval.high,
    )


def correlation_of(layers: Sequence[LayerProfile]) -> Correlation | None:
    """None if nothing was timed."""
    speeds = [layer.speed for layer in layers if layer.speed is not None]
    if not speeds:
        return None
    nnz = [speed.nnz for speed in speeds]
    if max(nnz) <= _ALIKE * min(nnz):
        return Correlation(sparse=None, auto=None, paper=PAPER_CORRELATION)
    return Correlation(
        sparse=pearson(nnz, [speed.sparse_speedup for speed in speeds]),
        auto=pearson(nnz, [speed.auto_speedup for speed in speeds]),
        paper=PAPER_CORRELATION,
    )


def pearson(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """None for few points, or where one side does not vary."""
    if len(xs) < FEWEST_LAYERS:
        return None
    mean_x, mean_y = fmean(xs), fmean(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    spread = math.sqrt(sum((x - mean_x) ** 2 for x in xs) * sum((y - mean_y) ** 2 for y in ys))
    return covariance / spread if spread else None
