"""Which path finishes a chunk of tokens on the CPU, from how many neurons are active.

How fast a sparse path is beside the dense one differs by machine more than any constant could say: at
D 1024, H 4096 in fp32 the row path breaks even near 15% active neurons on 2 Zen 3 cores and near 7% on 16
Sapphire Rapids cores. So the limits are measured, once per process, the first time a call of their
kind (dtype, layout, size of the batch, threads) has to choose: 0.1 to 0.4 s on an idle machine. Paths
round differently in the last bit; name one in a `Plan` where results must not depend on the machine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ..activations import Activation
from .args import FfnArgs
from .cpu_multiply import PROBE_LOCK, probe_numbers
from .cpu_paths import finish_block, finish_dense, finish_row, finish_single_row
from .cpu_weights import CpuSite, WeightViews

_log = logging.getLogger("twell")

# What a core does on the dense finish, fp32: reads 10 GB/s of cold weights (2 Zen 3 cores 15 in all, 16
# Sapphire Rapids cores 180), multiplies at 60 GFLOP/s (139 and 900 in all).
_READ_BYTES_PER_CORE = 10e9
_FLOPS_PER_CORE = 60e9
# What the sparse finish costs before its first product: some 15 small operations and the op around them,
# 0.25 ms on the former machine, 0.28 on the latter, where 1 token at D 1024, H 4096 takes 0.26 ms densely.
_SPARSE_OVERHEAD_SECONDS = 0.4e-3

_LIMIT_CEILING = 0.25  # the probes end at 10%: do not extrapolate far beyond
_MARGIN = 0.9  # a sparse path must be expected to take at most this share of the dense time
_PROBE_HIDDEN, _PROBE_NEURONS = 1024, 2048
_PROBE_DENSITIES = (0.01, 0.1)
_PROBE_UNION = 0.25  # share of neurons that the block path is probed with
_PROBE_REPETITIONS = 5
_PROBE_BUCKETS = (1, 4, 16, 64, 256)  # tokens that stand for themselves and all up to the next
_COLD_TOKENS = 64  # below, weights come from memory, so a probe rotates among several sets
# The row path adds a token's rows one after the other. Its fp32 error over stock's, D 512: 614 active
# neurons (H 4096) 1.3, 1,024 (H 8192) 1.5, 4,300 (H 28672) 2.6.
_ROW_MAX_ACTIVE = 1024
_MANY_TOKENS = 64  # the block path needs full blocks


def sparse_can_pay(site: CpuSite) -> bool:
    """Whether the products that sparsity may save take longer than looking for it costs.

    Never with 16-bit matrix units: 16 Sapphire Rapids cores, bf16, 2048 tokens, 1% active 0.88x.
    """
    if site.native_16_bit:
        return False
    weights = (2 if site.gated else 1) * site.hidden * site.neurons
    reading = weights * site.dtype.itemsize / (_READ_BYTES_PER_CORE * site.threads)
    multiplying = 2 * site.tokens * weights / (_FLOPS_PER_CORE * site.threads)
    return max(reading, multiplying) >= _SPARSE_OVERHEAD_SECONDS


def choose(active: Tensor, count: int, block_rows: int, site: CpuSite) -> str:
    """ "row", "block" or "dense" for one chunk; active: bool [m, H] with `count` True entries."""
    tokens, neurons = active.shape
    density = count / max(tokens * neurons, 1)
    if row_wins(count / max(tokens, 1), density, site):
        return "row"
    # A block's union is at least as large as its mean density.
    if tokens < _MANY_TOKENS or density > _PROBE_UNION or not block_pays(site):
        return "dense"
    unions = [active[start : start + block_rows].any(dim=0) for start in range(0, tokens, block_rows)]
    mean_union = sum(int(union.sum()) for union in unions) / len(unions)
    return "block" if mean_union <= _PROBE_UNION * neurons else "dense"


def row_wins(active: float, density: float, site: CpuSite) -> bool:
    """Whether the row path is fast and accurate enough; active: mean active neurons per token."""
    return active <= _ROW_MAX_ACTIVE and density <= row_limit(site)


def row_limit(site: CpuSite) -> float:
    """The share of active neurons up to which the row path beats the dense finish here."""
    with PROBE_LOCK:
        return _row_limit(_probe_site(site))


def block_pays(site: CpuSite) -> bool:
    """Whether the block path beats the dense finish here when blocks use a quarter of the neurons."""
    with PROBE_LOCK:
        return _block_pays(_probe_site(site))


def _probe_site(site: CpuSite) -> CpuSite:
    """The site whose measurement stands for `site`."""
    bucket = max(b for b in _PROBE_BUCKETS if b <= max(site.tokens, 1))
    return replace(site, tokens=bucket, hidden=_PROBE_HIDDEN, neurons=_PROBE_NEURONS)


@lru_cache(maxsize=64)
def _row_limit(site: CpuSite) -> float:
    begun = time.perf_counter()
    layers = _probe_layers(site)
    low, high = _PROBE_DENSITIES
    dense = _seconds(layers, _dense_finish, _activations(site, high))
    at_low = _seconds(layers, _row_finish, _activations(site, low))
    at_high = _seconds(layers, _row_finish, _activations(site, high))
    per_density = max((at_high - at_low) / (high - low), 1e-9)
    limit = low + (_MARGIN * dense - at_low) / per_density
    limit = min(max(limit, 0.0), _LIMIT_CEILING)
    _log.info(
        "twell: measured the CPU in %.2f s: %s, %d+ tokens, %d threads: row path up to %.1f%% active",
        time.perf_counter() - begun,
        site.dtype,
        site.tokens,
        site.threads,
        100 * limit,
    )
    return limit


@lru_cache(maxsize=64)
def _block_pays(site: CpuSite) -> bool:
    layers = _probe_layers(site)
    activated = _activations(site, 0.5)
    activated[:, int(_PROBE_UNION * site.neurons) :] = 0
    dense = _seconds(layers, _dense_finish, activated)
    return _seconds(layers, _block_finish, activated) <= _MARGIN * dense


def _probe_layers(site: CpuSite) -> list[FfnArgs]:
    """Operands of `site`'s kind; several sets where a real model's would not be in the cache."""
    sets = 4 if site.tokens < _COLD_TOKENS else 1
    neuron_rows = probe_numbers(site.neurons, site.hidden).to(site.dtype)
    x = probe_numbers(site.tokens, site.hidden).to(site.dtype)
    layers = []
    for _ in range(sets):
        up = neuron_rows.clone()
        down = neuron_rows.clone().mT if site.neuron_major_down else neuron_rows.mT.contiguous()
        gate = up if site.gated else None
        layers.append(FfnArgs(x, up, down, gate, None, None, None, Activation()))
    return layers


def _activations(site: CpuSite, density: float) -> Tensor:
    drawn = probe_numbers(site.tokens, site.neurons)
    activated = torch.where(drawn < density, 1.0 - drawn, 0.0)
    return activated.to(site.projection_dtype)


def _seconds(
    layers: list[FfnArgs], finish: Callable[[WeightViews, Tensor], Tensor], activated: Tensor
) -> float:
    """The least time of one finish over a few rounds through the layers, copies of weights included."""
    best = float("inf")
    for _ in range(1 + _PROBE_REPETITIONS):  # the first is slower: that is its warm-up
        copies = [activated.clone() for _ in layers]  # a dense finish works in place
        begun = time.perf_counter()
        for args, copy in zip(layers, copies, strict=True):
            finish(WeightViews(args, tuned=True), copy)
        best = min(best, time.perf_counter() - begun)
    return best / len(layers)


def _dense_finish(weights: WeightViews, activated: Tensor) -> Tensor:
    return finish_dense(weights.x, activated, weights, None)


def _row_finish(weights: WeightViews, activated: Tensor) -> Tensor:
    if activated.shape[0] == 1:
        neurons = activated[0].nonzero().squeeze(1)
        return finish_single_row(weights.x, activated, neurons, weights, None)
    active = activated != 0
    return finish_row(weights.x, activated, active, int(torch.count_nonzero(active)), weights, None)


def _block_finish(weights: WeightViews, activated: Tensor) -> Tensor:
    return finish_block(weights.x, activated, activated != 0, _MANY_TOKENS, weights, None)
