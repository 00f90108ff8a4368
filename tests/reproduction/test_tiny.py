"""What `twell reproduce --scale tiny` left in runs/reproduce-tiny shows what the paper shows; speed apart,
which depends on the machine. `make reproduce` runs both."""

from __future__ import annotations

import json
import math

import pytest

pytest.importorskip("transformers")
pytest.importorskip("PIL")
from PIL import Image

from twell.reproduction.recipes import SCALES, experiments_of, plan
from twell.reproduction.results import tables

from ..train.runs import ROOT

pytestmark = pytest.mark.reproduction
FOLDER = ROOT / "runs" / "reproduce-tiny"


@pytest.fixture(scope="module")
def results():
    path = FOLDER / "results.json"
    assert path.exists(), "first: twell reproduce --scale tiny"
    return json.loads(path.read_text())


def held_out(results, run: str, name: str) -> float:
    return results["runs"][run]["summary"][f"held_out_{name}"]


def test_everything_ran(results):
    planned = plan("tiny")
    assert set(results["runs"]) == set(planned.runs)
    for name, run in results["runs"].items():
        assert "failure" not in run
        assert run["summary"]["steps"] == planned.configs[name].train.steps
        # It has learnt something: 2,048 tokens, equally likely, have 7.6.
        assert held_out(results, name, "ce_loss") < math.log(2048) - 1
    assert [table.name for table in tables(results)] == list(planned.experiments)
    for plot in ("sweep.png", "training.png", "speedup.png"):
        with Image.open(FOLDER / plot) as image:
            assert min(image.size) > 300
    assert "1.188x" in (FOLDER / "report.html").read_text()


def test_more_penalty_fewer_active_neurons(results):
    sweep = experiments_of(SCALES["tiny"])["lambda"].runs
    active = [held_out(results, run, "nnz") / results["runs"][run]["neurons"] for run in sweep]
    assert active == sorted(active, reverse=True)
    assert active[0] > 0.2
    assert active[sweep.index("lambda-2e-5")] < 0.05
    assert active[-1] < 0.01


def test_a_mild_penalty_costs_little(results):
    base = held_out(results, "lambda-0", "ce_loss")
    for run in ("lambda-6e-6", "lambda-1e-5", "lambda-2e-5", "lambda-3e-5"):
        assert held_out(results, run, "ce_loss") < 1.05 * base


def test_models_of_other_sizes_and_kinds_get_sparse_too(results):
    for kind in ("0.5b-", "2b-", "non-gated-"):
        dense, sparse = (held_out(results, f"{kind}lambda-{l1}", "nnz") for l1 in ("0", "2e-5"))
        assert sparse < dense / 4


def test_timed_models_compute_the_same(results):
    for name, run in results["runs"].items():
        if name == "silu":
            assert run["speed"] == {}
            continue
        assert run["speed"]["forward"]["difference"] < 1e-5  # of logits, in float32
        assert run["speed"]["step"]["difference"] < 1e-5  # of blocks' outputs and gradients
        assert run["speed"]["forward"]["gain"] > 0
        assert run["speed"]["step"]["gain"] > 0
