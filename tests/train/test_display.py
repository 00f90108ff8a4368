"""How a run shows itself: metrics and results in notebooks, training curves as a file."""

from __future__ import annotations

import base64
import io
import json
import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest

pytest.importorskip("matplotlib")
from PIL import Image

from twell.train.display import draw_training, metrics_html, summary_html, summary_rows
from twell.train.log_lines import Metrics, read_metrics


def line(step, **more):
    values = {"ce_loss": 9 / step, "nnz": 64 / step, "dead": 0.125, "tokens_per_second": 2000.4}
    return {"step": step, "tokens": 512 * step, "loss": 1.0, **values, **more}


def parts(html: str) -> tuple[list[list[str]], list[bytes]]:
    """The rows of the table, with its titles, and the images."""
    images = [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]+)"', html)]
    rows = ElementTree.fromstring(re.sub(r"<img[^>]*>", "", f"<div>{html}</div>")).iter("tr")
    return [["".join(cell.itertext()) for cell in row] for row in rows], images


def test_metrics_are_a_list_that_shows_a_table_and_curves(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [line(step) for step in range(1, 101)] + [{"step": 100, "tokens": 51200, "eval_loss": 1.0}]
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    found = read_metrics(path)
    assert isinstance(found, Metrics)
    assert found == lines
    rows, (png,) = parts(found._repr_html_())
    assert rows[0] == ["step", "tokens", "cross-entropy", "active per token", "dead", "tokens/s"]
    assert [row[0] for row in rows[1:]] == ["1", "15", "29", "43", "58", "72", "86", "100"]
    assert rows[-1] == ["100", "51,200", "0.090", "0.6", "12.5%", "2,000"]
    with Image.open(io.BytesIO(png)) as image:
        assert min(image.size) > 300


@pytest.mark.parametrize("count", [1, 2, 8, 9])
def test_few_lines_are_shown_once_each(count):
    rows, _ = parts(metrics_html([line(step) for step in range(1, count + 1)]))
    steps = [int(row[0]) for row in rows[1:]]
    assert steps == sorted(set(steps))
    assert len(steps) == min(count, 8)
    assert (steps[0], steps[-1]) == (1, count)


def test_a_dense_run_has_no_columns_of_sparsity():
    lines = [{"step": 1, "tokens": 8, "ce_loss": 2.0, "tokens_per_second": 3.0}]
    rows, _ = parts(metrics_html(lines))
    assert rows == [["step", "tokens", "cross-entropy", "tokens/s"], ["1", "8", "2.000", "3"]]


def test_what_is_no_number_is_left_out():
    lines = [line(1), line(2, ce_loss="<script>"), line(3, nnz=None), line(4, dead=[1]), line(5, tokens=True)]
    rows, images = parts(metrics_html(lines))
    assert [row[0] for row in rows[1:]] == ["1", "3", "4"]
    assert rows[2][3] == rows[3][4] == ""
    assert len(images) == 1


def test_metrics_without_training():
    assert read_metrics_of([]) == "<p>0 lines, none of training</p>"
    assert "<img" not in read_metrics_of([{"step": 1, "eval_loss": 1.0}])


def read_metrics_of(lines) -> str:
    return Metrics(lines)._repr_html_()


def test_without_matplotlib_there_is_a_table(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    rows, images = parts(metrics_html([line(1), line(2)]))
    assert len(rows) == 3
    assert not images
    assert not draw_training([line(1)], tmp_path / "training.png", title="", subtitle="")
    assert not list(tmp_path.iterdir())


def test_dollars_in_a_name_are_no_mathematics(tmp_path):
    path = tmp_path / "training.png"
    assert draw_training([line(1), line(2)], path, title="a $\\frac$ b", subtitle="")
    assert path.exists()


def test_results_are_readable_and_escaped():
    summary = {"steps": 12, "nnz": 3.14159, "dead": 0.25, "rate": 27753.4, "odd": "<b>", "held_out": None}
    rows = [
        ("steps", "12"),
        ("active per training token", "3.142"),
        ("dead at the end of training", "25.0%"),
        ("rate", "27,753"),
        ("odd", "<b>"),
    ]
    assert summary_rows(summary) == rows
    html = summary_html(summary, "runs/<tiny>: finished")
    assert [tuple(row) for row in parts(html)[0][1:]] == rows
    assert "runs/&lt;tiny&gt;: finished" in html
