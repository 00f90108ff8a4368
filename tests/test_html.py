"""Tables of notebooks and reports: whole, escaped, and what `print` shows."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from torch import nn

import twell
from twell import SparseMLP
from twell._html import escaped, table, visible


def cells(drawn: str, tag: str) -> list[str]:
    return ["".join(cell.itertext()) for cell in ElementTree.fromstring(drawn).iter(tag)]


def test_a_table_holds_its_cells_as_text():
    rows = [("<b>&\"'", "1"), ("a\x00\ud800", "x" * 50)]
    drawn = table(("name", "n"), rows).replace("class=wrap", "")
    assert cells(drawn, "th") == ["name", "n"]
    assert cells(drawn, "td") == ["<b>&\"'", "1", "a\ufffd\ufffd", "x" * 50]
    assert drawn.count("text-align:left") == 3


def test_texts_stay_on_their_line():
    assert visible("a\n\tb\r") == "a↵⇥b␍"
    assert visible("\u202e\u200bx\ud800") == "\\u202e\\u200bx\\ud800"
    assert visible("naïve 東京 🙂") == "naïve 東京 🙂"
    assert escaped("\x1b[31m") == "\ufffd[31m"


def test_notebooks_show_what_print_shows():
    stock = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    for shown in (twell.sparsify_(stock), twell.explain(nn.Sequential(SparseMLP(16, 32)))):
        drawn = shown._repr_html_().replace("class=wrap", "")
        printed = str(shown)
        assert all(text in printed for text in cells(drawn, "td"))
        assert len(cells(drawn, "th")) == len(cells(drawn, "td"))
    empty = nn.Embedding(2, 2)
    assert "no feed-forward block found" in twell.sparsify_(empty)._repr_html_()
    assert "no sparse block found" in twell.explain(empty)._repr_html_()
