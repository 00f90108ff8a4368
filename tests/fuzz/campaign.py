"""Many cases in a row: progress, counts, failures, the record."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from twell.backends import BACKENDS
from twell.measure.environment import commit, hardware, versions

from ..backends import interpreted_backend
from .case import Case
from .draw import KINDS, draw
from .judge import StockRefusesError, judge
from .shrink import shrink

_CHUNK = {"cpu": 100, "cuda": 100, "interpreted": 2}  # cases between two lines of progress

_MOST_RESERVED = 3 << 30  # bytes that a process keeps between two cases
_MOST_SHRUNK = {"cpu": 10, "cuda": 2, "interpreted": 2}  # failures; on a GPU every candidate compiles kernels


class Failure(NamedTuple):
    index: int
    case: Case
    problems: list[str]


class Chunk(NamedTuple):
    """What a stretch of cases gave."""

    cases: int
    counts: Counter
    failures: list[Failure]


def prepare(device: str) -> None:
    """This process for cases on `device`: one thread, no reduced precision, kernels that were asked for."""
    torch.set_num_threads(1)
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False
    if device == "interpreted":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton
        backend = interpreted_backend()
        BACKENDS.setdefault(backend.name, backend)


def run_cases(device: str, seed: int, indices: Iterable[int]) -> Chunk:
    prepare(device)
    counts, failures, number = Counter(), [], 0
    for index in indices:
        number += 1
        case = draw(device, seed, index)
        counts.update(_labels(case))
        try:
            problems, ran = judge(case)
        except StockRefusesError:
            counts["refused by stock"] += 1
            continue
        counts.update(ran)
        if device == "cuda" and torch.cuda.memory_reserved() > _MOST_RESERVED:
            torch.cuda.empty_cache()  # several processes share the GPU
        if problems:
            failures.append(Failure(index, case, problems))
    return Chunk(number, counts, failures)


def _labels(case: Case) -> list[str]:
    """The kinds a case is counted under."""
    what = "training" if case.trains else "inference"
    return [
        what,
        f"dtype {case.dtype}",
        f"entry {case.entry}",
        f"activation {case.activation.split('(')[0]}",
        "gated" if case.gated else "plain",
        f"plan {(case.plan or 'none').split(',')[0]}",
        *(["autocast"] if case.autocast else []),
        *(["NaN, Inf and other values"] if case.specials else []),
        *(["strides"] if case.layouts else []),
        *(["weights changed in place"] if case.changed else []),
        *([f"loss {case.loss}"] if case.trains else []),
    ]


class Campaign:
    """A run of the fuzzer; `record` is what is kept of it."""

    def __init__(
        self, device: str, seed: int, cases: range, workers: int = 1, revision: str | None = None
    ) -> None:
        self.device, self.seed, self.cases, self.workers = device, seed, cases, workers
        self.revision = revision or commit(__file__)
        self.counts: Counter = Counter()
        self.failures: list[dict[str, Any]] = []
        self.done, self.seconds = 0, 0.0

    def run(self, say: Callable[[str], None], most_seconds: float | None) -> None:
        most_shrunk = _MOST_SHRUNK[self.device]
        begun = said = time.monotonic()
        for chunk in self._chunks(begun, most_seconds):
            self.done += chunk.cases
            self.counts.update(chunk.counts)
            for failure in chunk.failures:
                self._keep(failure, say, shrinking=len(self.failures) < most_shrunk)
            self.seconds = time.monotonic() - begun
            if time.monotonic() - said > 5 or self.done == len(self.cases):
                said = time.monotonic()
                rate = self.done / max(self.seconds, 1e-9)
                say(
                    f"{self.done:,} of {len(self.cases):,} cases, {len(self.failures)} failed, "
                    f"{self.seconds:.0f} s, {rate:.0f} a second"
                )

    def _chunks(self, begun: float, most_seconds: float | None) -> Iterable[Chunk]:
        pieces = self._pieces()
        late = (lambda: False) if most_seconds is None else (lambda: time.monotonic() - begun > most_seconds)
        if self.workers <= 1:
            for piece in pieces:
                if late():
                    return
                yield run_cases(self.device, self.seed, piece)
            return
        with ProcessPoolExecutor(self.workers, mp_context=get_context("spawn")) as pool:
            coming = [pool.submit(run_cases, self.device, self.seed, piece) for piece in pieces]
            for future in coming:
                if late():
                    pool.shutdown(cancel_futures=True)
                    return
                yield future.result()

    def _pieces(self) -> list[range]:
        """Stretches of cases for one process each. On a GPU each has one kind, so that processes do not all
        compile the same kernels at once."""
        size, kinds = _CHUNK[self.device], 1 if self.device == "cpu" else KINDS
        longest = -(-len(self.cases) // kinds)
        starts = range(0, longest, size)
        pieces = [self.cases[kind::kinds][start : start + size] for start in starts for kind in range(kinds)]
        return [piece for piece in pieces if piece]

    def _keep(self, failure: Failure, say: Callable[[str], None], shrinking: bool) -> None:
        say(f"case {failure.index} failed: {'; '.join(failure.problems)}")
        case = failure.case
        if shrinking:
            case = shrink(case, lambda candidate: _fails_alike(candidate, failure.problems))
        say(f"  {reproducer(case)}")
        self.failures.append(
            {
                "index": failure.index,
                "problems": failure.problems,
                "case": failure.case.to_json(),
                "shrunk": case.to_json() if shrinking else None,
                "reproducer": reproducer(case),
            }
        )

    def record(self) -> dict[str, Any]:
        place = "cuda" if self.device == "cuda" else "cpu"
        return {
            "device": self.device,
            "seed": self.seed,
            "first": self.cases.start,
            "cases": self.done,
            "seconds": round(self.seconds, 1),
            "failed": len(self.failures),
            "counts": dict(sorted(self.counts.items())),
            "failures": self.failures,
            "commit": self.revision,
            "hardware": hardware(place),
            "versions": versions(),
        }


def reproducer(case: Case) -> str:
    """A command that runs the case again."""
    return f"{sys.executable.rsplit('/', 1)[-1]} -m tests.fuzz --case '{case.to_json()}'"


def _fails_alike(case: Case, problems: list[str]) -> bool:
    """Whether it fails in the way of the first problem."""
    try:
        found, _ = judge(case)
    except StockRefusesError:
        return False
    return _way(problems[0]) in map(_way, found)


def _way(problem: str) -> str:
    """A problem without its numbers."""
    head = problem.split(":")
    return head[0] if problem.startswith("raised") else ":".join(head[:2])
