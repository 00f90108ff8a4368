"""What a projection of a block is: a plain `nn.Linear` or `Conv1D`, or one that peft has put LoRA around.

Neither transformers nor peft is imported: their classes are known by name.
"""

from __future__ import annotations

from types import FunctionType
from typing import NamedTuple

from torch import Tensor, nn

LINEAR_TWINS: dict[type, FunctionType] = {}
"""Subclasses of `nn.Linear` that compute the same (`sparsify.linear_twins`), each with its forward, which may
be patched later. A plain dictionary: compiled code looks into it."""


# Hooks of all modules: torch changes these dictionaries in place.
_FOR_ALL = (
    nn.modules.module._global_forward_hooks,
    nn.modules.module._global_forward_pre_hooks,
    nn.modules.module._global_backward_hooks,
    nn.modules.module._global_backward_pre_hooks,
)


class Projection(NamedTuple):
    """A projection of a block, or some of its outputs.

    rows:    of the neurons in a projection that holds gate and up together.
    linear:  True for `nn.Linear`'s weight [out, in]; False for GPT-2's `Conv1D`, [in, out].
    """

    module: nn.Module
    rows: slice | None = None
    linear: bool = True


class Term(NamedTuple):
    """What an adapter adds to a projection: scaling * second(first(x)).

    casts: whether x is cast to the adapter's dtype first.
    """

    first: nn.Linear
    second: nn.Linear
    scaling: float
    casts: bool

    @property
    def rank(self) -> int:
        return self.first.weight.shape[0]

    def reduce(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., rank], as peft computes it."""
        return self.first(self._cast(x))

    def expand(self, reduced: Tensor) -> Tensor:
        """[..., rank] -> [..., out]"""
        return self.second(self._cast(reduced)) * self.scaling

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self.first.weight.dtype) if self.casts else x


def is_lora(module: nn.Module) -> bool:
    """Whether it is peft's LoRA around an `nn.Linear` or a `Conv1D`."""
    kind = type(module)
    return kind.__name__ == "Linear" and kind.__module__.startswith("peft.tuners.lora.")


def base_of(module: nn.Module) -> nn.Module:
    """The projection that LoRA was put around; any other module itself."""
    return module.base_layer if is_lora(module) else module


def terms_of(layer: nn.Module) -> tuple[Term, ...] | str:
    """What peft's LoRA layer adds to its base now, adapter by adapter; or why its own forward must run."""
    if is_changed(layer):
        return "a LoRA layer is hooked or patched"
    if layer.merged:
        # With its adapters disabled its forward takes them out of the weight again.
        return "merged adapters are about to be unmerged" if layer.disable_adapters else ()
    if layer.disable_adapters:
        return ()
    terms = []
    firsts, seconds, dropouts = layer.lora_A, layer.lora_B, layer.lora_dropout
    for name in layer.active_adapters:
        if name not in firsts:
            continue
        if name in getattr(layer, "lora_variant", ()) or getattr(layer, "use_dora", {}).get(name):
            return "an adapter is a variant of LoRA, such as DoRA"
        dropout = dropouts[name]
        if type(dropout) not in (nn.Identity, nn.Dropout) or is_changed(dropout):
            return "an adapter has a dropout of its own kind"
        if type(dropout) is nn.Dropout and dropout.training and dropout.p > 0:
            return "lora_dropout is above 0 in training mode"
        first, second = firsts[name], seconds[name]
        if not all(type(m) is nn.Linear and is_plain(m) and has_weight(m) for m in (first, second)):
            return "an adapter's matrices are not plain nn.Linear"
        casts = getattr(layer, "cast_input_dtype_enabled", True)
        terms.append(Term(first, second, layer.scaling[name], casts))
    return tuple(terms)


def has_weight(module: nn.Module) -> bool:
    """Whether its weight is its own parameter, a plain one: not sharded, quantised, parametrised or that of a
    replica."""
    weight = module._parameters.get("weight")
    return type(weight) is nn.Parameter


def is_plain(module: nn.Module) -> bool:
    """Whether it is a projection that nobody has wrapped, hooked, patched or parametrised."""
    return is_bare_projection(module) and not is_changed(module)


def is_changed(module: nn.Module) -> bool:
    """Whether it is hooked or patched."""
    return has_hooks(module) or "forward" in module.__dict__


def is_projection(module: nn.Module) -> bool:
    """A plain `nn.Linear`, a twin of it or GPT-2's `Conv1D`, maybe with LoRA around it. What sparsify_ made
    of one counts, other subclasses do not."""
    return is_bare_projection(base_of(module))


def is_bare_projection(module: nn.Module) -> bool:
    kind = stock_class(module)
    if kind is nn.Linear or is_conv1d(kind):
        return True
    return kind in LINEAR_TWINS and LINEAR_TWINS[kind] is kind.forward


def is_linear(module: nn.Module) -> bool:
    """Whether a projection's weight is [out, in]."""
    return not is_conv1d(stock_class(base_of(module)))


def stock_class(module: nn.Module) -> type[nn.Module]:
    """Its class; of one that `sparsify_` changed, the class it had."""
    return getattr(type(module), "_twell_stock", type(module))


def is_conv1d(kind: type) -> bool:
    """transformers' class, which is known by its name so that nothing imports transformers."""
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def has_hooks(module: nn.Module) -> bool:
    """Its own, or those of all modules."""
    state = module.__dict__
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(state[name] for name in names) or any(_FOR_ALL)
