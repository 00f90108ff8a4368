"""Works out which projection of a stock module does what, by running the module's own code.

The projections are stood in for while the module runs: they return numbers that were chosen, and what they
are given is kept. So a block is recognised by what its code does with numbers, bit by bit; no name counts,
and no product is computed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..activations import Activation
from ..projections import base_of, is_linear, stock_class
from .activation_probe import Recognised, recognise
from .roles import Place, Role, Roles
from .stock_code import what_code_looks_at

_LEADING = ((2, 3), (6,))  # leading sizes of the x that are tried
_MORE_TOKENS = (1, 130)  # the code must do the same with few and with many
_SCALES = (1.0, 100.0, 0.01)  # and with large values and small ones,
# and with numbers of every size that the dtype has, and these among them.
_EXTREMES = ((), (math.inf, -math.inf), (math.inf, -math.inf, math.nan))

_REPLACES = "its code looks for NaN or infinity, which our kernels pass on"


class NotABlockError(Exception):
    """Why a module is no feed-forward block that our kernels compute."""


class Proven(NamedTuple):
    """random_in_training: whether steps in training mode differ even with its dropouts at 0.
    one_dtype: whether its code looks at dtypes, and so was understood in one of them only."""

    roles: Roles
    recognised: Recognised
    random_in_training: bool
    one_dtype: bool = False


Stand = Callable[[Tensor], Tensor]


def sizes(module: nn.Module) -> tuple[int, int]:
    """(outputs, inputs) of a projection."""
    outputs, inputs = base_of(module).weight.shape
    return (outputs, inputs) if is_linear(module) else (inputs, outputs)


def prove_block(owner: nn.Module, places: list[Place]) -> Proven:
    """The roles of `places`, the projections inside `owner`, if owner(x) is a feed-forward block of them."""
    looks = what_code_looks_at(stock_class(owner))
    if "shape" in looks or "values" in looks:
        raise NotABlockError("its code decides by the shape or the values of its input")
    _check_nonfinite(owner, {part for place in places for part in place.module.modules()})
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=_cuda_devices(owner)),
        _modes_kept(owner),
        _without_side_effects(owner),
    ):
        _set_mode(owner, training=False)
        trial = _find_trial(owner, places)
        down = _find_down(trial)
        roles, recognised = _find_gate(trial, [place for place in places if place is not down], down)
        for leading in (trial.leading, *((*trial.leading[:-1], tokens) for tokens in _MORE_TOKENS)):
            for drawn in (*_SCALES, *_EXTREMES):
                other = _Trial(owner, places, leading, trial.x.shape[-1], drawn)
                _check_product(other, roles, recognised)
        steady = _is_steady(trial)
    return Proven(roles, recognised, random_in_training=not steady, one_dtype="dtype" in looks)


def _check_nonfinite(owner: nn.Module, projections: set[nn.Module]) -> None:
    kinds = {stock_class(module) for module in owner.modules() if module not in projections}
    if any("nonfinite" in what_code_looks_at(kind) for kind in kinds):
        raise NotABlockError(_REPLACES)


class _Trial:
    """Runs `owner` on a random x [*leading, features] with stand-ins for its projections.

    drawn: a scale, or one of `_EXTREMES`.
    """

    def __init__(
        self,
        owner: nn.Module,
        places: list[Place],
        leading: tuple[int, ...],
        features: int,
        drawn: float | tuple[float, ...] = 1.0,
    ) -> None:
        self.owner, self.places, self.leading, self._drawn = owner, places, leading, drawn
        weight = places[0].module.weight
        self.dtype, self.device = weight.dtype, weight.device
        self._generator = torch.Generator().manual_seed(1)
        self.x = self.random(features)

    def random(self, features: int) -> Tensor:
        shape = *self.leading, features
        if isinstance(self._drawn, tuple):
            values = _of_any_size(shape, self.dtype, self._generator, self._drawn)
        else:
            values = torch.randn(shape, generator=self._generator) * self._drawn
        return values.to(dtype=self.dtype, device=self.device)

    def random_results(self, selector: Place | None = None) -> dict[Place, Tensor]:
        """selector: gets no NaN and no -infinity, where ReLUs differ: some are comparisons, some products."""
        results = {place: self.random(sizes(place.module)[0]) for place in self.places}
        if selector is not None:
            values = results[selector]
            results[selector] = values.masked_fill(values.isnan() | (values == -math.inf), math.inf)
        return results

    def run(self, results: dict[Place, Tensor]) -> tuple[Any, dict[Place, list[Tensor]]]:
        """What the owner returns if its projections return `results`; and what each was given."""
        given: dict[Place, list[Tensor]] = {place: [] for place in self.places}

        def stand_in(place: Place) -> Stand:
            def forward(x: Tensor) -> Tensor:
                if x.shape[-1] != sizes(place.module)[1]:
                    raise NotABlockError("a projection would not take what it is given")
                given[place].append(x)
                return results[place]

            return forward

        with standing_in({place.module: stand_in(place) for place in self.places}):
            return stock_class(self.owner).forward(self.owner, self.x), given


def _of_any_size(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, others: tuple[float, ...]
) -> Tensor:
    """Values of both signs, from the smallest of `dtype` to the largest, with a few `others` among them."""
    limits = torch.finfo(dtype)
    least, most = math.log10(limits.tiny), math.log10(limits.max)
    size = torch.rand(shape, generator=generator, dtype=torch.float64) * (most - least) + least
    sign = torch.randint(2, shape, generator=generator) * 2 - 1
    values = (10.0**size * sign).flatten()
    places = torch.randperm(len(values), generator=generator)[: max(3, len(values) // 16)]
    for k, other in enumerate(others):
        values[places[k :: len(others)]] = other
    return values.view(shape)


@contextmanager
def standing_in(forwards: dict[nn.Module, Stand]) -> Iterator[None]:
    """Modules run other forwards meanwhile."""
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module in forwards:
            module.__dict__.pop("forward", None)


@contextmanager
def _modes_kept(owner: nn.Module) -> Iterator[None]:
    before = [(module, module.training) for module in owner.modules()]
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


def _set_mode(owner: nn.Module, training: bool) -> None:
    for module in owner.modules():  # not train(), which a model may have redefined
        module.training = training


@contextmanager
def _without_side_effects(owner: nn.Module) -> Iterator[None]:
    """Refuse code that keeps something on its modules, and take it back."""
    before = [(module, dict(module.__dict__)) for module in owner.modules()]
    changed = False
    try:
        yield
    finally:
        for module, state in before:
            now = {name: value for name, value in module.__dict__.items() if name != "training"}
            then = {name: value for name, value in state.items() if name != "training"}
            if now.keys() != then.keys() or any(now[name] is not then[name] for name in now):
                changed = True
                module.__dict__.clear()
                module.__dict__.update(state)
    if changed:
        raise NotABlockError("its code keeps values on the module")


@contextmanager
def _dropouts_off(owner: nn.Module) -> Iterator[None]:
    """With the probabilities at 0 that a block's calls look at."""
    modules = [module for module in owner.modules() if isinstance(module, nn.Dropout)]
    numbers = [(owner, name) for name, value in vars(owner).items() if is_probability(name, value)]
    before = [(thing, name, thing.__dict__[name]) for thing, name in [*((m, "p") for m in modules), *numbers]]
    try:
        for thing, name, _value in before:
            thing.__dict__[name] = 0.0
        yield
    finally:
        for thing, name, value in before:
            thing.__dict__[name] = value


