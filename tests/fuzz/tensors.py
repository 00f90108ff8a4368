"""The operands of a case, the same ones whenever it is run."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from twell.activations import Activation

from .case import Case

_ANCHOR = 4.0  # of the feature that shifts pre-activations
_HUGE = {torch.float16: 200.0, torch.bfloat16: 1e12, torch.float32: 1e12, torch.float64: 1e100}


def make_operands(case: Case) -> dict[str, Tensor]:
    """Operands by name, in the case's dtype, layouts and on its device."""
    place = "cuda" if case.device == "cuda" else "cpu"
    generator = torch.Generator(place).manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=place)

    features, neurons = case.features, case.neurons
    operands = {
        "x": normal(case.tokens, features),
        "up": normal(neurons, features) / features**0.5,
        "down": normal(case.outputs, neurons) / max(neurons * max(case.density, 0.02), 1) ** 0.5,
    }
    if case.gated:
        operands["gate"] = normal(neurons, features) / features**0.5
    for name in case.biases:
        operands[name] = normal(case.outputs if name == "down_bias" else neurons) / 4
    selector = operands["gate" if case.gated else "up"]
    operands["x"][:, 0] = _ANCHOR
    selector[:, 0] = _shift(case, normal) / _ANCHOR
    dtype = getattr(torch, case.dtype)
    operands = {name: tensor.to(dtype) for name, tensor in operands.items()}
    for number, (name, value) in enumerate(case.specials):
        _put(operands[name], value, random.Random(f"{case.seed} {number}"))
    operands["x"] = operands["x"].view(*case.leading, features)
    for name, layout in case.layouts:
        operands[name] = _laid_out(operands[name], layout)
    return operands


def _shift(case: Case, normal) -> Tensor:
    """[H]: what the first feature adds to the pre-activation of each neuron."""
    threshold = Activation.parse(case.activation).threshold
    if case.density <= 0:
        return normal(case.neurons) - 12
    if case.density >= 1:
        return normal(case.neurons) + 12 + threshold
    rate = torch.tensor(case.density, dtype=torch.float64)
    shift = normal(case.neurons) * (3 if case.skewed else 0)
    return shift + torch.special.ndtri(rate).item() + threshold


def _put(tensor: Tensor, value: str, place: random.Random) -> None:
    """`value` at a few places."""
    number = {
        "subnormal": torch.finfo(tensor.dtype).smallest_normal / 2,
        "huge": _HUGE[tensor.dtype],
    }.get(value)
    number = float(value) if number is None else number
    for _ in range(place.choice((1, 1, 2, 5))):
        if tensor.numel():
            tensor[tuple(place.randrange(size) for size in tensor.shape)] = number


def _laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same numbers in other strides; "expanded": the first entry of the first dimension for all."""
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "expanded" and tensor.dim() > 1 and tensor.shape[0]:
        return tensor[:1].expand(tensor.shape)
    if layout == "sliced":
        wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1] + 3)
        return wide[..., 1 : 1 + 2 * tensor.shape[-1] : 2].copy_(tensor)
    if layout == "offset":  # rows with something between them, that start at no multiple of 16 bytes
        wide = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 5)
        return wide[..., 1 : 1 + tensor.shape[-1]].copy_(tensor)
    return tensor


def make_weighting(case: Case, shape: torch.Size) -> Tensor:
    """The gradient of y, in float64; of few bits, so that it is the same in every dtype."""
    place = "cuda" if case.device == "cuda" else "cpu"
    generator = torch.Generator(place).manual_seed(case.seed + 1)
    if case.loss == "sum":
        return torch.ones(shape, dtype=torch.float64, device=place)
    return (torch.randn(shape, generator=generator, device=place) * 16).round().double() / 16
