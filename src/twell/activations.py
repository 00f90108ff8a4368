"""The sparse activations: `relu`, `relu2` (squared ReLU), `fatrelu(threshold)` and `drelu`.

Each is exactly zero up to a threshold; a neuron at zero is *inactive*. A NaN is never inactive: comparisons
are written so that it stays in the active set and reaches the output.

`drelu` is for gated blocks: hidden = relu(gate) * relu(up). The gate alone says which neurons are active: one
with gate > 0 and up <= 0 counts as active, and its hidden value is 0.

A new activation needs:

    here                        its name, spelling, value and derivative; its factor, of what multiplies it
    kernels/gpu/operands        numbers and flags (threshold, square, plain) that launchers hand to kernels
    kernels/gpu/triton/common   `activate`; `activate_stored` where PLAIN
    kernels/gpu/hopper/common   `activate`; where PLAIN, hopper/select
    triton/, hopper/combine     its derivative
    sparsify/activation_probe   how to recognise it in stock code; sparsify/proof: its factor
    hf/config, hf/convert       its stock names, and what stock classes lack

Both select kernels (triton/, hopper/) assume one threshold: an activation that is zero up to it and monotone,
so that the largest pre-activation decides for a block of tokens. Elsewhere `pre <= threshold` says inactive:
in triton/ and hopper/products and combine, `count_unions` in triton/statistics, and kernels/cpu/backward.
Where drelu's up is clamped: CLAMP_UP in products, decode and combine of triton/ and hopper/, in triton/hidden
and row/apply, `up_factor` in kernels/cpu/weights, and `factor` elsewhere.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from ._errors import reject, require_choice

_NAMES = ("relu", "relu2", "fatrelu", "drelu")
_FATRELU = re.compile(r"fatrelu\((?P<threshold>[^()]+)\)")
_ACCEPTED = "'relu' | 'relu2' | 'fatrelu(THRESHOLD)' with THRESHOLD >= 0 | 'drelu', or a twell.Activation"


@dataclass(frozen=True)
class Activation:
    """A sparse activation function.

    name:       "relu", "relu2", "fatrelu", or "drelu": relu(gate) * relu(up), for gated blocks only.
    threshold:  values at or below it become 0; only fatrelu takes one other than 0.
    """

    name: str = "relu"
    threshold: float = 0.0

    def __post_init__(self) -> None:
        require_choice("activation", self.name, _NAMES)
        if not 0 <= self.threshold < float("inf"):
            reject("activation threshold", self.threshold, "a finite number >= 0")
        if self.name != "fatrelu" and self.threshold != 0:
            reject("activation threshold", self.threshold, f"0 for {self.name!r}")

    @staticmethod
    def parse(spec: str | Activation) -> Activation:
        """Read "relu", "relu2", "fatrelu(0.1)" or "drelu"; an `Activation` passes through."""
        if isinstance(spec, Activation):
            return spec
        if not isinstance(spec, str):
            reject("activation", f"a {type(spec).__name__}", _ACCEPTED)
        if spec in ("relu", "relu2", "drelu"):
            return Activation(spec)
        match = _FATRELU.fullmatch(spec.replace(" ", ""))
        if match is None:
            reject("activation", repr(spec), _ACCEPTED)
        try:
            threshold = float(match["threshold"])
        except ValueError:
            reject("activation", repr(spec), _ACCEPTED)
        return Activation("fatrelu", threshold)

    @property
    def spec(self) -> str:
        """The string that `parse` reads, and that registered ops carry."""
        return f"fatrelu({self.threshold!r})" if self.name == "fatrelu" else self.name

    def __call__(self, pre: Tensor) -> Tensor:
        """Apply to pre-activations of any shape; differentiable. Those of the gate, in a gated block."""
        if self.name == "relu":
            return torch.relu(pre)
        if self.name == "relu2":
            return torch.relu(pre).square()
        if self.name == "fatrelu":
            return torch.where(self._inactive(pre), 0.0, pre)
        return torch.relu(pre)

    def apply_(self, pre: Tensor) -> Tensor:
        """Apply in place (no autograd) and return `pre`."""
        if self.name == "relu":
            return pre.relu_()
        if self.name == "relu2":
            return pre.relu_().square_()
        if self.name == "fatrelu":
            return pre.masked_fill_(self._inactive(pre), 0.0)
        return pre.relu_()

    def backward(self, grad: Tensor, pre: Tensor) -> Tensor:
        """The gradient of `pre` from the activation's, masked as autograd does it (0 at the kink): an Inf in
        `grad` gives 0, not NaN, where the activation is inactive."""
        return torch.where(self._inactive(pre), 0.0, grad * (2 * pre) if self.name == "relu2" else grad)

    @property
    def clamps_up(self) -> bool:
        """Whether up goes through ReLU, too."""
        return self.name == "drelu"

    def factor(self, up: Tensor) -> Tensor:
        """What multiplies the activation of the gate; differentiable."""
        return torch.relu(up) if self.name == "drelu" else up

    def factor_(self, up: Tensor) -> Tensor:
        """`factor` in place (no autograd); returns `up`."""
        return up.relu_() if self.name == "drelu" else up

    def factor_backward(self, grad: Tensor, up: Tensor) -> Tensor:
        """The gradient of `up` from its factor's, masked as in `backward`."""
        return torch.where(up <= 0, 0.0, grad) if self.name == "drelu" else grad

    def check_gated(self, gated: bool) -> None:
        """Refuse a block without the gate that this activation needs."""
        if not gated and self.name == "drelu":
            accepted = "'relu' | 'relu2' | 'fatrelu(THRESHOLD)'; 'drelu' for gated blocks only"
            reject("activation", "'drelu' for a non-gated block", accepted)

    def _inactive(self, pre: Tensor) -> Tensor:
        # torch rounds the scalar to the tensor's dtype, possibly up past values that are above the threshold.
        return pre <= largest_at_most(self.threshold, pre.dtype)


def largest_at_most(value: float, dtype: torch.dtype) -> float:
    """The largest number of `dtype` that is at most `value` (>= 0)."""
    limits = torch.finfo(dtype)
    if value >= limits.max:
        return limits.max
    _, exponent = math.frexp(value)  # value = m * 2**exponent with 0.5 <= m < 1
    spacing = max(math.ldexp(limits.eps, exponent - 1), limits.smallest_normal * limits.eps)
    return math.floor(value / spacing) * spacing


def fatrelu(threshold: float) -> Activation:
    """x where x > threshold (or NaN), else 0."""
    return Activation("fatrelu", float(threshold))
