"""Finds the feed-forward blocks of any model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from torch import nn

from ..nn import SparseMLP
from ..projections import base_of, has_hooks, is_linear, is_lora, is_projection
from .activation_probe import Recognised
from .adapters import described
from .blocks import is_swapped, twin_of
from .linear_twins import admit_linear_twins
from .proof import NotABlockError, Proven, prove_block, prove_last, prove_selector, recognise_steady, sizes
from .roles import Place, Role, Roles, why_unsuitable
from .stock_code import Chain, Step, chains_of, input_reader
from .ways_out import way_out

_MOST_PROJECTIONS = 3

BlockFilter = Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class Split:
    """How stock code calls a block whose projections are apart.

    first, last: what it calls first and last.
    activation:  what it calls between them; None if `first` applies it.
    dropouts, numbers: dropouts between them: modules, and attributes of the owner with a probability.
    through:     dropouts and modules around first and last: the values pass through them.
    """

    first: Place
    last: Place
    activation: Place | None
    dropouts: tuple[nn.Module, ...] = ()
    numbers: tuple[str, ...] = ()
    through: tuple[Place, ...] = ()


@dataclass(frozen=True)
class Found:
    """split: None where the owner itself is the block. shares_activation: whether other modules hold its
    activation, too."""

    name: str
    owner: nn.Module
    proven: Proven
    split: Split | None = None
    shares_activation: bool = False


@dataclass(frozen=True)
class Skipped:
    """A module that looks like a block and is none that we can run. Prints as the reason and what to do."""

    name: str
    kind: str
    reason: str
    model: str = ""

    @property
    def way_out(self) -> str:
        return way_out(self.reason, self.model)

    def __str__(self) -> str:
        return f"{self.reason}: {self.way_out}" if self.way_out else self.reason


@dataclass
class Findings:
    blocks: list[Found] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    already: list[str] = field(default_factory=list)


def find_blocks(model: nn.Module, filter_fn: BlockFilter | None) -> Findings:
    """Every block of `model` that our kernels can run, innermost modules first; changes nothing."""
    admit_linear_twins(model)
    holders = Counter(
        child for holder in model.modules() for child in holder._modules.values() if child is not None
    )
    search = _Search(filter_fn, holders, _origin(model))
    inside = _inside_lora(model)
    for name, module in reversed(list(model.named_modules())):
        if module not in inside or is_lora(module):
            search.visit(name, module)
    return search.result()


def _origin(model: nn.Module) -> str:
    """Where a model of transformers was loaded from; empty if that is not known."""
    origin = getattr(getattr(model, "config", None), "name_or_path", "")
    return origin if isinstance(origin, str) else ""


class _Search:
    def __init__(self, filter_fn: BlockFilter | None, holders: Counter, origin: str) -> None:
        """holders: by how many places each module is held. origin: as `_origin` says."""
        self._filter, self._holders, self._origin = filter_fn, holders, origin
        self._findings = Findings()
        self._taken: set[nn.Module] = set()  # projections of blocks that were found
        self._refused: list[tuple[Skipped, list[nn.Module]]] = []

    def visit(self, name: str, module: nn.Module) -> None:
        if isinstance(module, SparseMLP) or is_swapped(module) or is_swapped(base_of(module)):
            if isinstance(module, SparseMLP) or twin_of(module) is not None:
                self._findings.already.append(name)
            self._taken.update(child for child in module.modules() if is_projection(child))
            return
        if is_projection(module):
            return
        if self._is_described(name, module):
            return
        places = _projections_of(module)
        if _has_experts(module):
            self._refuse(name, module, "experts stored as 3-D parameters", [])
        elif len(places) < 2:
            self._look_for_others(name, module)
        elif len(places) <= _MOST_PROJECTIONS:
            self._try(name, module, places)
        if any(place.module not in self._taken for place in places):
            self._try_split(name, module)

    def _look_for_others(self, name: str, module: nn.Module) -> None:
        """Blocks whose projections were replaced by others, as quantisation does."""
        shapes, others = [], []
        for child in module.children():
            shape = getattr(child, "out_features", None), getattr(child, "in_features", None)
            if all(isinstance(size, int) for size in shape):
                shapes.append(shape)
                others += [] if is_projection(child) else [child]
        if not others or len(shapes) not in (2, 3) or not _are_of_a_block(shapes):
            return
        if any(hasattr(child, "parametrizations") for child in others):
            reason = "a projection is parametrised"
        else:
            kinds = ", ".join(sorted({_spelled(type(child)) for child in others}))
            reason = f"its projections ({kinds}) are not nn.Linear"
        self._refuse(name, module, reason, [])

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
        if self._is_taken(places):
            return
        try:
            _check_suitable(places)
            _check_nothing_else(module, places)
            self._take(Found(name, module, prove_block(module, places)))
        except NotABlockError as reason:
            if _has_the_sizes(places):
                self._refuse(name, module, str(reason), [place.module for place in places])

    def _try_split(self, name: str, module: nn.Module) -> None:
        if "forward" in module.__dict__ or self._holders[module] > 1:
            return  # other code runs it than its class has, or several owners do
        chains, mentions = chains_of(type(module))
        for steps, count in Counter(segment for chain in chains for segment in _segments(chain)).items():
            # Nothing else in the class may call what these steps call; dropouts stay what they are.
            called = [step.name for step in steps if step.kind == "module" and not _is_dropout(module, step)]
            if any(mentions[attribute] != count for attribute in called) or self._is_step_taken(
                module, steps
            ):
                continue
            try:
                found = _split_block(name, module, steps)
            except NotABlockError as reason:
                self._refuse(name, module, str(reason), [])
                continue
            if found is None or self._taken.intersection(found.proven.roles.modules):
                continue
            split = found.split
            if any(self._holders[place.module] > 1 for place in (split.first, split.last)):
                self._refuse(name, module, "a projection is shared with another module", [])
                continue
            shared = split.activation is not None and self._holders[split.activation.module] > 1
            self._take(replace(found, shares_activation=shared))

    def _is_step_taken(self, owner: nn.Module, steps: tuple[Step, ...]) -> bool:
        """Whether the first or the last of these steps runs a projection of a block that was found."""
        ends = (_called(owner, step) for step in (steps[0], steps[-1]))
        return any(not self._taken.isdisjoint(place.module.modules()) for place in ends if place is not None)

    def _take(self, found: Found) -> None:
        modules = found.proven.roles.modules
        self._taken.update(modules)
        if self._filter is not None and not self._filter(found.name, found.owner):
            self._refuse(found.name, found.owner, "filter_fn left it out", [])
            return
        self._findings.blocks.append(found)

    def _refuse(self, name: str, module: nn.Module, reason: str, projections: list[nn.Module]) -> None:
        skipped = Skipped(name, type(module).__name__, reason, self._origin)
        if all(skipped != other for other, _ in self._refused):
            self._refused.append((skipped, projections))

    def _is_taken(self, places: list[Place]) -> bool:
        return any(place.module in self._taken for place in places)


def _spelled(kind: type) -> str:
    name = kind.__name__
    return name if name != "Linear" else f"{kind.__module__.partition('.modules.')[0]}.{name}"


def _projections_of(module: nn.Module) -> list[Place]:
    """The projections inside a module, each once; none if there are too many for a block and its layer."""
    places: dict[nn.Module, Place] = {}
    inside = _inside_lora(module)
    for holder in module.modules():
        for name, child in holder._modules.items() if holder not in inside else ():
            if child is not None and is_projection(child):
                places.setdefault(child, Place(holder, name))
    return list(places.values())


def _inside_lora(module: nn.Module) -> set[nn.Module]:
    """LoRA layers and what is in them."""
    return {part for layer in module.modules() if is_lora(layer) for part in layer.modules()}


def _has_the_sizes(places: list[Place]) -> bool:
    """Whether one projection takes what another one gives, or half of it, and neither is square: attention
    has other sizes."""
    return _are_of_a_block([sizes(place.module) for place in places])


def _are_of_a_block(shapes: list[tuple[int, int]]) -> bool:
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
    if any(True for _ in module.buffers()):
        raise NotABlockError("it has buffers, which its output may depend on")


def places_besides(owner: nn.Module, projections: list[nn.Module]) -> list[Place]:
    """The modules inside `owner` that are neither projections nor parts of them."""
    parts = {part for projection in projections for part in projection.modules()}
    return [
        Place(holder, name)
        for holder in owner.modules()
        if holder not in parts
        for name, child in holder._modules.items()
        if child is not None and child not in parts
    ]


def _has_experts(module: nn.Module) -> bool:
    """Whether two weights [experts, outputs, inputs] of it, or of two children, make a block."""
    children = [weights for child in module.children() if len(weights := _stacked_weights(child)) == 1]
    shapes = [weight.shape for weights in (_stacked_weights(module), *children) for weight in weights]
    return any(
        one[0] == other[0]
        and 1 < one[1] != one[2] > 1
        and not {one[1], one[2]}.isdisjoint({other[1], other[2], 2 * other[1], 2 * other[2]})
        for place, one in enumerate(shapes)
        for other in shapes[place + 1 :]
    )


def _stacked_weights(module: nn.Module) -> list[nn.Parameter]:
    if isinstance(module, nn.Conv1d):
        return []
    return [weight for weight in module._parameters.values() if weight is not None and weight.dim() == 3]


def _segments(chain: Chain) -> Iterator[tuple[Step, ...]]:
    """Every run of two steps or more."""
    for first in range(len(chain.steps)):
        for last in range(first + 1, len(chain.steps)):
            yield chain.steps[first : last + 1]


def _is_dropout(owner: nn.Module, step: Step) -> bool:
    return isinstance(owner._modules.get(step.name), nn.Dropout)


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
            dropouts.append(place)
        else:
            between.append(place)
    up, down = _only_projection(first), _only_projection(last) or _read_projection(last)
    if up is None or down is None or len(between) > 1 or not steps[0].only_input:
        return None
    if sizes(up.module)[0] != sizes(down.module)[1]:
        return None
    _check_suitable([up, down])
    through = [*dropouts, last] if down != last else dropouts[:]
    activation = between[0] if between else None
    if activation is not None:
        if up != first or any(True for _ in activation.module.parameters()):
            return None
        recognised = _recognised(activation, up)
    elif up == first:
        return None  # two projections with nothing between them
    else:
        try:
            recognised = prove_selector(first.module, up)
        except NotABlockError:
            activation = _returned_activation(first, up)
            if activation is None:
                raise
            recognised = _recognised(activation, up)
            through.append(first)
            first = up
    random = _only_projection(last) not in (None, last) and prove_last(last.module, down)
    roles = Roles(None, Role(up, linear=is_linear(up.module)), Role(down, linear=is_linear(down.module)))
    inside = last.module.modules() if random else ()
    drop = (*(place.module for place in dropouts), *(m for m in inside if isinstance(m, nn.Dropout)))
    split = Split(first, down, activation, drop, tuple(numbers), tuple(through))
    return Found(name, owner, Proven(roles, recognised, random), split)


def _recognised(activation: Place, up: Place) -> Recognised:
    module = activation.module
    if any(True for _ in module.children()) or any(True for _ in module.buffers()):
        raise NotABlockError("its activation has modules or buffers of its own")
    if "forward" in module.__dict__ or has_hooks(module):
        raise NotABlockError("its activation is hooked or patched")
    return recognise_steady(module, up.module.weight.dtype, up.module.weight.device)


def _read_projection(place: Place) -> Place | None:
    """The projection inside a child that takes the child's first input, and is called for nothing else."""
    kind, module = type(place.module), place.module
    name = input_reader(kind)
    if name is None or "forward" in module.__dict__ or chains_of(kind)[1][name] != 1:
        return None
    child = module._modules.get(name)
    return Place(module, name) if child is not None and is_projection(child) else None


def _returned_activation(place: Place, up: Place) -> Place | None:
    """The activation inside a child, if what the child returns is this activation of `up`."""
    chains, mentions = chains_of(type(place.module))
    for chain in chains:
        ends = chain.steps[-2:]
        if not chain.returned or len(ends) < 2 or not all(step.only_input for step in ends):
            continue
        calls = [_called(place.module, step) for step in ends]
        if calls[0] == up and calls[1] is not None and all(mentions[call.name] == 1 for call in calls):
            return calls[1]
    return None


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
