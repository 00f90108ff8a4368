"""`twell eval`: the plot, and how much there is to do."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("typer")
pytest.importorskip("matplotlib")
from typer.testing import CliRunner

from twell import plots
from twell.cli.app import app
from twell.cli.evaluate import _total


def run(*arguments):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)], catch_exceptions=False)


def test_activity_is_drawn(saved, tmp_path, monkeypatch):
    root, corpus = saved
    drawn = []
    real = plots.layer_activity

    def draw(active, neurons, dead, *arguments, **options):
        drawn.append((list(active), list(neurons), list(dead)))
        real(active, neurons, dead, *arguments, **options)

    monkeypatch.setattr(plots, "layer_activity", draw)
    plot, out = tmp_path / "activity.png", tmp_path / "found.json"
    done = run(root / "ours", "--text", corpus, "--max-tokens", 640, "--plot", plot, "--out", out)
    assert done.output.splitlines()[-1] == f"plot: {plot}"
    assert plot.read_bytes().startswith(b"\x89PNG")
    found = json.loads(out.read_text())
    assert drawn == [(found["l0"], found["neurons"], found["silent"])]


def test_a_model_without_zeros_has_nothing_to_draw(saved, tmp_path):
    root, corpus = saved
    plot = tmp_path / "activity.png"
    done = run(root / "silu", "--text", corpus, "--max-tokens", 640, "--plot", plot)
    assert done.exit_code == 0
    assert done.output.splitlines()[-1] == "no plot: no block of this model has exact zeros"
    assert not plot.exists()


@pytest.mark.parametrize(("most", "total"), [(None, 4096), (640, 640), (9999, 4096)])
def test_how_many_held_out_tokens_there_are(most, total):
    assert _total(SimpleNamespace(tokens=4096), most) == total
