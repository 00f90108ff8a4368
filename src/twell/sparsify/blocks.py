"""What runs in place of a stock block: a twin of it, on its own projections.

Nothing is added to the stock model: parameters, names and state-dict keys stay as they are. A stock module
changes its class to a subclass of its own, which runs ours where it can and its stock forward elsewhere.
"""

from __future__ import annotations

import threading
from functools import cache, update_wrapper
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..nn import SparseMLP
from ..projections import base_of, has_hooks, has_weight, is_lora, is_plain
from .roles import Place
from .surroundings import Dropouts, Surroundings
from .twin import WRAPPED, BlockTwin

_DROPOUT = "a dropout inside the block is on: call .eval(), or set it to 0"
_swapping = threading.Lock()  # two threads must not change a class twice
_CHANGED = (
    "a module or a setting of the block was changed or hooked since it was recognised: undo that, or call "
    "densify_ and sparsify_ again"
)


class _OwnForward:
    """A stock module that is a feed-forward block and nothing else."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        twin, dropouts, surroundings = self.__dict__["_twell_block"]
        if dropouts._owner is not self or _is_traced():  # a shallow copy, a replica
            return super().forward(*inputs, **named)
        values = (*inputs, *named.values())
        if dropouts.drop():
            y = _DROPOUT
        elif surroundings.have_changed():
            y = _CHANGED
        else:
            y = twin.run(values[0] if len(values) == 1 else None)
        if not isinstance(y, str):
            return y
        twin.note_stock(y)
        return super().forward(*inputs, **named)


class Carrier:
    """Runs a block whose projections are called by stock code one after the other.

    The first projection returns its input as it is, the activation too, and the last one runs the whole
    block on it. Everything around them stays stock code. It does so inside the owner's forward only: whoever
    else calls a projection gets what it computes.

    owner:        the module whose code was read.
    first, last:  the modules that pass x on and that run the block; `last` is a projection.
    activation:   the attribute of `owner` that the stock code calls between them; None if `first` applies it.
    through:      other modules that carried values pass through, where hooks would see them.
    """

    def __init__(
        self,
        twin: BlockTwin,
        owner: nn.Module,
        dropouts: Dropouts,
        surroundings: Surroundings,
        first: Place,
        last: Place,
        activation: Place | None,
        through: tuple[Place, ...] = (),
    ) -> None:
        self.twin, self.first, self.last, self.activation = twin, first, last, activation
        self.owner, self._through, self._surroundings = owner, through, surroundings
        self._dropouts, self._local = dropouts, threading.local()
        # While code is traced: whether the owner's forward is, and what is carried. Not the thread's own: a
        # compiler does not trace that.
        self.traced_inside, self.traced_x = False, None

    def runs_in(self, owner: nn.Module) -> bool:
        """Whether it is the owner, not a shallow copy or a replica, with the code that was read."""
        return self.owner is owner and not self._surroundings.are_patched()

    def enter(self) -> Any:
        """The owner's forward begins; returns what `leave` wants."""
        if torch.compiler.is_compiling():
            self.traced_inside, self.traced_x = True, None
            return None
        self._follow_adapters()
        local = self._local
        before = getattr(local, "inside", False), getattr(local, "x", None), getattr(local, "adapted", None)
        local.inside, local.x, local.adapted = True, None, None
        return before

    def leave(self, before: Any, ended: bool) -> None:
        """ended: whether the forward has returned, and not raised."""
        if before is None:
            self.traced_inside, self.traced_x = False, None
            return
        local = self._local
        lost = ended and local.x is not None
        local.inside, local.x, local.adapted = before
        if lost:
            raise RuntimeError(
                "stock code did not bring a carried value to the last projection of a sparsified block; "
                "call twell.densify_ on the model, and please report its class"
            )

    def carries(self, x: Tensor, first: nn.Module) -> bool:
        """first: who asks."""
        if torch.compiler.is_compiling():
            if not self.traced_inside or first is not self.first.module or self._why_stock(x) is not None:
                return False
            self.traced_x = x
            return True
        if not getattr(self._local, "inside", False):
            return False
        if first is not self.first.module or getattr(self._local, "runs", False):
            return False  # called by what was put around it, or by the twin
        reason, adapted = self._why_stock(x), None
        if reason is WRAPPED:
            adapted = self.twin.adapt(x)
            reason = adapted if isinstance(adapted, str) else None
        if reason is not None:
            self.twin.note_stock(reason)
            return False
        self._local.x, self._local.adapted, self._local.version = x, adapted, _version(x)
        return True

    def is_carried(self, x: Tensor) -> bool:
        """Whether x is what the first projection has passed on."""
        if torch.compiler.is_compiling():
            return self.traced_x is not None  # dropouts that do nothing make other tensors while traced
        if self.traced_x is not None and not getattr(self._local, "inside", False):
            raise RuntimeError(
                "a sparsified block was left half compiled (its activation or a projection is excluded from "
                "compilation); compile the whole layer, or call twell.densify_ on the model"
            )
        carried = getattr(self._local, "x", None)
        if carried is None:
            return False
        same = x is carried or (
            x.data_ptr() == carried.data_ptr() and x.shape == carried.shape and x.stride() == carried.stride()
        )
        if not same or _version(x) != self._local.version:
            self._local.x = None
            raise RuntimeError(
                "stock code changed the values between two projections of a sparsified block; call "
                "twell.densify_ on the model, and please report its class"
            )
        return True

    def run(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            self.traced_x = None
            return self.twin(x)
        adapted, self._local.x, self._local.adapted = self._local.adapted, None, None
        self._local.runs = True
        try:
            return self.twin(x) if adapted is None else self.twin.run_adapted(x, adapted)
        finally:
            self._local.runs = False

    def _follow_adapters(self) -> None:
        """LoRA layers that peft has put around the two since stand in for them."""
        for place, mixin in ((self.first, _PassesOn), (self.last, _RunsBlock)):
            module = place.module
            if module is None or not is_lora(module) or "_twell_carrier" in module.__dict__:
                continue
            with _swapping:
                mine = base_of(module).__dict__.get("_twell_carrier") is self
                if mine and "_twell_carrier" not in module.__dict__:
                    _swap(module, mixin, self)

    def _why_stock(self, x: Tensor) -> str | None:
        if self._dropouts.drop():
            return _DROPOUT
        if not self._is_in_place() or self._surroundings.have_changed():
            return _CHANGED
        return self.twin.why_stock(x)

    def _is_in_place(self) -> bool:
        for place in (self.first, self.last, self.activation):
            if place is not None:
                module = place.module
                if module is None or module.__dict__.get("_twell_carrier") is not self or has_hooks(module):
                    return False
        return not any(place.module is not None and has_hooks(place.module) for place in self._through)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_local": None, "traced_inside": False, "traced_x": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._local = threading.local()


class _PassesOn:
    """The first projection of a carried block, or a module around it that applies the activation as well."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        carrier, values = self.__dict__["_twell_carrier"], (*inputs, *named.values())
        if len(values) == 1 and carrier.carries(values[0], self):
            return values[0]
        return super().forward(*inputs, **named)


class _RunsBlock:
    """The last projection of a carried block."""

    def forward(self, x: Tensor, *inputs: Any, **named: Any) -> Tensor:
        carrier = self.__dict__["_twell_carrier"]
        if carrier.last.module is self and carrier.is_carried(x):
            return carrier.run(x)
        return super().forward(x, *inputs, **named)


class _Carried:
    """The activation of a carried block."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.__dict__["_twell_carrier"].is_carried(x) else super().forward(x)


class _CarriesInside:
    """The module whose code calls the projections of carried blocks."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        carriers = self.__dict__["_twell_carriers"]
        if _is_traced() or not all(carrier.runs_in(self) for carrier in carriers):
            return super().forward(*inputs, **named)
        before = [carrier.enter() for carrier in carriers]
        ended = False
        try:
            output = super().forward(*inputs, **named)
            ended = True
        finally:
            for carrier, kept in zip(carriers, before, strict=True):
                carrier.leave(kept, ended)
        return output


def _is_traced() -> bool:
    """By torch.jit.trace, which records stock code: what ours decides holds for one input."""
    return torch._C._get_tracing_state() is not None


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


@cache
def _swapped_class(stock: type[nn.Module], mixin: type) -> type[nn.Module]:
    """A subclass of `stock` with its name: tools look for modules by class, or by the class's name."""

    def reduce(self: nn.Module, protocol: int) -> tuple:
        return _rebuild, (stock, mixin.__name__), self.__getstate__()

    def refuse_script(self: nn.Module) -> None:
        raise RuntimeError(
            "torch.jit.script cannot compile a sparsified model; call twell.densify_ on it, or on a copy"
        )

    names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
    more = {"__reduce_ex__": reduce, "__prepare_scriptable__": refuse_script}
    # With stock's signature, which torch.export, torch.fx and others look at.
    own = mixin.forward
    forward = FunctionType(own.__code__, own.__globals__, own.__name__, own.__defaults__, own.__closure__)
    more["forward"] = update_wrapper(forward, stock.forward)
    return type(stock.__name__, (mixin, stock), {**names, "_twell_stock": stock, **more})


def _rebuild(stock: type[nn.Module], mixin: str) -> nn.Module:
    mixins = (_OwnForward, _PassesOn, _RunsBlock, _Carried, _CarriesInside)
    swapped = _swapped_class(stock, {kind.__name__: kind for kind in mixins}[mixin])
    return swapped.__new__(swapped)


def install_own_forward(
    owner: nn.Module, twin: BlockTwin, dropouts: Dropouts, surroundings: Surroundings
) -> None:
    """Make `owner`, which is the block, run as `twin`."""
    owner.__dict__["_twell_block"] = twin, dropouts, surroundings
    owner.__class__ = _swapped_class(type(owner), _OwnForward)
    lay_out(twin)


def install_carrier(carrier: Carrier) -> None:
    first, last = carrier.first.module, carrier.last.module
    for module, mixin in ((first, _PassesOn), (last, _RunsBlock)):
        for one in {module, base_of(module)}:  # the base takes over once adapters are unloaded
            _swap(one, mixin, carrier)
    if carrier.activation is not None:
        _swap(carrier.activation.module, _Carried, carrier)
    owner = carrier.owner
    if "_twell_carriers" not in owner.__dict__:
        owner.__dict__["_twell_carriers"] = []
        owner.__class__ = _swapped_class(type(owner), _CarriesInside)
    owner.__dict__["_twell_carriers"].append(carrier)
    lay_out(carrier.twin)


def _swap(module: nn.Module, mixin: type, carrier: Carrier) -> None:
    module.__dict__["_twell_carrier"] = carrier
    module.__class__ = _swapped_class(type(module), mixin)


def remove(module: nn.Module) -> bool:
    """Make a module stock again; whether it was ours."""
    if not is_swapped(module):
        return False
    block = module.__dict__.pop("_twell_block", None)
    carrier = module.__dict__.pop("_twell_carrier", None)
    carriers = module.__dict__.pop("_twell_carriers", [])
    module.__class__ = type(module)._twell_stock
    for twin in [*([] if block is None else [block[0]]), *(c.twin for c in (carrier, *carriers) if c)]:
        _lay_out_stock(twin)
    return True


def is_swapped(module: nn.Module) -> bool:
    return "_twell_stock" in type(module).__dict__


def named_blocks(model: nn.Module) -> list[tuple[str, SparseMLP]]:
    """Every block of a model that runs on our kernels, first layer first: its `SparseMLP`s, and the twins of
    the stock blocks that `sparsify_` found, under the name of the module that runs them."""
    blocks: list[tuple[str, SparseMLP]] = []
    for name, module in model.named_modules():
        block = module if isinstance(module, SparseMLP) else twin_of(module)
        if block is not None:
            blocks.append((name, block))
    return blocks


def dropouts_inside(model: nn.Module) -> list[tuple[str, float]]:
    """(name, probability) of the dropouts inside blocks that `sparsify_` found, which run stock code while
    they are on. The name is that of an attribute: "h.0.mlp.dropout.p"."""
    names = {module: name for name, module in model.named_modules()}
    found = [module.__dict__["_twell_block"][1] for module in names if "_twell_block" in module.__dict__]
    found += [c._dropouts for module in names for c in module.__dict__.get("_twell_carriers", ())]
    return [
        (f"{names.get(module, '')}.{attribute}".lstrip("."), value)
        for dropouts in found
        for module, attribute, value in dropouts.probabilities()
    ]


def twin_of(module: nn.Module) -> BlockTwin | None:
    """The twin that a module runs; of a carried block, its last projection runs it."""
    block = module.__dict__.get("_twell_block")
    if block is not None:
        return block[0]
    # Adapters that nothing has run yet are around a projection that is ours.
    carrier = module.__dict__.get("_twell_carrier") or base_of(module).__dict__.get("_twell_carrier")
    return carrier.twin if carrier is not None and carrier.last.module is module else None


def lay_out(twin: BlockTwin) -> None:
    """Store every neuron's weights together, without changing shapes, or as stock; state dicts hold stock
    tensors either way."""
    for role, by_neuron in _layouts(twin):
        module = base_of(role.place.module)
        if not has_weight(module) or _is_shared(module.weight):
            continue
        weight = module.weight
        wanted = weight if by_neuron or not twin.neuron_major else weight.mT
        if not wanted.is_contiguous():
            # Through .data: optimisers and tied modules keep the same Parameter.
            data = wanted.data.contiguous()
            weight.data = data if wanted is weight else data.mT
        if "_twell_layout" not in module.__dict__:
            module.__dict__["_twell_layout"] = module.register_state_dict_post_hook(export_stock_layout)


def _is_shared(weight: Tensor) -> bool:
    """Whether other processes read it where it is."""
    return weight.device.type == "cpu" and weight.is_shared()


def _layouts(twin: BlockTwin) -> list[tuple]:
    """(role, whether the stored weight itself is to be contiguous, else its transpose)."""
    roles = [role for role in (twin.roles.gate, twin.roles.up) if role is not None]
    return [*((role, role.linear) for role in roles), (twin.roles.down, not twin.roles.down.linear)]


def _lay_out_stock(twin: BlockTwin) -> None:
    for module in twin.roles.modules:
        module = None if module is None else base_of(module)
        if module is None or "_twell_layout" not in module.__dict__:
            continue
        module.__dict__.pop("_twell_layout").remove()
        if is_plain(module):
            module.weight.data = module.weight.data.contiguous()


def export_stock_layout(
    module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    value = state.get(f"{prefix}weight")
    # With keep_vars=True the caller wants the parameter object itself.
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        state[f"{prefix}weight"] = value.contiguous()
