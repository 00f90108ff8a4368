"""Which paths ran, recorded for those who ask and only while they ask."""

from __future__ import annotations

import re

import pytest
import torch

from twell import Plan, Ran, SparseMLP, _log, ffn, policy, recorded_paths
from twell.synthetic import make_ffn


def test_every_path_is_told():
    operands = make_ffn(6, 16, 32, 4).operands()
    with recorded_paths() as ran:
        for path in ("dense", "row", "block"):
            ffn(*operands, plan=Plan(path=path))
        ffn(operands[0][:1], *operands[1:], plan=Plan(path="row"))
    named = "the plan names it"
    assert ran == [
        Ran("dense", "cpu", 6, 16, 32, reason=named),
        Ran("row", "cpu", 6, 16, 32, reason=named),
        Ran("block", "cpu", 6, 16, 32, reason=named),
        Ran("row", "cpu", 1, 16, 32, reason=named),
    ]


def test_automatic_plans_tell_what_they_chose():
    mlp = SparseMLP(16, 32)
    x = torch.randn(2, 3, 16)
    with recorded_paths() as ran:
        mlp(x).sum().backward()  # gradients: dense
    (piece,) = ran
    assert piece[:6] == ("dense", "cpu", 6, 16, 32, "forward")
    assert "too little work" in piece.reason


@pytest.mark.parametrize(("nnz", "path"), [(4, "row"), (300, "dense")])
def test_chunks_tell_how_active_they_are(nnz, path, monkeypatch):
    monkeypatch.setattr(policy.cpu, "_WORTH_LOOKING_SECONDS", 0.0)
    operands = make_ffn(20, 32, 400, nnz, sigma=0.0, dead=0.0).operands()
    with recorded_paths() as ran:
        ffn(*operands)
    assert [piece.path for piece in ran] == [path]
    assert re.fullmatch(
        r"[\d.]+% of the neurons active in sampled tokens, rows pay up to 13.0%", ran[0].reason
    )


def test_backwards_of_our_own_are_told():
    x, *weights = make_ffn(6, 16, 32, 4).operands()
    with recorded_paths() as ran:
        ffn(x.requires_grad_(), *weights, plan=Plan(path="row")).sum().backward()
    assert [(piece.path, piece.phase) for piece in ran] == [("row", "forward"), ("dense", "backward")]
    assert all(piece.reason for piece in ran)


def test_recordings_are_independent_and_end():
    operands = make_ffn(2, 16, 32, 4).operands()
    with recorded_paths() as outer:
        with recorded_paths() as inner:
            ffn(*operands)
        ffn(*operands)
    ffn(*operands)
    assert (len(inner), len(outer)) == (1, 2)
    assert not _log._recordings


def test_compiled_code_is_not_disturbed():
    operands = make_ffn(4, 16, 32, 4).operands()
    compiled = torch.compile(lambda *tensors: ffn(*tensors), fullgraph=True, backend="eager")
    before = compiled(*operands)
    with recorded_paths():
        assert torch.equal(compiled(*operands), before)
