"""`twell train`: the training curves that it leaves."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("typer")
pytest.importorskip("matplotlib")
from typer.testing import CliRunner

from twell.cli.app import app
from twell.train.settings import to_yaml

from ..train.runs import small_run, write_corpus


@pytest.fixture
def config(tmp_path):
    run = small_run(write_corpus(tmp_path / "corpus"), "train.steps=3")
    (tmp_path / "small.yaml").write_text(to_yaml(run))
    return tmp_path / "small.yaml"


def run(*arguments):
    return CliRunner().invoke(app, ["train", *map(str, arguments)], catch_exceptions=False)


def test_curves_are_drawn_at_the_end(config, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "run"
    done = run("--config", config, "--out", folder)
    assert done.exit_code == 0, done.output
    *_, model, plot, steps = done.output.splitlines()
    assert (model, plot) == (f"model: {folder / 'model'}", f"plot: {folder / 'training.png'}")
    assert steps.startswith("next: ")
    assert f"twell explain {folder} --text FILE, or " in steps
    assert "tokens of held-out text" in done.output
    assert "dead_window" not in done.output
    assert (folder / "training.png").read_bytes().startswith(b"\x89PNG")
    again = run("--resume", folder)
    assert again.output.splitlines()[-2] == f"plot: {folder / 'training.png'}"


def test_without_matplotlib_nothing_is_said_of_a_plot(config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "run"
    done = run("--config", config, "--out", folder)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-2].startswith("model: ")
    assert not (folder / "training.png").exists()
