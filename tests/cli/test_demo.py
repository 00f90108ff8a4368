"""`twell demo` end to end on a model that trains in seconds."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
pytest.importorskip("datasets")
from PIL import Image
from typer.testing import CliRunner

from twell.cli.app import app

from ..train.runs import write_corpus


def small(tmp_path, held_out: float) -> tuple[str, ...]:
    corpus = write_corpus(tmp_path / "corpus")
    return (
        f"data.source={corpus}",
        f"data.cache={tmp_path / 'cache'}",
        "data.vocab_size=384",
        f"data.held_out={held_out}",
        "data.sequence_length=32",
        "model.hidden_size=32",
        "model.intermediate_size=128",
        "model.heads=2",
        "model.layers=2",
        "model.positions=64",
        "train.steps=10",
        "train.batch=4",
        "train.eval_every=5",
        "train.log_every=1",
    )


def demo(output, *settings):
    return CliRunner().invoke(app, ["demo", "--output", str(output), *settings], catch_exceptions=False)


def test_the_demo_trains_checks_times_and_writes(tmp_path):
    out = tmp_path / "out"
    result = demo(out, *small(tmp_path, held_out=0.2))
    assert result.exit_code == 0
    assert "same next token as dense" in result.output
    found = json.loads((out / "demo.json").read_text())
    shown = " ".join(result.output.split())
    assert f"dead {found['held_out_dead']:.1%} in {found['held_out_dead_window']:,} tokens" in shown
    assert f"{found['dead']:.1%} in {found['dead_window']:,} tokens" in shown
    assert found["steps"] == 10
    assert len(found["speedups"]) == 4
    assert all(value > 0 for value in found["speedups"].values())
    for plot in ("training.png", "speedup.png"):
        with Image.open(out / plot) as image:
            assert min(image.size) > 300
    assert (out / "run-1" / "model" / "model.safetensors").exists()


def test_a_demo_that_holds_nothing_out_shows_training(tmp_path):
    result = demo(tmp_path / "out", *small(tmp_path, held_out=0))
    assert result.exit_code == 0
    found = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert found["held_out_nnz"] is None
    shown = " ".join(result.output.split())
    assert f"training: cross-entropy {found['train_ce_loss']:.3f}, {found['nnz']:.1f} active" in shown


def test_a_file_in_the_place_of_the_output_folder(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(ValueError, match=r"^output: got '.*out'; accepted: a folder"):
        demo(tmp_path / "out")
