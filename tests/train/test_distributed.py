"""Two processes over gloo give the run of one."""

from __future__ import annotations

import json

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("datasets")
from packaging import version  # transformers needs it

from twell.train.run import train
from twell.train.settings import to_yaml

from .runs import QUIET, launch, logged, small_run, write_corpus


@pytest.mark.slow
def test_two_processes_equal_one_and_resume(tmp_path):
    """Neurons that fire above 0.3 only: some are silent, are revived, and are the same ones everywhere."""
    corpus = write_corpus(tmp_path / "corpus")
    config = small_run(
        corpus,
        "train.micro_batch=1",
        "train.steps=6",
        "train.save_every=3",
        "train.eval_every=3",
        "recipe.revive_every=2",
        "recipe.dead_after=128",
        "model.activation=fatrelu(0.3)",
    )
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    train(config, tmp_path / "run1", console=QUIET)
    out = launch(2, "--config", tmp_path / "run.yaml", "--out", tmp_path / "run2")
    assert out.count("held-out perplexity") == 1  # one process speaks
    values = ("loss", "ce_loss", "l1_loss", "nnz", "dead", "revived")
    one, two = (logged(tmp_path / f"run{n}", *values) for n in (1, 2))
    assert len(one) == 6
    assert one[-1][-1] > 0
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    found = [json.loads((tmp_path / f"run{n}" / "summary.json").read_text()) for n in (1, 2)]
    for name in ("held_out_ce_loss", "held_out_nnz"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-5)

    if version.parse(transformers.__version__) < version.parse("5.23"):
        pytest.skip("transformers loads the optimiser's state to cpu:0, which torch does not know")
    manifest = tmp_path / "run2" / "checkpoint-6" / "manifest.json"
    manifest.unlink()  # as if the last save had not come to its end
    (tmp_path / "run2" / "summary.json").unlink()
    launch(2, "--resume", tmp_path / "run2")
    assert logged(tmp_path / "run2", *values) == two
    assert manifest.exists()


@pytest.mark.slow
def test_revival_of_sharded_weights():
    assert launch(2, module=("tests.train.sharded_revival",)).count("revived the same") == 2
