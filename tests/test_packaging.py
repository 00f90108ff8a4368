"""What is published about the package agrees with itself. `make wheel` builds and installs it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import twell

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_stands_in_one_place():
    assert "version" in PROJECT["dynamic"]
    assert "version" not in PROJECT
    texts = [path for path in (ROOT / "src").rglob("*.py") if f'"{twell.__version__}"' in path.read_text()]
    assert [path.name for path in texts] == ["_version.py"]


def test_the_changelog_has_the_version_on_top():
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0].split()[1] == twell.__version__


def test_the_citation_agrees_with_the_package():
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["license"] == PROJECT["license"]
    assert "version" not in citation  # it would be a second place
    assert [author["name"] for author in citation["authors"]] == [one["name"] for one in PROJECT["authors"]]
    assert citation["preferred-citation"]["url"] == PROJECT["urls"]["Paper"]
