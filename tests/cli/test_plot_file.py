"""`--plot`: refused before the work starts, by every command that has it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
from typer.testing import CliRunner

from twell.cli.app import app
from twell.cli.plot_file import check_plot, short_name

COMMANDS = {
    "eval": ("eval", "MODEL", "--text", "TEXT"),
    "explain": ("explain", "MODEL", "--text", "TEXT"),
    "prune": ("prune", "MODEL", "--text", "TEXT", "--out", "OUT"),
    "verify": ("verify", "MODEL", "--text", "TEXT", "--skip", "tasks", "--expect", "nnz=1"),
    "tune": ("tune", "--device", "cpu"),
    "bench": ("bench", "inference", "--device", "cpu"),
    "bench training": ("bench", "training", "--device", "cpu", "--layers", "1"),
}


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)


def test_what_can_be_drawn():
    for name in (None, "plot.png", "PLOT.PNG", "plot.pdf", "plot.svg"):
        check_plot(None if name is None else Path(name))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("folder.png", r"^plot: got .*folder\.png, a folder; accepted: a file to write"),
        ("plot", r"^plot: got .*plot; accepted: a name that ends in \.png, \.pdf, \.svg"),
        ("plot.docx", r"^plot: got .*plot\.docx; accepted: a name that ends in"),
        ("nowhere/plot.png", r"^plot: got .*plot\.png; accepted: a file in a folder that exists"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, name, message):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ValueError, match=message):
        check_plot(tmp_path / name)


@pytest.fixture
def text(tmp_path):
    """A model's folder and a text that are there, and nothing that could be loaded."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "text.txt").write_text("some words")
    return {
        "MODEL": tmp_path / "model",
        "TEXT": tmp_path / "text.txt",
        "OUT": tmp_path / "out",
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_before_its_work(tmp_path, text, command, monkeypatch):
    arguments = [text.get(word, word) for word in COMMANDS[command]]
    with pytest.raises(ValueError, match=r"plot: got .*in a folder that exists"):
        run(*arguments, "--plot", tmp_path / "nowhere" / "plot.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="plots need matplotlib"):
        run(*arguments, "--plot", tmp_path / "plot.png")


@pytest.mark.parametrize(
    "arguments", [("eval", "MODEL", "--tasks", "piqa"), ("verify", "MODEL", "--skip", "text")]
)
def test_tasks_have_no_layers_to_draw(tmp_path, text, arguments):
    with pytest.raises(ValueError, match=r"accepted: .*text with it: the plot shows what layers do"):
        run(*(text.get(word, word) for word in arguments), "--plot", tmp_path / "plot.png")


def test_a_folder_is_known_by_its_own_name(tmp_path, monkeypatch):
    (tmp_path / "tiny").mkdir()
    assert short_name(str(tmp_path / "tiny")) == "tiny"
    monkeypatch.chdir(tmp_path / "tiny")
    assert short_name(".") == "tiny"
    assert short_name("SakanaAI/SparseLM1.5B") == "SakanaAI/SparseLM1.5B"
