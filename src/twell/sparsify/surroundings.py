"""What a recognised block depends on besides its projections: dropouts, other modules, settings, code.

Each call looks at them; where they are no longer as they were recognised, the stock forward runs.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..projections import has_hooks, stock_class
from .roles import Place


class Dropouts:
    """The dropouts inside a block, looked at in every call: between its projections they change what has to
    be computed.

    modules:  `nn.Dropout`s.
    numbers:  attributes of `owner` that hold a probability.
    always:   whether training mode has to run stock code whatever they say.
    """

    def __init__(self, owner: nn.Module, modules: list[nn.Module], numbers: list[str], always: bool) -> None:
        self._owner, self._modules, self._numbers, self._always = owner, modules, numbers, always

    def probabilities(self) -> list[tuple[nn.Module, str, float]]:
        """(module, attribute, probability) of those that are not 0."""
        places = [*((module, "p") for module in self._modules), *((self._owner, n) for n in self._numbers)]
        return [(m, name, value) for m, name in places if (value := getattr(m, name, None) or 0) > 0]

    def drop(self) -> bool:
        """Whether this call has to run stock code."""
        if any(module.training and module.p > 0 for module in self._modules):
            return True
        if not self._owner.training:
            return False
        state = self._owner.__dict__
        return self._always or any((state.get(name) or 0) > 0 for name in self._numbers)


class _Code:
    """The forward of a class: tools patch classes as well as modules."""

    def __init__(self, kind: type[nn.Module]) -> None:
        self._kind, self._forward = kind, kind.forward

    def is_patched(self) -> bool:
        return self._kind.forward is not self._forward

    def __deepcopy__(self, memo: dict) -> _Code:
        return self

    def __reduce__(self) -> tuple:
        return _Code, (self._kind,)


class Surroundings:
    """What else a block's code uses. It was recognised with these modules and settings: a call checks them.

    places:   modules besides the projections: none may be replaced or hooked.
    settings: of these modules and the owner, attributes that are numbers, texts or None.
    code:     of these modules and the owner.
    """

    def __init__(self, owner: nn.Module, places: list[Place], owner_settings: bool) -> None:
        """owner_settings: False where they do not matter: the owner's code was read."""
        self._modules = [(place.holder, place.name, place.module) for place in places]
        self._watched = [*([owner] if owner_settings else []), *(place.module for place in places)]
        self._code = [_Code(kind) for kind in {stock_class(m) for m in (owner, *self._watched)}]
        self.settings = self.settings_now()

    def settings_now(self) -> list[tuple[nn.Module, list[str], list[Any]]]:
        return [
            (module, names, [getattr(module, name) for name in names])
            for module in self._watched
            if not isinstance(module, nn.Dropout) and (names := _settings_of(module))
        ]

    def have_changed(self) -> bool:
        for holder, name, module in self._modules:
            if holder._modules.get(name) is not module or has_hooks(module):
                return True
        return self.are_patched() or any(
            [getattr(module, name, None) for name in names] != values
            for module, names, values in self.settings
        )

    def are_patched(self) -> bool:
        return any(code.is_patched() for code in self._code)


def _settings_of(module: nn.Module) -> list[str]:
    """Names of plain attributes, of the module and of its class."""
    found = dict(module.__dict__)
    for base in type(module).__mro__:
        if base is nn.Module:
            break
        found = {**vars(base), **found}
    return [
        name
        for name, value in found.items()
        if name not in ("training", "gradient_checkpointing")
        and not name.startswith("_")
        and "drop" not in name
        and isinstance(value, int | float | str | None)
    ]
