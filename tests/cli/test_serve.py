"""`twell serve`: which server is started, and what is said where there is none."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from twell.cli import serve
from twell.cli.app import app
from twell.cli.serve import choose_server


@pytest.fixture
def installed(monkeypatch):
    """Packages that seem to be installed."""
    packages: set[str] = set()
    monkeypatch.setattr(serve, "_has", packages.__contains__)
    return packages


@pytest.fixture
def started(monkeypatch):
    """What would have been started."""
    commands: list[list[str]] = []
    monkeypatch.setattr(serve.os, "execv", lambda program, command: commands.append(command))
    return commands


TRANSFORMERS = {"transformers", "fastapi", "uvicorn", "openai", "pydantic"}


def test_vllm_comes_first(installed):
    installed |= {"vllm", *TRANSFORMERS}
    server = choose_server("folder", ["--port", "8001"])
    assert server.name.startswith("vLLM ")
    options = ["serve", "folder", "--port", "8001"]
    assert server.command == [sys.executable, "-m", "twell.vllm", *options]


def test_else_transformers_which_has_to_know_our_models(installed):
    installed |= TRANSFORMERS
    server = choose_server("folder", ["--device", "cpu"])
    assert "transformers" in server.name
    assert "vLLM is not installed" in server.name
    options = ["serve", "folder", "--device", "cpu"]
    assert server.command == [sys.executable, "-m", "twell.hf", *options]


def test_neither(installed):
    installed |= TRANSFORMERS - {"uvicorn"}
    with pytest.raises(ImportError, match=r'"\.\[vllm\]".*"\.\[serve\]".*lacks uvicorn$'):
        choose_server("folder", [])


def test_the_command(installed, started, tmp_path):
    installed.add("vllm")
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "model" / "config.json").write_text("{}")
    done = CliRunner().invoke(app, ["serve", str(run), "--", "--port", "8001"], catch_exceptions=False)
    assert done.exit_code == 0
    assert f"serving {run} as model '{run / 'model'}' with vLLM" in done.output
    assert started[0][3:] == ["serve", str(run / "model"), "--port", "8001"]
    CliRunner().invoke(app, ["serve", str(run), "--dtype", "float32"], catch_exceptions=False)
    assert started[1][-2:] == ["--dtype", "float32"]


def test_a_missing_folder_is_named(installed, started):
    installed.add("vllm")
    with pytest.raises(ValueError, match=r"model: got '\./nowhere'"):
        CliRunner().invoke(app, ["serve", "./nowhere"], catch_exceptions=False)
    assert not started
