"""Commands that are shown to be pasted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from twell.cli.next_steps import after_training, own_command


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A folder with an executable `twell`, on PATH and no other is."""
    path = tmp_path / "a bin" / "twell"
    path.parent.mkdir()
    path.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(path.parent))
    return path


def test_a_twell_on_the_path_is_called_by_its_name(installed, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(installed), "demo"])
    assert own_command() == "twell"


def test_another_twell_is_called_by_its_path(installed, monkeypatch):
    monkeypatch.setattr(sys, "argv", [".venv/bin/twell", "demo"])
    assert own_command() == ".venv/bin/twell"
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "argv", [str(installed), "demo"])
    assert own_command() == f"'{installed}'"


def test_a_module_is_called_as_one(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["src/twell/__main__.py", "demo"])
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    assert own_command() == "/usr/bin/python3 -m twell"


def test_a_dense_run_is_not_explained(installed, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(installed)])
    assert after_training(Path("my run"), sparse=False) == [
        "twell generate 'my run' --prompt \"def main(\"",
        "twell report 'my run'",
    ]
    assert "twell explain 'my run' --text python" in after_training(
        Path("my run"), sparse=True, source="python"
    )
