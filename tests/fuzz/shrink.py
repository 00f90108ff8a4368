"""A failing case made smaller while it still fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from .case import NAMES, Case, consistent

_MOST_SECONDS = 30.0


def shrink(case: Case, fails: Callable[[Case], bool], most_seconds: float = _MOST_SECONDS) -> Case:
    """The simplest case that was found in time for which `fails` is true; `case` itself must be one."""
    end = time.monotonic() + most_seconds
    before = None
    while before != case and time.monotonic() < end:
        before = case
        for simpler in (_options, _entries, _tokens, _sizes, _plans):
            case = _smallest(case, simpler, fails, end)
    return case


def _smallest(case: Case, simpler: Callable[[Case], Iterator[Case]], fails, end: float) -> Case:
    """`case` after all steps of one kind that keep it failing."""
    found = True
    while found:
        found = False
        for candidate in simpler(case):
            if time.monotonic() > end:
                return case
            if candidate != case and fails(candidate):
                case, found = candidate, True
                break
    return case


def _options(case: Case) -> Iterator[Case]:
    default = Case()
    plain = (
        "calls",
        "changed",
        "autocast",
        "mode",
        "activation",
        "skewed",
        "sparse_backward",
        "gated",
        "cpu",
    )
    # All neurons active: then fewer are enough.
    together = {name: getattr(default, name) for name in plain} | {"density": 1.0}
    yield _with(case, **together, specials=(), layouts=())
    yield _with(case, trained=())
    for name, value in together.items():
        yield _with(case, **{name: value})
    yield _with(case, loss="weighted")
    if case.entry == "module":
        yield _with(case, entry="stats")
    yield _with(case, entry="ffn")


def _entries(case: Case) -> Iterator[Case]:
    for name in ("specials", "layouts", "biases", "trained"):
        entries = getattr(case, name)
        for place in range(len(entries)):
            yield _with(case, **{name: entries[:place] + entries[place + 1 :]})


def _tokens(case: Case) -> Iterator[Case]:
    if len(case.leading) != 1:
        yield _with(case, leading=(case.tokens,))
    for tokens in _less(case.tokens, 0):
        yield _with(case, leading=(tokens,))


def _sizes(case: Case) -> Iterator[Case]:
    step = 1 if case.device == "cpu" else 8
    for size in _less(case.features, step, step):
        yield _with(case, features=size, outputs=size if case.outputs == case.features else case.outputs)
    for size in _less(case.neurons, step, step):
        yield _with(case, neurons=size)
    if case.outputs > case.features:
        yield _with(case, outputs=case.features)
    for size in _less(case.outputs, step, step):
        yield _with(case, outputs=size)


def _plans(case: Case) -> Iterator[Case]:
    """An automatic plan last: it may measure first, which takes time."""
    if case.plan is not None and case.device == "cpu":
        yield _with(case, plan=case.plan.split(",")[0])
        yield _with(case, plan=None)


def _less(size: int, least: int, step: int = 1) -> Iterator[int]:
    """Smaller sizes: the least, parts of it, one step less."""
    seen = {size}
    for part in (least, size // 4, size // 2, 3 * size // 4, size - step):
        wanted = max(part // step * step, least)
        if wanted not in seen and wanted < size:
            seen.add(wanted)
            yield wanted


def _with(case: Case, **changes: object) -> Case:
    if "trained" in changes and not changes["trained"]:
        changes["loss"] = "weighted"
    changed = replace(case, **changes)
    # What is left of the names is in their order, so that two equal cases are equal.
    return consistent(replace(changed, trained=tuple(name for name in NAMES if name in changed.trained)))
