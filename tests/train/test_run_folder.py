"""A run's folder: resumed, shared, full of old checkpoints, damaged, or in use."""

from __future__ import annotations

import io
import json
import signal

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from twell.cli.app import app
from twell.cli.train import run_train
from twell.evaluation import load_model
from twell.train.checkpoints import fault, newest_whole
from twell.train.run import train
from twell.train.run_folder import claimed, with_absolute_paths
from twell.train.settings import read_settings, run_config

from .runs import QUIET, logged, small_run
from .test_run import disturbed


@pytest.fixture
def stopped(corpus, tmp_path, monkeypatch):
    """A run that was interrupted after step 3 of 6, as (config, folder)."""
    config, folder = small_run(corpus, "train.steps=6", "train.save_every=1"), tmp_path / "run"
    with monkeypatch.context() as patch:
        disturbed(patch, 3, lambda: signal.raise_signal(signal.SIGINT))
        assert not train(config, folder, console=QUIET).finished
    return config, folder


def test_a_run_is_not_resumed_with_other_text(stopped, corpus):
    (corpus / "more.txt").write_text("something else\n" * 500)
    with pytest.raises(ValueError, match=r"data.source: got other text or another tokenizer"):
        train(*stopped, resume=True, console=QUIET)
    (corpus / "more.txt").unlink()
    assert train(*stopped, resume=True, console=QUIET).finished


def test_paths_do_not_depend_on_where_a_run_is_resumed(corpus, monkeypatch):
    monkeypatch.chdir(corpus.parent)
    config = with_absolute_paths(small_run(corpus, "data.source=corpus"))
    assert config.data.source == str(corpus.resolve())
    both = with_absolute_paths(small_run(corpus, "data.source=[corpus, python]"))
    assert both.data.source == (str(corpus.resolve()), "python")


def test_rotation_counts_whole_checkpoints_only(stopped):
    config, folder = stopped
    for step in (2, 3):
        (folder / f"checkpoint-{step}" / "model.safetensors").write_bytes(b"damaged")
    assert train(config, folder, resume=True, console=QUIET).finished
    assert {p.name for p in folder.glob("damaged-*")} == {"damaged-checkpoint-2", "damaged-checkpoint-3"}
    kept = sorted(p.name for p in folder.glob("checkpoint-*"))
    assert kept == [f"checkpoint-{step}" for step in (3, 4, 5, 6)]
    assert all(fault(folder / name) is None for name in kept)


def test_a_finished_run_is_left_alone(stopped):
    config, folder = stopped
    summary = train(config, folder, resume=True, console=QUIET).summary

    def times():
        return {p: p.stat().st_mtime_ns for p in folder.rglob("[!.]*") if p.is_file()}

    before = times()
    assert train(config, folder, resume=True, console=QUIET).summary == summary
    assert times() == before


def test_other_files_and_other_runs_are_safe(corpus, tmp_path):
    config, folder = small_run(corpus, "train.steps=2"), tmp_path / "own"
    folder.mkdir()
    (folder / "config.yaml").write_text("# mine\n")
    for _ in range(2):  # refusing must not make it ours
        with pytest.raises(ValueError, match=r"out: got .*; accepted: a new folder"):
            train(config, folder, console=QUIET)
    assert (folder / "config.yaml").read_text() == "# mine\n"
    with pytest.raises(ValueError, match=r"out: got .*; accepted: a new folder, or an empty one$"):
        train(config, corpus, console=QUIET)  # a folder of something else
    free = tmp_path / "free"
    with (
        claimed(config, free, resume=False, first=True),
        pytest.raises(ValueError, match="a folder that no other process is using"),
    ):
        train(config, free, console=QUIET)


def test_a_run_that_failed_before_its_first_step_can_be_started_again(corpus, tmp_path):
    folder = tmp_path / "run"
    wrongs = {
        "data.source=nowhere.txt": "data.source: got",
        "train.report=nobody": "nobody",
        "data.tokenizer=./nowhere": "data.tokenizer: got",
    }
    for wrong, message in wrongs.items():
        with pytest.raises(ValueError, match=message):
            train(small_run(corpus, "train.steps=2", wrong), folder, console=QUIET)
    out = io.StringIO()
    assert train(small_run(corpus, "train.steps=2"), folder, console=Console(file=out, width=40)).finished
    assert out.getvalue().startswith(f"{corpus}: ")
    progress = [line for line in out.getvalue().splitlines() if line.startswith("step 1/2")]
    assert len(progress) == 1
    assert progress[0].endswith("s left")  # not cut at the width
    data = json.loads((folder / "data.json").read_text())
    assert data["source"] == str(corpus)
    assert data["train_tokens"] > 1000


