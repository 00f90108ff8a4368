"""Up to which share of active neurons sparse beats dense, as measured.

CPU: at D 1024, H 4096 in fp32 the row path breaks even near 15% active on 2 Zen 3 cores and near 7% on 16
Sapphire Rapids cores. So each limit is measured (`kernels.cpu.measurements`) the first time a call of its
kind (dtype, layout, size, threads) has to choose.

GPU: a neuron counts as active if any token of a block activates it. Built-in limits were measured on an H200
(bf16, GPU time; decode at four shapes, 768 to 8,191 tokens at D 2048, H 5632 only). `twell tune` measures the
GPU at hand and stores its limits in the cache folder, by GPU, version and shape; `twell tune --training` does
so for training steps. GPUs that are neither Hopper nor tuned run dense. `policy/gpu` says which GPUs may use
the built-in limits, and has the built-in limits of training.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ._files import cache_folder, write_json
from ._version import __version__
from .activations import Activation
from .kernels.cpu import measurements
from .kernels.cpu.forward import finish_block, finish_dense, finish_row, finish_single_row
from .kernels.cpu.measurements import least_seconds, measure_again, random_floats
from .kernels.cpu.weights import CpuSite, WeightViews
from .problem import FfnArgs

# CPUs

_LIMIT_CEILING = 0.25  # probes end at 10%: no extrapolation far beyond
_USUAL_LIMIT = 0.05  # below both limits above; counts where noise spoils the measurement
_MARGIN = 0.9  # a sparse path must take at most this share of the dense time
# Probes run at the largest powers of two up to a block's sizes, within these bounds.
_PROBE_HIDDEN, _PROBE_NEURONS = (128, 2048), (256, 4096)
_PROBE_DENSITIES = (0.01, 0.1)
PROBE_UNION = 0.25  # share of active neurons at which the block path is probed
PROBE_BUCKETS = (1, 4, 16, 64, 256)  # each stands for all numbers of tokens up to the next
_COLD_TOKENS = 64  # with fewer, weights come from memory, so a probe rotates among several sets
MANY_TOKENS = 64  # the block path needs full blocks


def row_limit(site: CpuSite) -> float:
    """The share of active neurons up to which the row path beats the dense finish here."""
    probe = _probe_site(site)
    return measurements.measured(
        _name("row limit", probe), lambda: _measure_row_limit(probe), otherwise=0.0, usual=_USUAL_LIMIT
    )


def block_pays(site: CpuSite) -> bool:
    """Whether the block path beats the dense finish here when blocks use a quarter of the neurons."""
    probe = _probe_site(site)
    gain = measurements.measured(
        _name("dense over block", probe), lambda: _measure_block_gain(probe), otherwise=0.0
    )
    return _gain_pays(gain)


def remeasure(site: CpuSite) -> tuple[float, bool]:
    """Measure `row_limit` and `block_pays` again, and keep the new numbers."""
    probe = _probe_site(site)
    limit = measure_again(_name("row limit", probe), lambda: _measure_row_limit(probe))
    if probe.tokens < MANY_TOKENS:
        return limit, False
    gain = measure_again(_name("dense over block", probe), lambda: _measure_block_gain(probe))
    return limit, _gain_pays(gain)


def _gain_pays(gain: float) -> bool:
    return gain * _MARGIN >= 1


@lru_cache(maxsize=1024)
def _probe_site(site: CpuSite) -> CpuSite:
    """The site whose measurement stands for `site`."""
    bucket = max(b for b in PROBE_BUCKETS if b <= max(site.tokens, 1))
    return site._replace(
        tokens=bucket,
        hidden=_power_of_two(site.hidden, *_PROBE_HIDDEN),
        neurons=_power_of_two(site.neurons, *_PROBE_NEURONS),
    )


def _power_of_two(size: int, least: int, most: int) -> int:
    return min(max(1 << (size.bit_length() - 1), least), most)


@lru_cache(maxsize=1024)
def _name(what: str, site: CpuSite) -> str:
    kind = "gated" if site.gated else "plain"
    down = "neuron-major" if site.neuron_major_down else "row-major"
    dtype = str(site.dtype).removeprefix("torch.")
    units = ", 16-bit units" if site.native_16_bit else ""
    return (
        f"{what}: {dtype}{units}, {kind}, {down} down, {site.tokens}+ tokens, D {site.hidden}, "
        f"H {site.neurons}, {site.threads} threads"
    )


def _measure_row_limit(site: CpuSite) -> float:
    layers = _probe_layers(site)
    low, high = (_activations(site, density) for density in _PROBE_DENSITIES)
    dense, at_low, at_high = _seconds(layers, (_dense_finish, high), (_row_finish, low), (_row_finish, high))
    return row_and_dense_meet(dense, at_low, at_high)


def row_and_dense_meet(dense: float, at_low: float, at_high: float) -> float:
    """The share of active neurons up to which a row path with these times pays."""
    low, high = _PROBE_DENSITIES
    per_density = max((at_high - at_low) / (high - low), 1e-9)
    return min(max(low + (_MARGIN * dense - at_low) / per_density, 0.0), _LIMIT_CEILING)


def _measure_block_gain(site: CpuSite) -> float:
    layers = _probe_layers(site)
    activated = _activations(site, 0.5)
    activated[:, int(PROBE_UNION * site.neurons) :] = 0
    dense, block = _seconds(layers, (_dense_finish, activated), (_block_finish, activated))
    return dense / block


def _probe_layers(site: CpuSite) -> list[FfnArgs]:
    """Operands of `site`'s kind; several sets where a real model's weights would not be in the cache."""
    sets = 4 if site.tokens < _COLD_TOKENS else 1
    neuron_rows = random_floats(site.neurons, site.hidden).to(site.dtype)
    x = random_floats(site.tokens, site.hidden).to(site.dtype)
    layers = []
    for _ in range(sets):
        up = neuron_rows.clone()
        down = neuron_rows.clone().mT if site.neuron_major_down else neuron_rows.mT.contiguous()
        gate = up if site.gated else None
        layers.append(FfnArgs(x, up, down, gate, None, None, None, Activation()))
    return layers


def _activations(site: CpuSite, density: float) -> Tensor:
    drawn = random_floats(site.tokens, site.neurons)
    activated = torch.where(drawn < density, 1.0 - drawn, 0.0)
    return activated.to(site.projection_dtype)


Finish = Callable[[WeightViews, Tensor], Tensor]


def _seconds(layers: list[FfnArgs], *finishes: tuple[Finish, Tensor]) -> list[float]:
    """The least seconds of each finish on its activations, copies of weights included."""

    def run(finish: Finish, activated: Tensor) -> float:
        copies = [activated.clone() for _ in layers]  # a dense finish works in place
        begun = time.perf_counter()
        for args, copy in zip(layers, copies, strict=True):
            finish(WeightViews(args, tuned=True), copy)
        return (time.perf_counter() - begun) / len(layers)

    return least_seconds(*(partial(run, *finish) for finish in finishes))


def _dense_finish(weights: WeightViews, activated: Tensor) -> Tensor:
    return finish_dense(weights.x, activated, weights, None)


def _row_finish(weights: WeightViews, activated: Tensor) -> Tensor:
    if activated.shape[0] == 1:
        neurons = activated[0].nonzero().squeeze(1)
        return finish_single_row(weights.x, activated, neurons, weights, None)
    active = activated.bool()
    return finish_row(weights.x, activated, active, int(torch.count_nonzero(active)), weights, None)


def _block_finish(weights: WeightViews, activated: Tensor) -> Tensor:
    return finish_block(weights.x, activated, activated.bool(), MANY_TOKENS, weights, None)


# GPUs

# tokens -> share, measured in CUDA graphs on an H200 and set a little lower. Decode at D 2048: sparse pays up
# to about 0.7, with 33 to 64 tokens up to 0.4. Wide layers leave no room for x of more than 16 tokens beside
# the weights: about 0.25 and 0.15. Many tokens (whole blocks of 128, and their shares): 768 to 1,024 1.2x at
# 0.28 and 0.97x at 0.46; 1,536 1.38x at 0.46; from 8,192 on as fast as dense with everything active. Wide
# layers (D 4096 and 5120, 8,192 tokens): 1.18x at 0.75, 0.97x with everything active.
_MANY = {65: 0.0, 768: 0.35, 1536: 0.6, 4096: 0.8, 8192: 1.0}
_MANY_WIDE = {**_MANY, 8192: 0.85}
_HOPPER = {1: 0.5, 33: 0.25, **_MANY}
_HOPPER_WIDE = {1: 0.4, 17: 0.15, 33: 0.08, **_MANY_WIDE}
_WIDE = 2048  # layers with more features are wide
_DECODE_MEASURED = range(1024, 5633)  # features; beyond, x of 16 tokens does not fit either
_HOPPER_UNKNOWN = {1: 0.0, **_MANY_WIDE}
# Other GPUs were not measured: dense until `twell tune` has run.
_OTHER = {1: 0.0}


class Shape(NamedTuple):
    """The key of tuned limits: D, H, whether the block has a gate, and whether they are of training steps."""

    hidden: int
    neurons: int
    gated: bool
    training: bool = False

    @property
    def name(self) -> str:
        kind = f"{'' if self.gated else ' plain'}{' training' if self.training else ''}"
        return f"{self.hidden}x{self.neurons}{kind}"


def share_limit(gpu: str, measured: bool, shape: Shape, tokens: int) -> float:
    """The largest share of active neurons at which `tokens` tokens run sparse.

    measured: whether Hopper's built-in limits apply where this very shape was not tuned; else 0.
    """
    built_in = _built_in(shape.hidden) if measured else _OTHER
    return _at(_tuned(gpu).get(shape.name) or built_in, tokens)


def training_limit(gpu: str, shape: Shape, tokens: int) -> float | None:
    """The share up to which training steps of `tokens` tokens run sparse; None if this was not tuned."""
    table = _tuned(gpu).get(shape._replace(training=True).name)
    return None if not table else _at(table, tokens)


def _at(table: dict[int, float], tokens: int) -> float:
    """The entry of the nearest smaller count; fewer tokens than any take the first."""
    known = [count for count in table if count <= max(tokens, min(table))]
    return table[max(known)]


def _built_in(hidden: int) -> dict[int, float]:
    if hidden not in _DECODE_MEASURED:
        return _HOPPER_UNKNOWN
    return _HOPPER if hidden <= _WIDE else _HOPPER_WIDE


def cache_file(gpu: str) -> Path | None:
    """Where `twell tune` keeps the limits of a GPU; None without a cache folder."""
    folder, name = cache_folder(), gpu.replace(" ", "-").replace("/", "-")
    return None if folder is None else folder / f"limits-{name}-{__version__}.json"


def store(gpu: str, shape: Shape, limits: dict[int, float]) -> Path | None:
    """Keep tuned limits, other shapes' too; they apply in this process at once."""
    path = cache_file(gpu)
    if path is not None:
        kept = {**_tuned(gpu), shape.name: limits}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, kept)
        _tuned.cache_clear()
    return path


def tuned_shapes(gpu: str) -> list[str]:
    """The shapes that `twell tune` has measured on this GPU."""
    return sorted(_tuned(gpu))


@lru_cache(maxsize=16)
def _tuned(gpu: str) -> dict[str, dict[int, float]]:
    """shape -> tokens -> share; empty without a readable file."""
    path = cache_file(gpu)
    try:
        stored = json.loads(path.read_text()) if path is not None else {}
        return {
            shape: {int(tokens): float(share) for tokens, share in table.items()}
            for shape, table in stored.items()
        }
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
