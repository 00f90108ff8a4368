"""Blocks that users describe: for modules whose code the search does not understand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .._errors import reject
from ..activations import Activation
from ..projections import base_of, is_linear, is_projection
from .activation_probe import Recognised
from .proof import NotABlockError, Proven, sizes
from .roles import Place, Role, Roles, why_unsuitable

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True, kw_only=True)
class BlockDescription:
    """Which projections of a module are its gate, up and down: names below it, of `nn.Linear`s.

    gate:       None for a non-gated block.
    activation: "relu", "relu2", "fatrelu(THRESHOLD)", "drelu" (gated blocks only) or a `twell.Activation`.
    """

    up: str
    down: str
    gate: str | None = None
    activation: str | Activation = "relu"


Describe = Callable[[nn.Module], BlockDescription | None]
_adapters: dict[type[nn.Module], Describe] = {}


def register_adapter(kind: type[nn.Module]) -> Callable[[Describe], Describe]:
    """Describe the blocks of a module class to `sparsify_`, which looks at them before it searches itself.

        @twell.register_adapter(MyFeedForward)
        def describe(module):
            return twell.BlockDescription(gate="w1", up="w3", down="w2", activation="relu")

    The function gets an instance of `kind` and returns its description, or None to leave it to the search.
    Its forward must take x [..., D] and return the block's output. Before anything is replaced, the
    description is compared with the module's own forward on random input; a wrong one raises ValueError.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        reject("kind", repr(kind), "a subclass of torch.nn.Module")

    def register(describe: Describe) -> Describe:
        _adapters[kind] = describe
        return describe

    return register


def described(module: nn.Module) -> Proven | None:
    """What an adapter says of a module, checked; None if there is no adapter for it."""
    describe = next((_adapters[kind] for kind in type(module).__mro__ if kind in _adapters), None)
    description = None if describe is None else describe(module)
    if description is None:
        return None
    if not isinstance(description, BlockDescription):
        reject("adapter", f"a {type(description).__name__}", "a twell.BlockDescription or None")
    roles = Roles(
        None if description.gate is None else _role(module, "gate", description.gate),
        _role(module, "up", description.up),
        _role(module, "down", description.down),
    )
    for projection in roles.modules:
        reason = why_unsuitable(projection)
        if reason is not None:
            raise NotABlockError(reason)
    activation = Activation.parse(description.activation)
    activation.check_gated(roles.gate is not None)
    return Proven(roles, Recognised(activation), random_in_training=not _check(module, roles, activation))


def _role(module: nn.Module, argument: str, name: str) -> Role:
    try:
        projection = module.get_submodule(name)
    except AttributeError:
        projection = None
    if projection is None or not is_projection(projection):
        found = "nothing" if projection is None else f"a {type(projection).__name__}"
        reject(argument, f"{name!r}, {found} in {type(module).__name__}", "the name of an nn.Linear in it")
    *parents, child = name.split(".")
    return Role(Place(module.get_submodule(".".join(parents)), child), linear=is_linear(projection))


def _check(module: nn.Module, roles: Roles, activation: Activation) -> bool:
    """Compare with the module's own forward; returns whether training mode computes the same."""
    up, down = roles.up.place.module, roles.down.place.module
    gate = None if roles.gate is None else roles.gate.place.module
    weight = base_of(up).weight
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 3, sizes(up)[1], generator=generator).to(weight)
    modes = [(child, child.training) for child in module.modules()]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []):
            for child, _mode in modes:
                child.training = False
            hidden = activation(up(x)) if gate is None else activation(gate(x)) * activation.factor(up(x))
            wanted = down(hidden)
            found = type(module).forward(module, x)
            for child, _mode in modes:
                child.training = True
            trained = type(module).forward(module, x)
    finally:
        for child, mode in modes:
            child.training = mode
    if not _is_close(found, wanted):
        kind = type(module).__name__
        reject("adapter", f"a description of {kind} that computes something else", f"{kind}'s own output")
    return _is_close(trained, wanted)


def _is_close(found: object, wanted: Tensor) -> bool:
    if not isinstance(found, Tensor) or found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    error, scale = (found - wanted).double().norm(), wanted.double().norm()
    return bool(error <= _TOLERANCE[wanted.dtype] * scale)
