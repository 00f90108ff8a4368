"""Our block on the projections of a stock block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..low_rank import Adapted
from ..nn import SparseMLP
from ..plan import Plan
from ..projections import Projection, base_of
from .activation_probe import Recognised
from .roles import Roles

WRAPPED = "a projection is no longer plain (wrapped, parametrised, patched or hooked)"


class BlockTwin(SparseMLP):
    """A `SparseMLP` whose projections are those of a stock model. No module of the model holds it as a child.

    roles:      its projections.
    recognised: its activation, and what is subtracted before it.
    one_dtype:  whether it was recognised in the dtype of its weights only; so is an activation with a
                threshold, which may lie elsewhere in another.
    """

    def __init__(
        self, roles: Roles, recognised: Recognised, plan: Plan | None, one_dtype: bool = False
    ) -> None:
        nn.Module.__init__(self)
        self.roles, self._shift = roles, recognised.shift
        self.intermediate_size, self.hidden_size = roles.up.size
        self.activation, self.plan, self.record = recognised.activation, plan, False
        self.neuron_major, self.eager = True, False
        self.last_stats = self._layer = self._low_rank = None
        exact = one_dtype or recognised.activation.threshold or recognised.shift
        self._only_dtype = base_of(self.up_proj).weight.dtype if exact else None

    gate_proj = property(lambda self: None if self.roles.gate is None else self.roles.gate.place.module)
    up_proj = property(lambda self: self.roles.up.place.module)
    down_proj = property(lambda self: self.roles.down.place.module)
    # Not a child of the model, it hears of train() and eval() through its projections.
    training = property(lambda self: self.roles.down.place.module.training, lambda self, _mode: None)

    def selector_rows(self) -> tuple[nn.Module, int, int]:
        role = self.roles.gate or self.roles.up
        rows = role.rows or slice(0, None)
        return role.place.module, rows.start, rows.step or 1

    def why_stock(self, x: Any) -> str | None:
        """Why the stock block has to compute this call; None if our kernels can."""
        if not isinstance(x, Tensor):
            return "its input is no tensor"
        weights = self._plain_weights()
        if weights is None:
            return WRAPPED
        up, down, gate, *_ = weights
        if up.dtype != down.dtype or (gate is not None and gate.dtype != up.dtype):
            return "its projections have weights of several dtypes"
        if self._only_dtype is not None and x.dtype != self._only_dtype:
            return f"its code was understood in {self._only_dtype} only"
        device = x.device.type
        if x.dtype == up.dtype or (
            torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        ):
            return None
        return f"its input is {x.dtype}, its weights are {up.dtype}"

    def run(self, x: Any) -> Tensor | str:
        """The block on x; or why the stock block has to compute this call."""
        reason = self.why_stock(x)
        if reason is None:
            return self(x)
        adapted = self.adapt(x) if reason is WRAPPED else reason
        if isinstance(adapted, str):
            return adapted
        y = self._forward_low_rank(x, adapted)
        return self._layer.ran["forward"].reason if y is None else y

    def adapt(self, x: Tensor) -> Adapted | str:
        """The block on x with LoRA on its projections, or why the stock block has to compute this call."""
        if self._only_dtype is not None and x.dtype != self._only_dtype:
            return f"its code was understood in {self._only_dtype} only"
        return self._adapt(x)

    def run_adapted(self, x: Tensor, adapted: Adapted) -> Tensor:
        """Where stock code cannot run any more."""
        y = self._forward_low_rank(x, adapted)
        return self._forward_through_modules(x) if y is None else y

    def note_stock(self, reason: str) -> None:
        """For `twell.explain`."""
        if not torch.compiler.is_compiling():
            self._own_layer().note("forward", "dense", reason)

    def _plain_weights(self) -> tuple[Tensor | None, ...] | None:
        weights = self.roles.weights()
        if weights is None or not self._shift:
            return weights
        up, down, gate, up_bias, down_bias, gate_bias = weights
        if gate is None:
            return up, down, gate, self._shifted(up, up_bias), down_bias, gate_bias
        return up, down, gate, up_bias, down_bias, self._shifted(gate, gate_bias)

    def _shifted(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        return weight.new_full((weight.shape[0],), -self._shift) if bias is None else bias - self._shift

    def _projections(self) -> tuple[Projection | None, Projection, Projection]:
        gate, up, down = self.roles.gate, self.roles.up, self.roles.down
        return None if gate is None else gate.projection, up.projection, down.projection

    def _forward_through_modules(self, x: Tensor) -> Tensor:
        gate, up, down = self._projections()
        results = {module: module(x) for module in {up.module, up.module if gate is None else gate.module}}

        def result(projection: Projection) -> Tensor:
            values = results[projection.module]
            return values if projection.rows is None else values[..., projection.rows]

        pre = result(up if gate is None else gate)
        hidden = self.activation(pre - self._shift if self._shift else pre)
        return down.module(hidden if gate is None else hidden * self.activation.factor(result(up)))
