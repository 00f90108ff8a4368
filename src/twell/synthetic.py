"""Synthetic workloads whose sparsity looks like a trained model's, and recorded activation traces.

The neurons of a model trained with ReLU and L1 fire at very different rates. Independent neurons with
log-normal rates (sigma 2), 30% of them dead, rates clipped at one half and scaled to the wanted mean match
real text, in active neurons per token *and* per block of tokens.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ._errors import reject, require_positive_int

_BIAS_INPUT = 8.0  # value of the constant feature x[:, 0]; exact in bf16
_NEVER = 12.0  # normal quantile beyond which a neuron practically never (always) fires


@dataclass(frozen=True)
class SyntheticFfn:
    """Operands of one block: x [M, D], up and gate [H, D], down [D, H]; gate is None if not gated."""

    x: Tensor
    up: Tensor
    down: Tensor
    gate: Tensor | None

    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """In the order of `twell.ffn`'s positional arguments."""
        return self.x, self.up, self.down, self.gate


def firing_rates(
    neurons: int,
    nnz: float,
    *,
    sigma: float = 2.0,
    dead: float = 0.3,
    max_rate: float = 0.5,
    generator: torch.Generator | None = None,
) -> Tensor:
    """float64 [neurons]: probabilities of firing that sum to `nnz`.

    sigma:     standard deviation of the log-normal rates; 0 gives uniform rates.
    dead:      share of neurons that never fire.
    max_rate:  no neuron fires more often than this.
    """
    require_positive_int("neurons", neurons)
    if not 0 <= dead <= 1:
        reject("dead", dead, "a share in [0, 1]")
    if not 0 < max_rate <= 1:
        reject("max_rate", max_rate, "a probability in (0, 1]")
    if not 0 <= sigma < float("inf"):
        reject("sigma", sigma, "a finite number >= 0")
    shape = torch.exp(sigma * torch.randn(neurons, generator=generator, dtype=torch.float64, device="cpu"))
    alive = neurons - round(dead * neurons)
    shape[torch.randperm(neurons, generator=generator, device="cpu")[alive:]] = 0
    if not 0 <= nnz <= alive * max_rate:
        reject(
            "nnz",
            nnz,
            f"0 to {alive * max_rate:g} ({alive} living neurons at max_rate {max_rate:g}; "
            "lower dead or raise max_rate for more)",
        )
    if nnz == 0:
        return torch.zeros_like(shape)
    if nnz == alive * max_rate:
        return (shape > 0).double() * max_rate
    low, high = 0.0, 1.0
    while (shape * high).clamp(max=max_rate).sum() < nnz:
        high *= 2
    for _ in range(200):  # bisection on the scale
        middle = (low + high) / 2
        if (shape * middle).clamp(max=max_rate).sum() < nnz:
            low = middle
        else:
            high = middle
    return (shape * high).clamp(max=max_rate)


def make_ffn(
    tokens: int,
    hidden: int,
    neurons: int,
    nnz: float,
    *,
    gated: bool = True,
    sigma: float = 2.0,
    dead: float | None = None,
    max_rate: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> SyntheticFfn:
    """A block whose selector projection fires about `nnz` of `neurons` neurons per token.

    dead and max_rate default to 0.3 and 0.5, as in trained models, or to 0 and 1 where `nnz` needs more.
    x[:, 0] is constant, the other features are normal, and each selector row's weight on x[:, 0] shifts its
    pre-activation to the normal quantile of the neuron's firing rate.
    """
    require_positive_int("tokens", tokens)
    require_positive_int("hidden", hidden)
    if hidden < 2:
        reject("hidden", hidden, "at least 2 features")
    realistic = nnz <= 0.9 * 0.7 * 0.5 * neurons
    dead = dead if dead is not None else (0.3 if realistic else 0.0)
    max_rate = max_rate if max_rate is not None else (0.5 if realistic else 1.0)

    generator = torch.Generator("cpu").manual_seed(seed)
    rates = firing_rates(neurons, nnz, sigma=sigma, dead=dead, max_rate=max_rate, generator=generator)
    quantile = torch.special.ndtri(1 - rates).clamp(-_NEVER, _NEVER).float()

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

    x = normal(tokens, hidden)
    x[:, 0] = _BIAS_INPUT
    selector = normal(neurons, hidden) / hidden**0.5
    selector[:, 0] = -quantile * selector[:, 1:].norm(dim=1) / _BIAS_INPUT
    down = normal(hidden, neurons) / neurons**0.5
    up = normal(neurons, hidden) / hidden**0.5 if gated else selector

    def finish(tensor: Tensor) -> Tensor:
        return tensor.to(device=device, dtype=dtype)

    return SyntheticFfn(
        x=finish(x), up=finish(up), down=finish(down), gate=finish(selector) if gated else None
    )


@dataclass(frozen=True)
class ActivationTrace:
    """Which neurons fired, token by token (CSR without values).

    counts:   int64 [M]            active neurons of each token
    indices:  int64 [sum(counts)]  their neurons
    neurons:  H
    """

    counts: Tensor
    indices: Tensor
    neurons: int

    @property
    def tokens(self) -> int:
        return self.counts.numel()

    def mean_nnz(self) -> float:
        return self.indices.numel() / max(self.tokens, 1)

    def mask(self, start: int = 0, stop: int | None = None) -> Tensor:
        """bool [stop - start, H]: which neurons fired for the tokens start .. stop-1."""
        stop = self.tokens if stop is None else stop
        if not 0 <= start <= stop <= self.tokens:
            reject("start, stop", (start, stop), f"0 <= start <= stop <= {self.tokens}")
        first = int(self.counts[:start].sum())
        counts = self.counts[start:stop]
        rows = torch.repeat_interleave(counts)
        fired = torch.zeros(stop - start, self.neurons, dtype=torch.bool, device="cpu")
        fired[rows, self.indices[first : first + rows.numel()]] = True
        return fired


def load_trace(path: str | os.PathLike[str], neurons: int = 5632) -> ActivationTrace:
    """Read a trace file: an .npz with `cnt` [M] and `idx` [sum(cnt)] of unsigned integers."""
    with np.load(path) as archive:
        missing = {"cnt", "idx"} - set(archive.files)
        if missing:
            reject("path", f"{path} with arrays {archive.files}", "an .npz with arrays cnt and idx")
        for name in ("cnt", "idx"):
            if archive[name].dtype.kind != "u":
                reject("path", f"{path}: {name} of dtype {archive[name].dtype}", "unsigned integers")
        counts = torch.from_numpy(archive["cnt"].astype(np.int64))
        indices = torch.from_numpy(archive["idx"].astype(np.int64))
    if int(counts.sum()) != indices.numel():
        reject(
            "path",
            f"{path}: cnt sums to {int(counts.sum())}, idx has {indices.numel()} entries",
            "a trace whose cnt sums to the length of idx",
        )
    if indices.numel() and int(indices.max()) >= neurons:
        reject("neurons", neurons, f"more than the trace's largest index, {int(indices.max())}")
    return ActivationTrace(counts=counts, indices=indices, neurons=neurons)
