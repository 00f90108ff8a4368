"""Compares a released checkpoint with what was published of it: active neurons on text, accuracy on tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ._errors import reject
from .evaluation import PAPER_TASKS, evaluate_tasks
from .profiling import Profile, profile_model

# Published figures are rounded to whole neurons, and other text of the same kind moves them by a few percent.
NNZ_TOLERANCE = 0.10
# Percentage points. The mean of the seven tasks has a standard error of 0.5, though of the same questions;
# what differs is the version of the harness and of the data.
ACCURACY_TOLERANCE = 1.0
PASSED, FAILED, NOT_JUDGED = "pass", "FAIL", "not judged"


class PaperModel(NamedTuple):
    """What the paper says of a model. nnz: None where it says nothing; accuracy: percent."""

    name: str
    nnz: float | None
    accuracy: float


_PAPER_SIZES = (2048, 5632)
PAPER_MODELS = {
    8: PaperModel("0.5B", 39, 40.4),
    18: PaperModel("1B", None, 44.7),
    28: PaperModel("1.5B", 29, 46.2),
    38: PaperModel("2B", 24, 48.8),
}
"""By number of layers."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a model should show. nnz: mean over layers; accuracy: mean over tasks, in percent.

    source:   whose figures these are.
    shapes:   whether activity should be distributed as in the paper: the first two layers least active, the
              first token of a sequence far more than the mean.
    """

    source: str
    nnz: float | None = None
    accuracy: float | None = None
    shapes: bool = False

    def __post_init__(self) -> None:
        for name, most in (("nnz", math.inf), ("accuracy", 100.0)):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= most:
                reject(f"expect {name}", value, f"a number from 0 to {most:g}")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison. measured, expected, tolerance: in words; verdict: one of the three above."""

    what: str
    measured: str
    expected: str
    tolerance: str
    verdict: str
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What was compared. profile: None without text; tasks: task -> percent; missing: what -> why."""

    expected: Expected
    checks: list[Check]
    profile: Profile | None = None
    tasks: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.verdict == FAILED]

    @property
    def passed(self) -> bool:
        """Whether everything that was asked for was measured, and nothing failed."""
        return not self.failed and not self.missing


def published(config: Any) -> Expected | None:
    """What the paper says of a model with this config; None if it is not one of the paper's."""
    sizes = getattr(config, "hidden_size", None), getattr(config, "intermediate_size", None)
    model = PAPER_MODELS.get(getattr(config, "num_hidden_layers", None))
    if model is None or sizes != _PAPER_SIZES or not config.model_type.endswith("_sparse_relu"):
        return None
    source = f"the paper's {model.name} model"
    return Expected(source=source, nnz=model.nnz, accuracy=model.accuracy, shapes=True)


def verify_model(
    model: Any,
    tokenizer: Any,
    expected: Expected,
    *,
    documents: Iterable[str] | None,
    tasks: Sequence[str] = PAPER_TASKS,
    include: Path | None = None,
    sequence_length: int | None = None,
    max_tokens: int | None = None,
    limit: int | None = None,
    batch: int = 8,
    progress: Callable[[int], None] | None = None,
    say: Callable[[list[str]], None] | None = None,
) -> Verification:
    """Measure a sparse model and compare. What cannot be measured is named, and the rest is measured.

    documents:   text to count active neurons on; None leaves that out.
    tasks:       of lm-eval; none leaves them out. include: a folder of your own.
    limit:       examples per task: their accuracy is then shown and not judged against the paper's.
    progress:    called with the number of tokens after every batch of text.
    say:         called with tasks that are about to run.
    """
    profile, scores, missing = None, {}, {}
    if documents is not None:
        try:
            options = {"sequence_length": sequence_length, "max_tokens": max_tokens, "progress": progress}
            profile = profile_model(
                model, tokenizer, documents, batch=batch, sample=0, repetitions=0, **options
            )
        except (ImportError, OSError, ValueError) as error:
            missing["active neurons"] = _one_line(error)
    if tasks:
        failed: dict[str, str] = {}
        try:
            found = evaluate_tasks(
                model,
                tokenizer,
                list(tasks),
                include=include,
                batch=batch,
                limit=limit,
                missing=failed,
                say=say,
            )
            scores = {name: 100 * accuracy for name, accuracy in found.items()}
        except ImportError as error:
            missing["tasks"] = _one_line(error)
        missing |= {f"task {name}": why for name, why in failed.items()}
    checks = [] if profile is None else _activity_checks(profile, expected)
    if tasks:
        checks.append(_accuracy_check(scores, len(tasks), limit, expected))
    return Verification(expected=expected, checks=checks, profile=profile, tasks=scores, missing=missing)


def _activity_checks(profile: Profile, expected: Expected) -> list[Check]:
    mean = profile.mean_nnz
    checks = [_compared("mean nnz", mean, expected.nnz, NNZ_TOLERANCE, relative=True)]
    if not expected.shapes:
        return checks
    means = [layer.nnz.mean for layer in profile.layers]
    least = sorted(range(len(means)), key=means.__getitem__)[:2]
    checks.append(
        Check(
            what="least active layers",
            measured=", ".join(map(str, sorted(least))),
            expected="0, 1",
            tolerance="exactly",
            verdict=PASSED if sorted(least) == [0, 1] else FAILED,
        )
    )
    first = [layer.nnz_by_position[0] for layer in profile.layers if layer.nnz_by_position is not None]
    if first:
        ratio = sum(first) / len(first) / max(mean, 1e-9)
        checks.append(
            Check(
                what="first token over mean",
                measured=f"{ratio:.1f}x",
                expected="far more",
                tolerance="above 2x",
                verdict=PASSED if ratio > 2 else FAILED,
            )
        )
    return checks


def _accuracy_check(scores: dict[str, float], wanted: int, limit: int | None, expected: Expected) -> Check:
    what = f"mean accuracy of {wanted} tasks, %"
    if len(scores) < wanted:
        reason = f"{len(scores)} of {wanted} tasks could be run"
        return Check(
            what=what,
            measured="-",
            expected="-" if expected.accuracy is None else f"{expected.accuracy:.1f}",
            tolerance=f"{ACCURACY_TOLERANCE:g}",
            verdict=NOT_JUDGED,
            why=reason,
        )
    mean = sum(scores.values()) / len(scores)
    check = _compared(what, mean, expected.accuracy, ACCURACY_TOLERANCE, relative=False)
    own_tasks = set(scores) != set(PAPER_TASKS)
    if expected.shapes and (limit is not None or own_tasks):
        why = "other tasks than the paper's" if own_tasks else f"{limit} examples of each task only"
        return Check(**{**check.__dict__, "verdict": NOT_JUDGED, "why": why})
    return check


def _compared(what: str, measured: float, wanted: float | None, tolerance: float, *, relative: bool) -> Check:
    allowed = f"{tolerance:.0%}" if relative else f"{tolerance:g}"
    if wanted is None:
        why = "no figure was published or given"
        return Check(
            what=what,
            measured=f"{measured:.1f}",
            expected="-",
            tolerance=allowed,
            verdict=NOT_JUDGED,
            why=why,
        )
    apart = abs(measured - wanted)
    within = apart <= (tolerance * wanted if relative else tolerance)
    return Check(
        what=what,
        measured=f"{measured:.1f}",
        expected=f"{wanted:g}",
        tolerance=allowed,
        verdict=PASSED if within else FAILED,
    )


def _one_line(error: BaseException) -> str:
    return f"{error}".strip().partition("\n")[0] or type(error).__name__
