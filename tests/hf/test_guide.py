"""The snippets of docs/models.md run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")

GUIDE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_guide_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    assert len(snippets) >= 4
    names: dict = {}
    for snippet in snippets:
        exec(snippet, names)
    assert type(names["dense"]).__name__ == "LlamaForCausalLM"
    assert names["sparse"].l1_weight == 2e-5