def test_a_checkpoint_decides_sizes(corpus, tmp_path):
    config = small_run(corpus, "train.steps=1", "model.activation=silu", "model.positions=48")
    train(config, tmp_path / "dense", console=QUIET)
    start = f"model.init_from={tmp_path / 'dense'}"  # the run's folder stands for its model
    with pytest.raises(ValueError, match=r"model.hidden_size: got 64; accepted: 32, as .*model has it"):
        train(small_run(corpus, start, "model.hidden_size=64"), tmp_path / "other", console=QUIET)
    config = small_run(corpus, start, "train.steps=1", "model.positions=2048", "model.layers=4")  # defaults
    train(config, tmp_path / "sparse", console=QUIET)
    resolved = read_settings(tmp_path / "sparse" / "config.yaml")
    assert resolved["model"]["positions"] == 48
    assert resolved["model"]["layers"] == 2
    assert resolved["data"]["tokenizer"] == str(tmp_path / "dense" / "model")
    stored = json.loads((tmp_path / "sparse" / "model" / "config.json").read_text())
    assert stored["num_hidden_layers"] == 2
    assert stored["use_cache"] is True


def test_an_unfinished_run_is_no_checkpoint_to_start_from(stopped, corpus, tmp_path):
    _, folder = stopped
    config = small_run(corpus, f"model.init_from={folder}")
    with pytest.raises(ValueError, match=r"init_from: got .*; accepted: a finished run, or one of its check"):
        train(config, tmp_path / "other", console=QUIET)


def test_sizes_of_a_preset_yield_to_a_checkpoint(corpus, tmp_path):
    train(small_run(corpus, "train.steps=1"), tmp_path / "run", console=QUIET)
    moved = tmp_path / "e[" / "b]"  # what rich would take for markup
    moved.parent.mkdir()
    corpus.rename(moved)
    overrides = [f"model.init_from={tmp_path / 'run'}", f"data.source={json.dumps(str(moved))}"]
    overrides += ["data.sequence_length=32", "train.steps=1", "data.vocab_size=384"]
    run_train(overrides=overrides, preset="tiny", config=None, out=tmp_path / "longer", resume=None)
    resolved = read_settings(tmp_path / "longer" / "config.yaml")
    assert resolved["model"]["hidden_size"] == 32
    (tmp_path / "run").rename(tmp_path / "gone")
    finished = train(run_config(resolved), tmp_path / "longer", resume=True, console=QUIET)
    assert finished.summary["steps"] == 1


