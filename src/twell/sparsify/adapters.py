"""Blocks that users describe: for modules whose code the search does not understand."""

from __future__ import annotations

import copy
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

_TOKENS = 64  # few would leave their errors to luck


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
    weight = base_of(roles.up.place.module).weight
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, _TOKENS // 2, sizes(roles.up.place.module)[1], generator=generator).to(weight)
    modes = [(child, child.training) for child in module.modules()]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []):
            for child, _mode in modes:
                child.training = False
            described = _block(roles, activation, x)
            exact = _exact_block(roles, activation, x)
            found = type(module).forward(module, x)
            for child, _mode in modes:
                child.training = True
            trained = type(module).forward(module, x)
    finally:
        for child, mode in modes:
            child.training = mode
    if not _is_as_good(found, described, exact):
        kind = type(module).__name__
        reject("adapter", f"a description of {kind} that computes something else", f"{kind}'s own output")
    return _is_as_good(trained, described, exact)


def _block(roles: Roles, activation: Activation, x: Tensor) -> Tensor:
    """The block that was described, computed by its projections."""
    up, down = roles.up.place.module, roles.down.place.module
    hidden = up(x)
    if roles.gate is None:
        return down(activation(hidden))
    return down(activation(roles.gate.place.module(x)) * activation.factor(hidden))


def _exact_block(roles: Roles, activation: Activation, x: Tensor) -> Tensor:
    """The same on a copy, in float32 for dtypes of 16 bits and in float64 for others."""
    dtype = torch.float32 if x.dtype.itemsize == 2 else torch.float64
    copied = [copy.deepcopy(module).to(dtype) for module in roles.modules]
    by_module = dict(zip(roles.modules, copied, strict=True))
    gate, up, down = (
        None if role is None else by_module[role.place.module] for role in (roles.gate, roles.up, roles.down)
    )
    x = x.to(dtype)
    return down(activation(up(x)) if gate is None else activation(gate(x)) * activation.factor(up(x)))


def _is_as_good(found: object, described: Tensor, exact: Tensor) -> bool:
    """Whether it is the described block up to rounding: at most twice its error, plus a unit. In float64 the
    described block is the exact one, so another order of summation gets 8."""
    if not isinstance(found, Tensor) or found.shape != described.shape or found.dtype != described.dtype:
        return False
    errors = [(tensor.double() - exact.double()).norm() for tensor in (found, described)]
    units = 8 if found.dtype == torch.float64 else 1
    floor = units * torch.finfo(found.dtype).eps * exact.double().norm()
    return bool(errors[0] <= 2 * errors[1] + floor)
