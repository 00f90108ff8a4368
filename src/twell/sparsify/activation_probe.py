"""Recognises an activation function by what it returns, never by its name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..activations import Activation

_LARGEST = 64.0  # of the values that are tried
_MIXES = "the activation does not work element by element"
_HALVINGS = 80  # more than there are numbers of any dtype between 0 and _LARGEST, as powers of two

Function = Callable[[Tensor], Tensor]


class Recognised(NamedTuple):
    """activation(pre - shift) is what the function computes; with drelu, times relu(up)."""

    activation: Activation
    shift: float = 0.0

    @property
    def spec(self) -> str:
        shifted = "gate" if self.activation.clamps_up else "x"
        return f"{self.activation.spec} of {shifted} - {self.shift:g}" if self.shift else self.activation.spec


def recognise(function: Function, dtype: torch.dtype, device: torch.device) -> Recognised | str:
    """What `function`, element by element, computes in `dtype`; or why no kernel of ours computes it."""
    in_place = function

    def function(values: Tensor) -> Tensor:  # it may write into what it is given
        return in_place(values.clone())

    values = _probe_values(dtype, device)
    result = function(values)
    if result.shape != values.shape or result.dtype != dtype:
        return "the activation changes shapes or dtypes"
    turned = function(values.flip(0)).flip(0)
    # Rounding apart: where an exponential is vectorised, its last elements may round otherwise.
    if not torch.allclose(turned, result, rtol=64 * torch.finfo(dtype).eps, atol=1e-6, equal_nan=True):
        return _MIXES
    zero = result == 0
    if not bool(zero[values < 0].all()) or bool((zero & (values > _LARGEST / 2)).any()):
        return "the activation has no exact zeros (`twell.hf.relufy` replaces it by ReLU)"
    if not torch.equal(turned, result):
        return _MIXES
    threshold, above, passed = _largest_zero(function, dtype, device)
    candidates = [Recognised(Activation("relu")), Recognised(Activation("relu2"))]
    if threshold:
        # The difference of two numbers that are near each other is exact.
        candidates = [Recognised(Activation("fatrelu", threshold))]
        if dtype in (torch.float32, torch.float64):  # in 16 bits a bias could not hold the shift
            candidates.append(Recognised(Activation("relu"), above - passed))
    for found in candidates:
        if _agrees(function, found, values):
            return found
    return "the activation has exact zeros, but is none of relu, relu2, fatrelu(T) and relu(x - T)"


def _probe_values(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[n] of both signs, from tiny to the dtype's largest, and 0."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(4096, generator=generator, dtype=torch.float64)
    scale = torch.logspace(-3, 1.2, 4096, dtype=torch.float64)
    line = torch.linspace(-_LARGEST, _LARGEST, 4097, dtype=torch.float64)
    most = math.log10(torch.finfo(dtype).max)
    large = torch.logspace(1.8, most - 0.1, 512, dtype=torch.float64)
    values = [(spread * scale).clamp(-_LARGEST, _LARGEST), line, large, -large]
    return torch.cat(values).to(dtype=dtype, device=device)


def _largest_zero(function: Function, dtype: torch.dtype, device: torch.device) -> tuple[float, float, float]:
    """The largest number of `dtype` that becomes zero, the next one, and what that becomes; all positive."""

    def result(value: float) -> float:
        return float(function(torch.tensor([value], dtype=dtype, device=device)))

    below, above = 0.0, _LARGEST
    for _ in range(_HALVINGS):
        middle = float(torch.tensor((below + above) / 2, dtype=torch.float64).to(dtype))
        if middle in (below, above):
            break
        below, above = (middle, above) if result(middle) == 0 else (below, middle)
    # The square of a tiny number is zero, too: that is rounding, and no threshold.
    threshold = below if below > torch.finfo(dtype).smallest_normal ** 0.5 else 0.0
    return threshold, above, result(above)


def _agrees(function: Function, found: Recognised, values: Tensor) -> bool:
    """On `values` and next to the threshold: bit by bit; a shifted one up to rounding."""
    threshold = found.activation.threshold
    epsilon = torch.finfo(values.dtype).eps
    near = torch.tensor([threshold * (1 + k * epsilon) for k in range(-4, 5)], dtype=torch.float64)
    values = torch.cat([values, near.to(values)])
    result = function(values)
    if not found.shift:
        return torch.equal(result, found.activation(values))
    values, result = values.double(), result.double()
    wanted = found.activation(values - found.shift)
    close = (result - wanted).abs() <= epsilon * (values.abs() + found.shift)
    return bool((close | (result == wanted)).all())
