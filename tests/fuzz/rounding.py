"""How far an honest computation may be from the exact one: the roundings of a block, followed through it.

Every number that is stored in the block's dtype is rounded once; sums are made in float32 (float64 for
float64), in any order. Errors are taken for independent, so their squares add: `spread` is the standard
deviation that this gives, per row of a result. What is nothing but luck for stock PyTorch, a single number
that needs no rounding say, is then no failure of ours.

A pre-activation next to the threshold may fall on either side, and so may an up that drelu clamps. `slack` is
by how much a result differs between all such pairs being active and none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from twell.activations import Activation

from .case import Case
from .run import L1_WEIGHT
from .tensors import make_weighting

_SUM_STEPS = 4  # roundings of a sum, in units of its terms' root of squares
_TILE_STEPS = 32  # the same on a GPU, where the 64 products of a tile are added one after the other
_NEAR = 4  # roundings that a pre-activation may be away from the threshold


@dataclass(frozen=True)
class Margins:
    """Per row of a result [R, C]: spread and slack, float64 [R]."""

    spread: Tensor
    slack: Tensor


class Block:
    """The block in float64 with its intermediate results, each with the variance of its roundings."""

    def __init__(self, case: Case, operands: dict[str, Tensor]) -> None:
        self.case = case
        dtype = getattr(torch, case.compute_dtype)
        self.tiny = torch.finfo(dtype).smallest_normal
        self.least = (self.tiny * torch.finfo(dtype).eps) ** 2 / 12  # of a number too small for all its bits
        self.unit = torch.finfo(dtype).eps ** 2 / 12
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        self.steps = _SUM_STEPS if case.device == "cpu" else _TILE_STEPS
        self.sum_unit = self.steps * torch.finfo(sums).eps ** 2 / 12
        self.epsilon, self.sum_epsilon = torch.finfo(dtype).eps, torch.finfo(sums).eps
        tensors = {name: t.detach().to(dtype).double() for name, t in operands.items()}
        self.x = tensors["x"].reshape(case.tokens, case.features)
        self.up, self.down, self.gate = tensors["up"], tensors["down"], tensors.get("gate")
        self.biases = {name: tensors.get(name) for name in ("up_bias", "down_bias", "gate_bias")}
        self.activation = Activation.parse(case.activation)
        name = "gate" if case.gated else "up"
        self.pre, self.pre_variance = self._project(tensors[name], self.biases[f"{name}_bias"])
        self.active = ~(self.pre <= self.activation.threshold)
        self.up_value = self.up_variance = None
        self.lifted = torch.ones_like(self.active)  # whether up is not clamped
        if case.gated:
            self.up_value, self.up_variance = self._project(self.up, self.biases["up_bias"])
            if self.activation.clamps_up:
                self.lifted = ~(self.up_value <= 0)

    def _project(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        value = self.x @ weight.mT
        terms = _finite(self.x).square() @ _finite(weight).square().mT
        if bias is not None:
            value, terms = value + bias, terms + _finite(bias).square()
        return value, self._stored(_finite(value)) + self.sum_unit * terms

    def _stored(self, value: Tensor) -> Tensor:
        """The variance of rounding `value` to the dtype."""
        return self.unit * value.square() + self.least

    @cached_property
    def near(self) -> Tensor:
        """bool [M, H]: pairs that may be active or not."""
        threshold = self.activation.threshold
        reach = _NEAR * (self.case.features * self.pre_variance * 12 / self.steps).sqrt()
        if self.unit > self.sum_unit:  # a variance is mostly that of storing the value, which keeps its sign
            terms = (self.pre_variance - self.unit * _finite(self.pre).square()).clamp_min(0)
            reach = _NEAR * (self.case.features * terms * 12 / self.steps).sqrt()
        reach = reach + 2 * self.epsilon * threshold
        near = (self.pre - threshold).abs() <= reach
        value = self.activation(self.pre)
        return near | ((value > 0) & (value < self.tiny))

    @cached_property
    def near_zero(self) -> Tensor:
        """bool [M, H]: pairs whose up may have either sign."""
        terms = (self.up_variance - self.unit * _finite(self.up_value).square()).clamp_min(0)
        if self.unit <= self.sum_unit:
            terms = self.up_variance
        reach = _NEAR * (self.case.features * terms * 12 / self.steps).sqrt()
        return self.up_value.abs() <= reach

    @cached_property
    def uncertain_lift(self) -> Tensor | None:
        """bool [M, H]: pairs whose up may be clamped or not."""
        if not self.activation.clamps_up:
            return None
        return self.near_zero | (self.up_value.abs() < self.tiny)

    @cached_property
    def uncertain_sign(self) -> Tensor | None:
        """bool [M, H]: pairs whose L1 may pull either way, or not at all."""
        if not self.case.gated or "l1" not in self.case.loss:
            return None
        hidden = self.activation(self.pre) * self.activation.factor(self.up_value)
        tiny = hidden.abs() < self.tiny
        if self.activation.clamps_up:
            return self.active & (self.uncertain_lift | (tiny & self.lifted))
        return self.active & (self.near_zero | tiny)

    @property
    def copies(self) -> int:
        """How often each token is there; of one feature, which is the same for all, all are alike."""
        if self.case.features == 1:
            return max(self.case.tokens, 1)
        expanded = ("x", "expanded") in self.case.layouts and len(self.case.leading) > 0
        return max(self.case.leading[0], 1) if expanded else 1

    @cached_property
    def independent_errors(self) -> Tensor:
        """[]: how many errors a result is made of: an active pair's is in all outputs of its token; one that
        is clamped has none."""
        return (self.active & self.lifted & self.pre.isfinite()).sum().double() / self.copies

    def results(self, active: Tensor | None = None, positive: bool | None = None) -> dict[str, Tensor]:
        """y, l1, gradients by name, and gradients of projections pair by pair, all of finite numbers.

        active: the pairs that are taken for active; positive: the sign of up where it is uncertain.
        """
        return {name: value for name, (value, _) in self._walk(active, positive).items()}

    def spreads(self) -> dict[str, Tensor]:
        """Of y, l1 and gradients by name, per row."""
        # Tokens that are all the same have the same errors, which add up instead.
        return {
            name: variance.sqrt() * self.copies**0.5
            for name, (_, variance) in self._walk(None, None).items()
            if not name.endswith("by pair")
        }

    def margins(self) -> dict[str, Margins]:
        spreads = self.spreads()
        slack = {name: torch.zeros_like(spread) for name, spread in spreads.items()}
        uncertain = self.near
        if self.uncertain_sign is not None:
            uncertain = uncertain | self.uncertain_sign
        if self.uncertain_lift is not None:
            uncertain = uncertain | (self.active & self.uncertain_lift)
        if bool(uncertain.any()):
            most = self.results(self.active | self.near, positive=True)
            least = self.results(self.active & ~self.near, positive=False)
            for name in slack:
                slack[name] = 2 * _row_norms(most[name] - least[name])
            for name in ("up", "gate"):
                if f"{name}_bias" in slack:
                    # In a bias' sum two pairs may cancel, and one alone may fall on the other side.
                    apart = most[f"{name} by pair"] - least[f"{name} by pair"]
                    slack[f"{name}_bias"] = 2 * apart.abs().sum(0)
        return {name: Margins(spread, slack[name]) for name, spread in spreads.items()}

    def _walk(self, active: Tensor | None, positive: bool | None) -> dict[str, tuple[Tensor, Tensor]]:
        """(value, variance per row) of every result."""
        case, sums = self.case, self.sum_unit
        on = self.active if active is None else active
        lifted = self.lifted
        if positive is not None and self.uncertain_lift is not None:
            lifted = torch.where(self.uncertain_lift, positive, lifted)
        pre, squared = _finite(self.pre), self.activation.name == "relu2"
        act = torch.where(on, pre.square() if squared else pre, 0.0)
        slope = torch.where(on, 2 * pre if squared else torch.ones_like(pre), 0.0)
        act_variance = slope.square() * self.pre_variance + self._stored(act)
        hidden, hidden_variance = act, act_variance
        up = up_variance = None
        if case.gated:
            up = torch.where(lifted, _finite(self.up_value), 0.0)
            rounds = lifted if self.uncertain_lift is None else lifted | self.uncertain_lift
            up_variance = torch.where(rounds, self.up_variance, 0.0)
            hidden = act * up
            hidden_variance = act_variance * up.square() + act.square() * up_variance
            hidden_variance = hidden_variance + self._stored(hidden)
        down = _finite(self.down)
        y = hidden @ down.mT
        terms = (hidden_variance + sums * hidden.square()) @ down.square().sum(0)
        if self.biases["down_bias"] is not None:
            bias = _finite(self.biases["down_bias"])
            y, terms = y + bias, terms + sums * bias.square().sum()
        tokens = max(case.tokens, 1)
        l1_variance = (hidden_variance + sums * hidden.square()).sum() / tokens**2
        results = {
            "y": (y, terms + self._stored(y).sum(1)),
            "l1": ((hidden.abs().sum() / tokens).view(1, 1), l1_variance.view(1)),
        }
        if case.trains:
            sign = hidden.sign()
            if up is not None:  # of an Inf, too
                sign = _finite((act * self.activation.factor(self.up_value)).sign())
            if positive is not None and self.uncertain_sign is not None:
                other = 0.0 if self.activation.clamps_up else -1.0
                sign = torch.where(self.uncertain_sign, 1.0 if positive else other, sign)
            variances = act_variance, up_variance, hidden_variance
            results |= self._gradients(act, slope, hidden, up, sign, lifted, variances)
        return results

    def _gradients(self, act, slope, hidden, up, sign, lifted, variances):
        act_variance, up_variance, hidden_variance = variances
        case, unit, sums = self.case, self.unit, self.sum_unit
        down, x, tokens = _finite(self.down), _finite(self.x), max(case.tokens, 1)
        grad_y = torch.zeros(case.tokens, case.outputs, dtype=x.dtype, device=x.device)
        if case.loss != "l1":
            grad_y = make_weighting(case, grad_y.shape)
        grad = grad_y @ down
        variance = sums * (grad_y.square() @ down.square())
        if "l1" in case.loss:
            step = L1_WEIGHT / tokens
            grad = grad + sign * step
            variance = variance + unit * step**2
        variance = variance + 2 * self._stored(grad)
        # A sum's gradient is the same for all tokens, as is that of L1, and so is its error.
        common = torch.full_like(self.up[:, 0], 2 * unit if "l1" in case.loss else 0.0)
        if case.loss == "sum" and case.tokens:
            common = (variance[0] / grad[0].square()).nan_to_num(0.0, 0.0, 0.0)
        if case.gated:
            select = grad * up * slope
            select_variance = variance * (up * slope).square() + grad.square() * (
                up_variance * slope.square()
            )
            if self.activation.name == "relu2":
                select_variance = select_variance + (grad * up).square() * 4 * self.pre_variance
            select_variance = select_variance + 2 * self._stored(select)
            act, act_variance = (torch.where(lifted, values, 0.0) for values in (act, act_variance))
            other = grad * act
            other_variance = variance * act.square() + grad.square() * act_variance
            other_variance = other_variance + self._stored(other)
            pairs = {"up": (other, other_variance), "gate": (select, select_variance)}
        else:
            select = grad * slope
            select_variance = variance * slope.square() + 2 * self._stored(select)
            if self.activation.name == "relu2":
                select_variance = select_variance + grad.square() * 4 * self.pre_variance
            pairs = {"up": (select, select_variance)}
        found = {}
        grad_x, x_variance = torch.zeros_like(x), x.new_zeros(x.shape[0])
        for name, (value, spread) in pairs.items():
            weight = _finite(getattr(self, name))
            part = value @ weight
            grad_x = grad_x + part
            x_variance = x_variance + (spread + sums * value.square()) @ weight.square().sum(1)
            x_variance = x_variance + self._stored(part).sum(1)
            rows, row_variance = self._summed(value, spread, x)
            found[name] = rows, row_variance + common * rows.square().sum(1)
            found[f"{name} by pair"] = value, row_variance
            total = value.sum(0)
            found[f"{name}_bias"] = (
                total.unsqueeze(1),
                (spread + sums * value.square()).sum(0) + self._stored(total) + common * total.square(),
            )
        found["x"] = grad_x, x_variance + self._stored(grad_x).sum(1)
        found["down"] = self._summed(grad_y, torch.zeros_like(grad_y), hidden, hidden_variance)
        total = grad_y.sum(0)
        found["down_bias"] = total.unsqueeze(1), sums * grad_y.square().sum(0) + self._stored(total)
        return found

    def _summed(self, left, left_variance, right, right_variance=None):
        """(value, variance per row) of left^T right, sums over tokens."""
        value = left.mT @ right
        rows = (left_variance + self.sum_unit * left.square()).mT @ right.square().sum(1)
        if right_variance is not None:
            rows = rows + left.square().mT @ right_variance.sum(1)
        return value, rows + self._stored(value).sum(1)

    def rounded_l1(self) -> Tensor:
        """[]: L1 of a block that rounds every number once, and as well as can be."""
        dtype = getattr(torch, self.case.compute_dtype)

        def stored(value: Tensor) -> Tensor:
            return value.to(dtype).double()

        hidden = stored(self.activation(stored(_finite(self.pre))))
        if self.up_value is not None:
            hidden = stored(hidden * self.activation.factor(stored(_finite(self.up_value))))
        return hidden.abs().sum() / max(self.case.tokens, 1)

    def must_not_be_finite(self) -> Tensor:
        """bool [M, E]: outputs of an active neuron that a NaN or Inf reaches."""
        hidden = self.activation(self.pre)
        if self.up_value is not None:
            hidden = hidden * self.activation.factor(self.up_value)
        reached = (self.active & ~hidden.isfinite()).any(1, keepdim=True)
        weights = (~self.down.isfinite()).double()
        through = self.active.double() @ weights.mT > 0
        bias = self.biases["down_bias"]
        return reached | through if bias is None else reached | through | ~bias.isfinite()


def _finite(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num(0.0, 0.0, 0.0)


def _row_norms(matrix: Tensor) -> Tensor:
    return matrix.square().sum(-1).sqrt()