def is_probability(name: str, value: object) -> bool:
    """Whether an attribute of a module is that of a dropout."""
    return "drop" in name and isinstance(value, float)


def recognise_steady(module: nn.Module, dtype: torch.dtype, device: torch.device) -> Recognised:
    """The activation that a module computes, in training mode as well."""
    _check_nonfinite(module, set())
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        _modes_kept(module),
        _without_side_effects(module),
    ):
        found = []
        for training in (False, True, True):
            _set_mode(module, training)
            found.append(recognise(module, dtype, device))
        infinity = torch.full((2, 4), math.inf, dtype=dtype, device=device)
        if not _same(module(infinity.clone()), infinity):
            raise NotABlockError("its activation makes a number of infinity")
    if isinstance(found[0], str):
        raise NotABlockError(found[0])
    if found != found[:1] * 3:
        raise NotABlockError("its activation does something else in training mode")
    return found[0]


def _cuda_devices(owner: nn.Module) -> list[torch.device]:
    return list({p.device for p in owner.parameters() if p.device.type == "cuda"})


def _find_trial(owner: nn.Module, places: list[Place]) -> _Trial:
    """With an x that the owner takes."""
    for features in dict.fromkeys(sizes(place.module)[1] for place in places):
        for leading in _LEADING:
            trial = _Trial(owner, places, leading, features)
            try:
                output, given = trial.run(trial.random_results())
            except Exception:  # any code may run here, and fail in any way
                continue
            if isinstance(output, Tensor) and all(len(inputs) == 1 for inputs in given.values()):
                return trial
    raise NotABlockError("its forward is not that of a feed-forward block")


def _find_down(trial: _Trial) -> Place:
    """The projection whose result the owner returns."""
    results = trial.random_results()
    output, given = trial.run(results)
    last = [place for place in trial.places if _same(output, results[place])]
    if len(last) != 1:
        raise NotABlockError("what it returns is not the result of its last projection")
    if not all(_same(given[place][0], trial.x) for place in trial.places if place is not last[0]):
        raise NotABlockError("something comes between its input and its first projection")
    return last[0]


