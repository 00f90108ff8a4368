"""Tables: ours beside the paper's, and only what compares."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from twell.evaluation import PAPER_TASKS
from twell.reproduction.results import tables, where


def results(**more):
    """As results.json holds it, of the recommended lambda and its reference."""
    run = {"neurons": 1000, "layers": 2, "l1": 0.0, "paper_l1": 0.0, "title": "ReLU, lambda 0"}
    sparse = run | {"l1": 2e-3, "paper_l1": 2e-5, "title": "ReLU, lambda 2e-3"}
    found = {"held_out_ce_loss": 4.0, "held_out_nnz": 400.0, "dead": 0.0, "dead_window": 40_000}
    speed = {"tokens": 1024, "forward": {"gain": 1.5}, "step": {"gain": 1.25}}
    return {
        "scale": "tiny",
        "experiments": {"lambda": ["lambda-0", "lambda-2e-5", "lambda-1e-4"]},
        "runs": {
            "lambda-0": run | {"summary": found},
            "lambda-2e-5": sparse
            | {"summary": found | {"held_out_ce_loss": 4.1, "held_out_nnz": 5.0}, "speed": speed}
            | more,
        },
    }


def row(found, place: int = 1) -> dict[str, str]:
    (table,) = tables(found)
    return dict(zip(table.columns, table.rows[place], strict=True))


def test_ours_and_the_papers():
    found = row(results())
    assert found == {
        "": "ReLU, lambda 2e-3",
        "lambda": "2e-3 / 2e-5",
        "cross-entropy": "4.100",
        "difference": "+2.5%",
        "accuracy": "- / 46.2",
        "active": "5.0 (0.5%) / 29 (0.51%)",
        "dead": "0.0% / >30%",
        "forward": "1.50x / 1.188x",
        "training step": "1.25x / 1.116x",
    }


def test_accuracy_needs_the_papers_tasks():
    scores = {task: 40.0 + place for place, task in enumerate(PAPER_TASKS)}
    assert row(results(tasks=scores))["accuracy"] == "43.0 / 46.2"
    assert row(results(tasks={"twell_own": 90.0}))["accuracy"] == "- / 46.2"
    (table,) = tables(results(tasks={}, tasks_missing={"piqa": "no network"}))
    assert "No accuracy of ReLU, lambda 2e-3: piqa: no network." in table.notes


def test_a_run_that_failed_is_named():
    (table,) = tables(results(failure="the loss is nan at step 7", summary={}, speed={}))
    assert table.notes[-1] == "ReLU, lambda 2e-3 failed: the loss is nan at step 7."
    assert table.rows[1][:2] == ("ReLU, lambda 2e-3", "2e-3 / 2e-5")


def test_every_commit_and_machine_is_named():
    found = results()
    for run, commit, threads in zip(found["runs"].values(), ("aaa", "bbb"), (1, 2), strict=True):
        run["source"] = {
            "hardware": {"cpu": "A CPU", "torch_threads": threads},
            "versions": {"torch": "2.13"},
            "commit": commit,
            "date": "2026-01-31T12:00:00+00:00",
        }
    assert where(found) == "A CPU, 1 thread; A CPU, 2 threads, torch 2.13, commit aaa, bbb, 2026-01-31"
