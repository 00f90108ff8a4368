"""`twell demo` end to end on a model that trains in seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
pytest.importorskip("datasets")
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from twell._log import Ran
from twell.cli.app import app
from twell.cli.demo import _show_training_speed, _sparse_share, _Trained
from twell.measure import read_records
from twell.train.settings import read_settings, run_config

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


@pytest.mark.usefixtures("patient")
def test_the_demo_trains_checks_times_writes_and_reports(tmp_path):
    out = tmp_path / "out"
    result = demo(out, *small(tmp_path, held_out=0.2))
    assert result.exit_code == 0
    assert "same next token" in result.output
    found = json.loads((out / "demo.json").read_text())
    shown = " ".join(result.output.split())
    for name, run in (("with penalty", found), ("without", found["without_penalty"])):
        figures = f"cross-entropy {run['held_out_ce_loss']:.3f}, {run['held_out_nnz']:.1f} of 128 neurons"
        assert f"held-out text, {name}: {figures} active" in shown
    assert "Sizes of its blocks: D 32, H 128 (4 x D). The paper's models have 2.75 x D;" in shown
    assert found["steps"] == 10
    assert len(found["speedups"]) == 3
    assert all(value > 0 for value in found["speedups"].values())
    for plot in ("training.png", "speedup.png"):
        with Image.open(out / plot) as image:
            assert min(image.size) > 300
    run = out / "run-1"
    for name in ("with-penalty", "without-penalty"):
        assert (run / name / "model" / "model.safetensors").exists()
    assert run_config(read_settings(run / "without-penalty" / "config.yaml")).recipe.l1 == 0
    forward, generation = (r for r in read_records(run / "records.jsonl") if "/ours" in r.what)
    assert forward.error < 1e-5
    assert generation.details["same_tokens_as_dense"] == 1
    page = (out / "report.html").read_text()
    assert "twell bench inference MODEL --text FILE" in page
    assert "bench inference demo" not in page
    assert "active neurons per token of the prompts" in page
    assert "Training runs" in page
    assert "Forward pass" in page
    *_, report, generate, explain, again, own = result.output.splitlines()
    assert report == f"report: {out / 'report.html'} (open it in a browser)"
    assert generate.endswith(f'twell generate {run / "with-penalty"} --prompt "def main("')
    assert explain.endswith(f"twell explain {run / 'with-penalty'} --text {tmp_path / 'corpus'}")
    assert again.endswith(f"twell report {run / 'with-penalty'}")
    assert own.endswith("twell train --preset tiny data.source=FOLDER")
    rates = (f"{each['tokens_per_second']:,.0f}" for each in (found["without_penalty"], found))
    assert "training, tokens/s │ {} │ {} │".format(*rates) in " ".join(result.output.split())
    assert found["training_sparse_share"] == 0
    assert "trained mostly dense (0% of its forward passes ran sparse): its blocks are small" in shown


def test_noise_that_drowns_a_measurement_does_not_end_the_demo(tmp_path, monkeypatch):
    from twell.measure import inference

    monkeypatch.setattr(inference, "perf_counter", lambda: 1.0)  # no token takes any time
    result = demo(tmp_path / "out", *small(tmp_path, 0.1))
    assert result.exit_code == 0
    assert "Not timed: model, token by token: 10 rounds in a row took times that vary" in result.output
    assert len(json.loads((tmp_path / "out" / "demo.json").read_text())["speedups"]) == 2
    assert (tmp_path / "out" / "report.html").is_file()


def test_the_demo_fits_a_terminal_of_80_columns(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = demo(tmp_path / "out", *small(tmp_path, held_out=0.2))
    assert result.exit_code == 0
    drawn = [line for line in result.output.splitlines() if set(line) & set("─│┃")]
    assert all(len(line) <= 80 for line in drawn)
    assert "…" not in result.output  # cut off
    assert sum(line.startswith("│") for line in drawn) == 6 + 3 + 3 + 1  # no cell takes a second line


@pytest.mark.parametrize(
    "settings", [("model.activation=drelu",), ("model.gated=false", "model.activation=relu2")]
)
def test_blocks_that_stock_classes_lack(tmp_path, settings):
    """Dense is then a model with plain PyTorch blocks; the demo itself checks that both compute the same."""
    result = demo(tmp_path / "out", *small(tmp_path, held_out=0.2), *settings)
    assert result.exit_code == 0


def test_a_demo_that_holds_nothing_out_shows_training(tmp_path):
    result = demo(tmp_path / "out", *small(tmp_path, held_out=0))
    assert result.exit_code == 0
    found = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert found["held_out_nnz"] is None
    shown = " ".join(result.output.split())
    assert f"training text, with penalty: cross-entropy {found['train_ce_loss']:.3f}, " in shown
    records = read_records(tmp_path / "out" / "run-1" / "records.jsonl")
    assert {record.shape["text"] for record in records} == {"training text"}


def trained(rate: float | None, share: float) -> _Trained:
    return _Trained(Path("run"), None, [], {"tokens_per_second": rate}, share)


@pytest.mark.parametrize(
    ("rate", "share", "busy", "said", "unsaid"),
    [
        (4128.0, 0.8, False, ["│ 1,600", "│ 4,128", "│ 2.58x"], "mostly dense"),
        (4128.0, 0.8, True, ["│ 2.58x", "Other programs were busy"], "mostly dense"),
        (1500.0, 0.2, False, ["│ 0.94x", "trained mostly dense (20% of its forward passes"], "busy"),
        (591.0, 0.1, True, ["not compared: other programs were busy", "(10% of its forward"], "0.37x"),
        (None, 0.1, True, [""], "busy"),
    ],
)
def test_training_speed_is_shown_with_what_it_says(rate, share, busy, said, unsaid):
    console = Console(record=True, width=80)
    _show_training_speed(console, trained(rate, share), trained(1600.0, 0.0), busy=busy)
    shown = console.export_text()
    assert all(part in shown for part in said)
    assert unsaid not in shown


def test_what_ran_after_training_does_not_count():
    ran = [
        Ran("dense", "cpu", 60, 8, 32),
        Ran("row", "cpu", 40, 8, 32),
        Ran("row", "cpu", 100, 8, 32, "backward"),
    ]
    assert _sparse_share([*ran, Ran("block", "cpu", 500, 8, 32)], 100) == 0.4
    assert _sparse_share([], 100) == 0


def test_a_file_in_the_place_of_the_output_folder(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(ValueError, match=r"^output: got '.*out'; accepted: a folder"):
        demo(tmp_path / "out")
