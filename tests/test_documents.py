"""README and docs: generated parts match the records, code runs, named paths and commands exist."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(scope="module")
def tables():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("tables")
    sys.path.remove(str(ROOT / "benchmarks"))


def test_tables_and_figures_show_the_records(tables):
    assert tables.drifted() == [], "run `make tables`"


def test_drift_is_noticed(tables, tmp_path, monkeypatch):
    document = tmp_path / "drifted.md"
    text = (ROOT / "README.md").read_text()
    document.write_text(re.sub(r"\*\*(\d)\.", lambda m: f"**{int(m[1]) + 1}.", text, count=1))
    monkeypatch.setattr(tables, "DOCUMENTS", [document])
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "FIGURES", [])
    assert tables.drifted() == ["drifted.md"]


def test_every_record_is_valid(tables):
    files = sorted(tables.RESULTS.glob("*.jsonl"))
    assert files
    for path in files:
        assert tables.read_records(path)


def test_the_usage_example_runs():
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    assert len(code.strip().splitlines()) <= 12
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_links_and_make_targets_exist(document):
    text = document.read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z][a-z-]+)`", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{document.name} names `make {target}`"
    for path in re.findall(r"`((?:tests|benchmarks|docs|src)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), f"{document.name} names {path}"
