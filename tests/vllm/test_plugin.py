"""The plugin from outside: declared, not in the way, and clear where vLLM is missing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HAS_VLLM = importlib.util.find_spec("vllm") is not None


def python(code: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT / "src", capture_output=True, text=True, timeout=300)


def test_vllm_is_told_where_it_is():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"twell": "twell.vllm:register"}


def test_nobody_else_imports_vllm():
    done = python("import twell, twell.hf, twell.cli.app, sys; sys.exit('vllm' in sys.modules)")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed")
def test_without_vllm_the_import_says_how_to_get_it():
    done = python("import twell.vllm")
    assert done.returncode == 1
    assert 'ImportError: twell.vllm needs vllm: pip install -e ".[vllm]"' in done.stderr


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed: make test-vllm")
def test_registered_twice():
    done = python(
        "from twell.vllm import ARCHITECTURES, register; register(); register()\n"
        "from vllm import ModelRegistry\n"
        "found = {name: ModelRegistry.models[name] for name in ARCHITECTURES}\n"
        "assert {model.module_name for model in found.values()} == {'twell.vllm.models'}\n"
    )
    assert done.returncode == 0, done.stderr
