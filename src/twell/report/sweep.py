"""Runs that differ in lambda only, so that one can be held against another."""

from __future__ import annotations

from collections.abc import Sequence

from .inputs import Run

CLOSE = 1.02
"""Cross-entropy over lambda 0's that the paper calls no loss."""


def _kind(run: Run) -> str:
    """Equal for runs that differ in lambda only; a dense model belongs to the sweep of its twins."""
    from ..train.run_folder import HARMLESS  # here: records need none of the training extra

    settings = run.config.as_dict()
    settings.pop("preset", None)
    settings["recipe"].pop("l1", None)
    settings["model"].pop("activation", None)
    for section, names in HARMLESS.items():
        for name in names:
            settings[section].pop(name, None)
    return str(settings)


def sweeps(runs: Sequence[Run]) -> list[list[Run]]:
    """Finished runs of at least two lambdas, in their order; dense ones come last."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run.summary:
            groups.setdefault(_kind(run), []).append(run)
    found = []
    for group in groups.values():
        sparse = [run for run in group if run.l1 is not None]
        activations = {run.config.model.activation for run in sparse}
        if len({run.l1 for run in sparse}) > 1 and len(activations) == 1:
            found.append([*sorted(sparse, key=lambda run: run.l1), *(r for r in group if r.l1 is None)])
    return found


def ordered(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Runs of a sweep by lambda, at the place of their first; others as they came."""
    groups = sweeps(runs)
    found: list[Run] = []
    for run in runs:
        group = next((group for group in groups if run in group), [run])
        found += [one for one in group if one not in found]
    return tuple(found)


def base_run(run: Run, runs: Sequence[Run]) -> Run | None:
    """The run with lambda 0 of the same sweep."""
    for group in sweeps(runs):
        if run in group:
            return next((other for other in group if other.l1 == 0), None)
    return None


def sparsest_good(runs: Sequence[Run]) -> Run | None:
    """The sparsest run that costs at most 2% of cross-entropy; without a sweep the sparsest of all."""
    sparse = [run for run in runs if run.l1 is not None and run.nnz is not None]
    good = []
    for run in sparse:
        base = base_run(run, runs)
        if base is None or base.loss is None or (run.loss is not None and run.loss <= CLOSE * base.loss):
            good.append(run)
    return min(good or sparse, key=lambda run: run.nnz / run.config.model.intermediate_size, default=None)