def test_a_ramp_that_does_not_end_is_said(corpus, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("twell._log._logged", set())
    train(small_run(corpus, "train.steps=3"), tmp_path / "run", console=QUIET)
    said = [record.message for record in caplog.records if record.name == "twell"]
    assert said == ["twell: recipe.l1_end = 4 lies beyond the 3 steps of the run"]


def test_logs_are_the_same_when_a_save_falls_between_them(corpus, tmp_path, monkeypatch):
    config = small_run(corpus, "train.steps=6", "train.save_every=2", "train.log_every=4")
    values = ("loss", "ce_loss", "l1_loss", "nnz", "dead")
    train(config, tmp_path / "whole", console=QUIET)
    with monkeypatch.context() as patch:
        disturbed(patch, 3, lambda: signal.raise_signal(signal.SIGINT))
        train(config, tmp_path / "run", console=QUIET)
    train(config, tmp_path / "run", resume=True, console=QUIET)
    assert logged(tmp_path / "run", *values) == logged(tmp_path / "whole", *values)
    assert [line[0] for line in logged(tmp_path / "run")] == [4, 6]  # the last step always


def test_a_resumed_run_takes_new_intervals(stopped, corpus):
    _, folder = stopped
    config = small_run(corpus, "train.steps=6", "train.save_every=2", "train.log_every=2", "train.keep=9")
    assert train(config, folder, resume=True, console=QUIET).finished
    assert [line[0] for line in logged(folder)] == [1, 2, 3, 4, 6]
    assert {p.name for p in folder.glob("checkpoint-*")} == {f"checkpoint-{n}" for n in (1, 2, 3, 4, 6)}


def test_weights_that_are_not_finite_are_not_saved(corpus, tmp_path):
    wild = ("train.lr=1e30", "train.clip=0", "train.warmup=0", "train.log_every=100")
    with pytest.raises(FloatingPointError, match="weights are not finite at step"):
        train(small_run(corpus, *wild, "train.save_every=1"), tmp_path / "saves", console=QUIET)
    saved = load_file(newest_whole(tmp_path / "saves") / "model.safetensors")
    assert all(weight.isfinite().all() for weight in saved.values())
    with pytest.raises(FloatingPointError):
        train(small_run(corpus, *wild, "train.save_every=0"), tmp_path / "end", console=QUIET)
    assert not (tmp_path / "end" / "model").exists()


def test_settings_that_a_checkpoint_contradicts(corpus, tmp_path):
    train(small_run(corpus, "train.steps=1"), tmp_path / "run", console=QUIET)
    start = f"model.init_from={tmp_path / 'run' / 'model'}"
    for setting, message in [
        ("model.activation=relu2", r"model.activation: got 'relu2'; accepted: 'relu'"),
        ("model.gated=false", r"model.gated: got False"),
        ("model.architecture=qwen2", r"model.architecture: got 'qwen2'; accepted: 'llama'"),
    ]:
        with pytest.raises(ValueError, match=message):
            train(small_run(corpus, setting, start), tmp_path / "new", console=QUIET)
        assert not (tmp_path / "new").exists()  # before anything was done
    with pytest.raises(ValueError, match=r"train.precision: got 'float16' without a GPU"):
        train(small_run(corpus, "train.precision=float16"), tmp_path / "half", console=QUIET)


def test_a_single_text_has_an_end_to_evaluate_on(tmp_path):
    text = tmp_path / "one.md"
    text.write_text("".join(f"def f{i}(x):\n    return x + {i * i}\n" for i in range(400)))
    config = small_run(text, "train.steps=1", "train.eval_every=1")
    result = train(config, tmp_path / "run", console=QUIET)
    assert result.summary["held_out_ce_loss"] > 0
    out = tmp_path / "found.json"
    arguments = ["eval", str(tmp_path / "run"), "--verify", "--out", str(out)]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    found = json.loads(out.read_text())
    assert found["cross_entropy"] == pytest.approx(result.summary["held_out_ce_loss"], rel=1e-5)


def test_a_run_that_holds_nothing_out_says_so(corpus, tmp_path):
    result = train(small_run(corpus, "train.steps=1", "data.held_out=0"), tmp_path / "run", console=QUIET)
    assert result.summary["held_out_ce_loss"] is None
    with pytest.raises(ValueError, match=r"model: got .*, a run that has held no text out; accepted: --text"):
        CliRunner().invoke(app, ["eval", str(tmp_path / "run")], catch_exceptions=False)


@pytest.mark.parametrize("content", [b"[]", b'{"files": {}}', b"\xff"])
def test_a_damaged_manifest_is_no_obstacle(stopped, content, caplog):
    config, folder = stopped
    (folder / "checkpoint-3" / "manifest.json").write_bytes(content)
    out = io.StringIO()
    assert train(config, folder, resume=True, console=Console(file=out)).finished
    assert "resuming from checkpoint-2" in out.getvalue()
    assert "checkpoint-3 is skipped: its manifest.json cannot be read" in caplog.text


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_files_that_a_full_disk_has_left_are_no_obstacle(stopped, content):
    config, folder = stopped
    (folder / "data.json").write_text(content)
    assert train(config, folder, resume=True, console=QUIET).finished
    summary = json.loads((folder / "summary.json").read_text())
    identity = json.loads((folder / "data.json").read_text())["identity"]
    (folder / "summary.json").write_text(content)
    again = train(config, folder, resume=True, console=QUIET)
    assert again.finished
    assert json.loads((folder / "summary.json").read_text()) == again.summary
    timeless = {key: value for key, value in summary.items() if key != "tokens_per_second"}
    assert again.summary.items() >= timeless.items()
    assert json.loads((folder / "data.json").read_text())["identity"] == identity


def test_other_tokens_are_not_trained_on(stopped):
    """Reversed in place: the size stays."""
    config, folder = stopped
    (tokens,) = (folder.parent / "cache").rglob("train-00000.bin")
    data = np.fromfile(tokens, dtype="<u2")
    data[::-1].tofile(tokens)
    with pytest.raises(ValueError, match=r"train-00000\.bin, whose contents have.*; accepted: .* remove"):
        train(config, folder, resume=True, console=QUIET)
    with pytest.raises(ValueError, match=r"train-00000\.bin, whose contents have changed"):
        train(config, folder.parent / "new", console=QUIET)


def test_an_unfinished_run_can_be_looked_at(stopped):
    model, _ = load_model(str(stopped[1]))
    assert model.config.model_type == "llama_sparse_relu"


def test_a_damaged_tokenizer_in_the_cache_is_made_again(corpus, tmp_path):
    config = small_run(corpus, "train.steps=1")
    train(config, tmp_path / "one", console=QUIET)
    for path in (tmp_path / "cache").rglob("tokens/*/tokenizer/tokenizer.json"):
        path.write_text("{")
    assert train(config, tmp_path / "two", console=QUIET).finished


def test_files_where_folders_should_be(corpus, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    refused = rf"; accepted: a folder, or a path where one can be made; {file} is a file$"
    for path in (file, file / "below"):
        with pytest.raises(ValueError, match=rf"^out: got '{path}'{refused}"):
            train(small_run(corpus), path, console=QUIET)
        with pytest.raises(ValueError, match=rf"^data\.cache: got '{path}'{refused}"):
            train(small_run(corpus, f"data.cache={path}"), tmp_path / "run", console=QUIET)
    assert file.read_text() == "mine"
