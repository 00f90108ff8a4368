"""Recognises an activation function by what it returns, never by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..activations import Activation

_LARGEST = 64.0  # of the values that are tried
_HALVINGS = 80  # more than there are numbers of any dtype between 0 and _LARGEST, as powers of two

Function = Callable[[Tensor], Tensor]


class Recognised(NamedTuple):
    """activation(pre - shift) is what the function computes."""

    activation: Activation
    shift: float = 0.0

    @property
    def spec(self) -> str:
        return f"{self.activation.spec} of x - {self.shift:g}" if self.shift else self.activation.spec


def recognise(function: Function, dtype: torch.dtype, device: torch.device) -> Recognised | str:
    """What `function`, element by element, computes in `dtype`; or why no kernel of ours computes it."""
    values = _probe_values(dtype, device)
    result = function(values)
    if result.shape != values.shape or result.dtype != dtype:
        return "the activation changes shapes or dtypes"
    if not torch.equal(function(values.flip(0)), result.flip(0)):
        return "the activation does not work element by element"
    zero = result == 0
    if not bool(zero[values < 0].any()) or bool((zero & (values > _LARGEST / 2)).any()):
        return "the activation has no exact zeros (`twell.hf.relufy` replaces it by ReLU)"
    threshold = _largest_zero(function, dtype, device)
    for found in _candidates(values, result, threshold):
        if _agrees(function, found, values):
            return found
    return "the activation has exact zeros, but is none of relu, relu2, fatrelu(T) and relu(x - T)"


def _probe_values(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[n] of both signs, from tiny to _LARGEST, and 0."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(4096, generator=generator, dtype=torch.float64)
    scale = torch.logspace(-3, 1.2, 4096, dtype=torch.float64)
    line = torch.linspace(-_LARGEST, _LARGEST, 4097, dtype=torch.float64)
    values = torch.cat([spread * scale, line]).clamp(-_LARGEST, _LARGEST)
    return values.to(dtype=dtype, device=device)


def _largest_zero(function: Function, dtype: torch.dtype, device: torch.device) -> float:
    """The largest number of `dtype` below the smallest positive one that the function lets through."""

    def is_zero(value: float) -> bool:
        return bool(function(torch.tensor([value], dtype=dtype, device=device)) == 0)

    below, above = 0.0, _LARGEST
    for _ in range(_HALVINGS):
        middle = float(torch.tensor((below + above) / 2, dtype=torch.float64).to(dtype))
        if middle in (below, above):
            break
        below, above = (middle, above) if is_zero(middle) else (below, middle)
    # A square of a tiny number is zero, too: that is rounding, and no threshold.
    return below if below > torch.finfo(dtype).smallest_normal ** 0.5 else 0.0


def _candidates(values: Tensor, result: Tensor, threshold: float) -> list[Recognised]:
    if threshold == 0:
        return [Recognised(Activation("relu")), Recognised(Activation("relu2"))]
    large = values.argmax()
    shift = float(values[large].double() - result[large].double())
    exact = torch.tensor(shift, dtype=values.dtype)
    found = [Recognised(Activation("fatrelu", threshold))]
    return [*found, Recognised(Activation("relu"), float(exact))] if shift else found


def _agrees(function: Function, found: Recognised, values: Tensor) -> bool:
    near = torch.tensor([found.activation.threshold, found.shift], dtype=torch.float64)
    neighbours = torch.cat([near * (1 + k * torch.finfo(values.dtype).eps) for k in range(-4, 5)])
    values = torch.cat([values, neighbours.to(values)])
    wanted = found.activation(values - found.shift if found.shift else values)
    return torch.equal(function(values), wanted)
