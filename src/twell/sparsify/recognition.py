"""Finds the feed-forward blocks of any model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from ..nn import SparseMLP
from ..projections import base_of, is_linear, is_lora, is_projection
from .activation_probe import Recognised, recognise
from .adapters import described
from .blocks import is_swapped
from .proof import NotABlockError, Proven, prove_block, prove_last, prove_selector, sizes
from .roles import Place, Role, Roles, why_unsuitable
from .stock_code import Step, chains_of

_MOST_PROJECTIONS = 3

BlockFilter = Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class Split:
    """How stock code calls a block whose projections are apart.

    first, last: what it calls first and last.
    activation:  what it calls between them; None if `first` applies it.
    dropouts, numbers: dropouts between them: modules, and attributes of the owner with a probability.
    """

    first: Place
    last: Place
    activation: Place | None
    dropouts: tuple[nn.Module, ...] = ()
    numbers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """split: None where the owner itself is the block."""

    name: str
    owner: nn.Module
    proven: Proven
    split: Split | None = None


@dataclass(frozen=True)
class Skipped:
    name: str
    kind: str
    reason: str


@dataclass
class Findings:
    blocks: list[Found] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    already: list[str] = field(default_factory=list)


def find_blocks(model: nn.Module, filter_fn: BlockFilter | None) -> Findings:
    """Every block of `model` that our kernels can run, innermost modules first; changes nothing."""
    search = _Search(filter_fn)
    inside = _inside_adapters(model)
    for name, module in reversed(list(model.named_modules())):
        if module not in inside or is_lora(module):
            search.visit(name, module)
    return search.result()


class _Search:
    def __init__(self, filter_fn: BlockFilter | None) -> None:
        self._filter = filter_fn
        self._findings = Findings()
        self._taken: set[nn.Module] = set()  # projections of blocks that were found
        self._refused: list[tuple[Skipped, list[nn.Module]]] = []

    def visit(self, name: str, module: nn.Module) -> None:
        if isinstance(module, SparseMLP) or is_swapped(module) or is_swapped(base_of(module)):
            self._findings.already.append(name)
            self._taken.update(child for child in module.modules() if is_projection(child))
            return
        if is_projection(module):
            return
        if self._is_described(name, module):
            return
        places = _projections_of(module)
        if places and len(places) <= _MOST_PROJECTIONS:
            self._try(name, module, places)
        elif _has_experts(module):
            self._refuse(name, module, "experts stored as 3-D parameters", [])
        if places and not self._is_taken(places):
            self._try_split(name, module)

    def _is_described(self, name: str, module: nn.Module) -> bool:
        """Whether an adapter knows the module, which is then a block or refused."""
        try:
            proven = described(module)
        except NotABlockError as reason:
            self._refuse(name, module, str(reason), [])
            return True
        if proven is not None and not self._taken.intersection(proven.roles.modules):
            self._take(Found(name, module, proven))
        return proven is not None

    def result(self) -> Findings:
        findings = self._findings
        findings.blocks.reverse()
        for skipped, projections in reversed(self._refused):
            if not projections or not self._taken.intersection(projections):
                findings.skipped.append(skipped)
        return findings

    def _try(self, name: str, module: nn.Module, places: list[Place]) -> None:
        if len(places) < 2 or self._is_taken(places):
            return
        try:
            _check_suitable(places)
            _check_nothing_else(module, places)
            self._take(Found(name, module, prove_block(module, places)))
        except NotABlockError as reason:
            if _has_the_sizes(places):
                self._refuse(name, module, str(reason), [place.module for place in places])

    def _try_split(self, name: str, module: nn.Module) -> None:
        chains, mentions = chains_of(type(module))
        for chain in chains:
            for first in range(len(chain.steps)):
                for last in range(first + 1, len(chain.steps)):
                    steps = chain.steps[first : last + 1]
                    if any(step.kind == "module" and mentions[step.name] != 1 for step in steps):
                        continue
                    try:
                        found = _split_block(name, module, steps)
                    except NotABlockError as reason:
                        self._refuse(name, module, str(reason), [])
                        continue
                    if found is not None and not self._taken.intersection(found.proven.roles.modules):
                        self._take(found)

    def _take(self, found: Found) -> None:
        modules = found.proven.roles.modules
        self._taken.update(modules)
        if self._filter is not None and not self._filter(found.name, found.owner):
            self._refuse(found.name, found.owner, "filter_fn left it out", [])
            return
        self._findings.blocks.append(found)

    def _refuse(self, name: str, module: nn.Module, reason: str, projections: list[nn.Module]) -> None:
        skipped = Skipped(name, type(module).__name__, reason)
        if all(skipped != other for other, _ in self._refused):
            self._refused.append((skipped, projections))

    def _is_taken(self, places: list[Place]) -> bool:
        return any(place.module in self._taken for place in places)


def _projections_of(module: nn.Module) -> list[Place]:
    """The projections inside a module, each once; none if there are too many for a block and its layer."""
    places: dict[nn.Module, Place] = {}
    inside = _inside_adapters(module)
    for holder in module.modules():
        for name, child in holder._modules.items() if holder not in inside else ():
            if child is not None and is_projection(child):
                places.setdefault(child, Place(holder, name))
    return list(places.values())


def _inside_adapters(module: nn.Module) -> set[nn.Module]:
    """LoRA layers and what is in them."""
    return {part for layer in module.modules() if is_lora(layer) for part in layer.modules()}


def _has_the_sizes(places: list[Place]) -> bool:
    """Whether one projection takes what another one gives, or half of it, and neither is square: attention
    has other sizes."""
    shapes = [sizes(place.module) for place in places]
    return any(
        outputs in (inputs, 2 * inputs) and inputs != features
        for outputs, features in shapes
        for _, inputs in shapes
        if outputs != features
    )


def _check_suitable(places: list[Place]) -> None:
    for place in places:
        reason = why_unsuitable(place.module)
        if reason is not None:
            raise NotABlockError(reason)
    if len({place.module.weight.dtype for place in places}) > 1:
        raise NotABlockError("its projections have weights of several dtypes")
    if len({place.module.weight.device for place in places}) > 1:
        raise NotABlockError("its projections are on several devices")


def _check_nothing_else(module: nn.Module, places: list[Place]) -> None:
    if "forward" in module.__dict__:
        raise NotABlockError("its forward was replaced")
    own = {id(p) for place in places for p in place.module.parameters()}
    if any(id(tensor) not in own for tensor in module.parameters()):
        raise NotABlockError("it has parameters besides those of its projections")


def _has_experts(module: nn.Module) -> bool:
    return sum(parameter.dim() == 3 for parameter in module._parameters.values() if parameter is not None) > 1


def _split_block(name: str, owner: nn.Module, steps: tuple[Step, ...]) -> Found | None:
    """The block that these steps of the owner's code make, None if they make none."""
    first, last = _called(owner, steps[0]), _called(owner, steps[-1])
    if first is None or last is None:
        return None
    between, dropouts, numbers = [], [], []
    for step in steps[1:-1]:
        if step.kind == "dropout" and step.name is not None:
            numbers.append(step.name)
            continue
        place = _called(owner, step)
        if place is None or not step.only_input or _projections_of(place.module):
            return None
        if isinstance(place.module, nn.Dropout):
            dropouts.append(place.module)
        else:
            between.append(place)
    up, down = _only_projection(first), _only_projection(last)
    if up is None or down is None or len(between) > 1 or not steps[0].only_input:
        return None
    if sizes(up.module)[0] != sizes(down.module)[1]:
        return None
    _check_suitable([up, down])
    dtype, device = up.module.weight.dtype, up.module.weight.device
    if between:
        if up != first or any(True for _ in between[0].module.parameters()):
            return None
        with torch.no_grad():
            recognised = recognise(between[0].module, dtype, device)
        if isinstance(recognised, str):
            raise NotABlockError(recognised)
    elif up == first:
        return None  # two projections with nothing between them
    else:
        recognised = prove_selector(first.module, up)
    random = down != last and prove_last(last.module, down)
    roles = Roles(None, Role(up, linear=is_linear(up.module)), Role(down, linear=is_linear(down.module)))
    split = Split(first, down, between[0] if between else None, tuple(dropouts), tuple(numbers))
    return Found(name, owner, Proven(roles, recognised, random), split)


def _called(owner: nn.Module, step: Step) -> Place | None:
    """The child that a step calls."""
    if step.kind != "module" or owner._modules.get(step.name) is None:
        return None
    return Place(owner, step.name)


def _only_projection(place: Place) -> Place | None:
    """The projection that a child is, or the one inside it."""
    if is_projection(place.module):
        return place
    inside = _projections_of(place.module)
    return inside[0] if len(inside) == 1 else None


__all__ = ["BlockFilter", "Findings", "Found", "Recognised", "Skipped", "Split", "find_blocks"]
