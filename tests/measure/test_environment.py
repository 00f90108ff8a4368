"""Environment: JSON-ready descriptions, and the commit of repositories made for the test."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import twell
from twell import _processor
from twell._processor import cpu_name
from twell.measure import commit, environment, hardware, versions

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false"]
    finished = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True
    )
    return finished.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file.txt").write_text("one\n")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "first")
    return folder


@needs_git
def test_clean_repository(repository, monkeypatch):
    head = git(repository, "rev-parse", "--short", "HEAD")
    assert commit(repository) == head
    assert commit(str(repository / "inner" / "file.txt")) == head


@needs_git
def test_by_default_it_is_that_of_twell(repository, monkeypatch):
    """Wherever a command is given; and an installed copy is no part of the repository around it."""
    installed = repository / "inner" / "environment.py"
    monkeypatch.setattr(environment, "__file__", str(installed))
    installed.write_text("")
    assert commit() == "unknown"
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "--message", "second")
    monkeypatch.chdir("/")
    assert commit() == commit(repository) == git(repository, "rev-parse", "--short", "HEAD")


@needs_git
def test_untracked_files_are_not_dirt(repository):
    (repository / "new.txt").write_text("new\n")
    assert not commit(repository).endswith("+dirty")


@needs_git
@pytest.mark.parametrize("staged", [False, True])
def test_modified_files_are_dirt(repository, staged):
    head = commit(repository)
    (repository / "inner" / "file.txt").write_text("two\n")
    if staged:
        git(repository, "add", ".")
    assert commit(repository / "inner") == f"{head}+dirty"


@needs_git
def test_git_variables_of_another_repository_are_ignored(repository, tmp_path, monkeypatch):
    head = commit(repository)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert commit(repository) == head


@needs_git
def test_no_commit_yet(tmp_path):
    git(tmp_path, "init", "--quiet")
    assert commit(tmp_path) == "unknown"


def test_no_repository(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit(tmp_path) == "unknown"
    assert commit(tmp_path / "missing" / "file.txt") == "unknown"
    assert commit("nul\0byte/file.txt") == "unknown"


def test_no_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit(tmp_path) == "unknown"


def test_git_that_hangs(monkeypatch):
    def hang(*_, **__):
        raise subprocess.TimeoutExpired("git", 1)

    monkeypatch.setattr(environment.subprocess, "run", hang)
    assert commit() == "unknown"


def test_hardware_of_the_cpu():
    machine = hardware("cpu")
    assert json.loads(json.dumps(machine)) == machine
    assert set(machine) == {"device", "cpu", "logical_cores", "torch_threads", "memory_gib"}
    assert machine["device"] == "cpu"
    assert machine["cpu"]
    assert machine["logical_cores"] >= 1
    assert machine["torch_threads"] == torch.get_num_threads()
    assert machine["memory_gib"] is None or machine["memory_gib"] > 0


def test_cpu_name_without_proc(monkeypatch):
    monkeypatch.setattr(_processor, "_CPUINFO", "/nowhere/cpuinfo")
    monkeypatch.setattr(platform, "processor", lambda: "some processor")
    cpu_name.cache_clear()
    try:
        assert hardware()["cpu"] == "some processor"
    finally:
        cpu_name.cache_clear()


def test_hardware_of_a_missing_device():
    with pytest.raises(ValueError, match="device: got 'cuda:99'"):
        hardware("cuda:99")


def test_driver_is_a_version_or_none():
    driver = environment._nvidia_driver()
    assert driver is None or driver[0].isdigit()


def test_versions():
    found = versions()
    assert set(found) == {"python", "torch", "triton", "transformers", "twell", "platform"}
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["torch"] == torch.__version__
    assert type(found["torch"]) is str
    assert found["twell"] == twell.__version__
    assert found["triton"] is None or found["triton"][0].isdigit()
    assert environment._installed_version("no-such-distribution-of-twell") is None
