"""Plans: what they accept, and the strings that name them."""

from __future__ import annotations

import pytest

from twell import Plan


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("dense", Plan(path="dense")),
        ("block,rows=16", Plan(path="block", block_rows=16)),
        ("row , backend = cpu", Plan(path="row", backend="cpu")),
    ],
)
def test_parse(text, plan):
    assert Plan.parse(text) == plan
    assert Plan.parse(plan.spec) == plan


@pytest.mark.parametrize(
    "text", ["", "fast", "row,rows=x", "row,speed=9", "row,backend=gone", "row,rows=1,rows=2"]
)
def test_parse_rejects(text):
    with pytest.raises(ValueError, match="accepted"):
        Plan.parse(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "sparse"}, r"path: got 'sparse'; accepted: 'auto' \| 'dense'"),
        ({"block_rows": -1}, r"block_rows: got -1; accepted: an integer >= 0"),
        ({"block_rows": True}, "block_rows"),
        ({"backend": "gone"}, r"backend: got 'gone'; accepted: 'dense' \| 'cpu'"),
        ({"backend": []}, r"backend: got \[\]"),
    ],
)
def test_a_plan_is_validated(options, message):
    with pytest.raises(ValueError, match=message):
        Plan(**options)