def _find_gate(trial: _Trial, others: list[Place], down: Place) -> tuple[Roles, Recognised]:
    """The gate is the projection whose negative values vanish; the other one multiplies, as it is or through
    ReLU. Where both go through ReLU, the first one is the gate."""
    neurons = sizes(down.module)[1]
    last = Role(down, linear=is_linear(down.module))
    firsts = [Role(place, linear=is_linear(place.module)) for place in others]
    widths = [sizes(place.module)[0] for place in others]
    if widths == [neurons]:
        recognised = _activation_of(trial, down, firsts[0], None)
        if isinstance(recognised, str):
            raise NotABlockError(recognised)
        return Roles(None, firsts[0], last), recognised
    if widths == [2 * neurons]:
        halves = slice(0, neurons), slice(neurons, None)
        alternate = slice(0, None, 2), slice(1, None, 2)
        pairs = [[firsts[0]._replace(rows=rows) for rows in pair] for pair in (halves, alternate)]
    elif widths == [neurons, neurons]:
        pairs = [firsts]
    else:
        raise NotABlockError("the sizes of its projections are not those of a feed-forward block")
    refusal = None
    for gate, up in [order for pair in pairs for order in (pair, pair[::-1])]:
        recognised = _activation_of(trial, down, gate, up)
        if isinstance(recognised, str):
            refusal = refusal or recognised
            continue
        candidates = [recognised]
        if recognised.activation.name == "relu":
            candidates.append(recognised._replace(activation=Activation("drelu")))
        for found in candidates:
            if _multiplies(trial, down, gate, up, found.activation):
                return Roles(gate, up, last), found
        refusal = "its activation is applied to more than the gate"
    raise NotABlockError(refusal)


def _activation_of(trial: _Trial, down: Place, gate: Role, up: Role | None) -> Recognised | str:
    def respond(values: Tensor) -> Tensor:
        return _ask(trial, down, values, gate, up, 1.0)

    return recognise(respond, trial.dtype, trial.device)


def _multiplies(trial: _Trial, down: Place, gate: Role, up: Role, activation: Activation) -> bool:
    """Whether what reaches the last projection is proportional to the factor of `activation`: to up, negative
    values included, or to relu(up). A closed gate lets nothing through."""
    reach = math.log10(torch.finfo(trial.dtype).max) - 2  # times 16, a squared 4, it still fits
    large = torch.logspace(-2, reach, 512, dtype=torch.float64).to(trial.x)
    values = torch.cat([trial.random(64).reshape(-1), large, -large])
    scale = _ask(trial, down, torch.ones_like(values), up, gate, 4.0)
    if not torch.equal(_ask(trial, down, values, up, gate, 4.0), activation.factor(values) * scale):
        return False
    return not bool(_ask(trial, down, values, up, gate, -4.0).any())


def _ask(
    trial: _Trial, down: Place, values: Tensor, asked: Role, other: Role | None, constant: float
) -> Tensor:
    """What reaches the last projection if `asked` returns `values` [n], and `other` a constant."""
    neurons, answers = sizes(down.module)[1], []
    tokens = trial.x.numel() // trial.x.shape[-1]
    for chunk in values.split(tokens * neurons):
        results = {down: trial.random(sizes(down.module)[0])}
        for role in (asked, other):
            if role is not None and role.place not in results:
                width = sizes(role.place.module)[0]
                results[role.place] = values.new_full((*trial.leading, width), constant)
        block = values.new_zeros(tokens * neurons)
        block[: len(chunk)] = chunk
        results[asked.place][..., asked.rows or slice(None)] = block.view(*trial.leading, neurons)
        _output, given = trial.run(results)
        answer = given[down][0]
        if answer.shape != (*trial.leading, neurons):
            raise NotABlockError("its activation changes shapes")
        answers.append(answer.reshape(-1)[: len(chunk)])
    return torch.cat(answers)


def _check_product(trial: _Trial, roles: Roles, recognised: Recognised) -> None:
    """On random values, all of it at once: hidden = activation(gate - shift) * up, or * relu(up)."""
    selector = roles.up if roles.gate is None else roles.gate
    results = trial.random_results(selector.place)
    output, given = trial.run(results)
    pre = _rows(results[selector.place], selector)
    hidden = recognised.activation(pre - recognised.shift if recognised.shift else pre)
    if roles.gate is not None:
        hidden = hidden * recognised.activation.factor(_rows(results[roles.up.place], roles.up))
    first = [given[place][0] for place in trial.places if place is not roles.down.place]
    if (
        not all(_same(x, trial.x) for x in first)
        or not _same(given[roles.down.place][0], hidden)
        or not _same(output, results[roles.down.place])
    ):
        raise NotABlockError("it does more than a feed-forward block does")


