"""Which projections of a block are its gate, up and down, and their weights as the kernels take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .linear_twins import LINEAR_TWINS


class Place(NamedTuple):
    """Where a module is kept: in `holder`, under `name`. What is there may be replaced, by an adapter say."""

    holder: nn.Module
    name: str

    @property
    def module(self) -> nn.Module | None:
        return self.holder._modules.get(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and self.holder is other.holder and self.name == other.name

    def __hash__(self) -> int:
        return hash((id(self.holder), self.name))


class Role(NamedTuple):
    """A projection, or some of its rows.

    rows:   of the neurons in a projection that holds gate and up together.
    linear: True for `nn.Linear`'s weight [out, in]; False for GPT-2's `Conv1D`, [in, out].
    """

    place: Place
    rows: slice | None = None
    linear: bool = True

    def weight_and_bias(self) -> tuple[Tensor, Tensor | None] | None:
        """[out, in] and [out]; None once the module was replaced, parametrised, patched or hooked."""
        module = self.place.holder._modules.get(self.place.name)
        if module is None or not is_plain(module):
            return None
        parameters = module.__dict__["_parameters"]
        if "weight" in parameters:
            weight, bias = parameters["weight"], parameters.get("bias")
        else:  # a replica: plain tensors in place of parameters
            weight, bias = module.weight, module.bias
        if not self.linear:
            weight = weight.mT
        if self.rows is not None:
            weight, bias = weight[self.rows], None if bias is None else bias[self.rows]
        return weight, bias

    @property
    def size(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        weight, _bias = self.weight_and_bias()
        return tuple(weight.shape)


@dataclass(frozen=True)
class Roles:
    """gate: None for a non-gated block."""

    gate: Role | None
    up: Role
    down: Role

    def weights(self) -> tuple[Tensor | None, ...] | None:
        """up, down, gate, up_bias, down_bias, gate_bias; None where a projection is no longer plain."""
        up, down = self.up.weight_and_bias(), self.down.weight_and_bias()
        gate = (None, None) if self.gate is None else self.gate.weight_and_bias()
        if up is None or down is None or gate is None:
            return None
        return up[0], down[0], gate[0], up[1], down[1], gate[1]

    @property
    def modules(self) -> list[nn.Module]:
        roles = [role for role in (self.gate, self.up, self.down) if role is not None]
        return list(dict.fromkeys(role.place.module for role in roles))


def is_plain(module: nn.Module) -> bool:
    """Whether it is a projection that nobody has hooked, patched or parametrised."""
    state = module.__dict__
    return is_projection(module) and not (
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or "forward" in state
    )


def is_projection(module: nn.Module) -> bool:
    """A plain `nn.Linear`, a twin of it or GPT-2's `Conv1D`; what sparsify_ made of one counts, too."""
    kind = getattr(type(module), "_twell_stock", type(module))
    return kind is nn.Linear or is_conv1d(kind) or kind in LINEAR_TWINS


def is_conv1d(kind: type) -> bool:
    """transformers' class, which is known by its name so that nothing imports transformers."""
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def has_hooks(module: nn.Module) -> bool:
    state = module.__dict__
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(state[name] for name in names)


def why_unsuitable(module: nn.Module) -> str | None:
    """Why a projection cannot be run by our kernels; None if it can."""
    if has_hooks(module):
        return "a projection has hooks"
    if "forward" in module.__dict__:
        return "a projection's forward was replaced"
    if hasattr(module, "parametrizations"):
        return "a projection is parametrised"
    weight = module.weight
    if type(weight) not in (Tensor, nn.Parameter):
        return f"a projection's weight is a {type(weight).__name__}: sharded or quantised"
    if weight.is_meta:
        return "weights are on the meta device: load them first"
    if weight.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        return f"a projection's weight is {weight.dtype}"
    return None