def _rows(result: Tensor, role: Role) -> Tensor:
    return result if role.rows is None else result[..., role.rows]


def _is_steady(trial: _Trial) -> bool:
    """Whether training mode computes the same as evaluation."""
    results = trial.random_results()
    outcomes = []
    with _dropouts_off(trial.owner):
        for training in (True, True, False):
            _set_mode(trial.owner, training)
            output, given = trial.run(results)
            outcomes.append([output, *(tensor for inputs in given.values() for tensor in inputs)])
    return all(_same(a, b) for other in outcomes[1:] for a, b in zip(outcomes[0], other, strict=True))


def _same(one: Any, other: Tensor) -> bool:
    return (
        isinstance(one, Tensor)
        and one.shape == other.shape
        and one.dtype == other.dtype
        and bool(((one == other) | (one.isnan() & other.isnan())).all())
    )


def prove_selector(module: nn.Module, up: Place) -> Recognised:
    """The activation of a module that computes activation(up(x)) and nothing else."""
    with torch.no_grad(), _modes_kept(module):
        _set_mode(module, training=False)
        trial = _find_trial(module, [up])

        def respond(values: Tensor) -> Tensor:
            neurons, answers = sizes(up.module)[0], []
            tokens = trial.x.numel() // trial.x.shape[-1]
            for chunk in values.split(tokens * neurons):
                block = values.new_zeros(tokens * neurons)
                block[: len(chunk)] = chunk
                output, given = trial.run({up: block.view(*trial.leading, neurons)})
                if not _same(given[up][0], trial.x):
                    raise NotABlockError("something comes between its input and its projection")
                answers.append(output.reshape(-1)[: len(chunk)])
            return torch.cat(answers)

        recognised = recognise(respond, trial.dtype, trial.device)
        if isinstance(recognised, str):
            raise NotABlockError(recognised)
        for drawn in _EXTREMES:
            other = _Trial(module, [up], trial.leading, trial.x.shape[-1], drawn)
            pre = other.random_results(up)[up]
            output, given = other.run({up: pre.clone()})
            hidden = recognised.activation(pre - recognised.shift)
            if not _same(given[up][0], other.x) or not _same(output, hidden):
                raise NotABlockError("it does more than activate its projection")
    return recognised


def prove_last(module: nn.Module, down: Place) -> bool:
    """That a module's first input reaches its projection as it is, and matters for nothing else.

    Returns whether this does not hold in training mode, where a dropout may come before the projection.
    """
    outputs, neurons = sizes(down.module)
    weight = down.module.weight
    generator = torch.Generator().manual_seed(2)

    def random(features: int) -> Tensor:
        values = torch.randn(2, 3, features, generator=generator)
        return values.to(dtype=weight.dtype, device=weight.device)

    result, residual = random(outputs), random(outputs)

    def run(hidden: Tensor) -> Tensor:
        given = []

        def stand_in(x: Tensor) -> Tensor:
            # A carried value is the residual itself: it must not have changed by now.
            if not torch.equal(given_residual, residual):
                raise NotABlockError("something changes the residual before its last projection")
            given.append(x)
            return result

        given_residual = residual.clone()
        with standing_in({down.module: stand_in}):
            output = _with_residual(module, hidden, given_residual)
        if len(given) != 1 or not _same(given[0], hidden):
            raise NotABlockError("something comes before its last projection")
        return output

    one = random(neurons)
    others = [_of_any_size(tuple(one.shape), one.dtype, generator, drawn).to(one) for drawn in _EXTREMES]
    with torch.no_grad(), torch.random.fork_rng(devices=_cuda_devices(module)), _modes_kept(module):
        _set_mode(module, training=False)
        if not all(_same(run(other), run(one)) for other in others):
            raise NotABlockError("the hidden values reach more than its last projection")
        _set_mode(module, training=True)
        try:
            run(one)
        except NotABlockError:
            return True
    return False


def _with_residual(module: nn.Module, hidden: Tensor, residual: Tensor) -> Tensor:
    """module(hidden, residual), or module(hidden) if it takes one input."""
    required = [
        parameter
        for parameter in inspect.signature(type(module).forward).parameters.values()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    inputs = (hidden, residual)[: len(required) - 1]
    try:
        output = type(module).forward(module, *inputs)
    except NotABlockError:
        raise
    except Exception as error:  # any code may run here, and fail in any way
        raise NotABlockError("its output module does not take hidden values and a residual") from error
    if not isinstance(output, Tensor):
        raise NotABlockError("its output module returns no tensor")
    return output
