"""`twell bench`: small runs on the CPU, end to end, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("transformers")
import transformers
from PIL import Image
from transformers import AutoConfig
from typer.testing import CliRunner

from twell.cli import bench_jobs
from twell.cli.app import app
from twell.measure import models, read_records

from .light_job import seconds_by_seed
from .small_bench import QUICK, SMALL, run

pytestmark = pytest.mark.usefixtures("small_bench")


@pytest.mark.usefixtures("patient")
def test_inference_end_to_end(tmp_path):
    out, plot = tmp_path / "records.jsonl", tmp_path / "plot.png"
    sizes = ("--shape", "2x16", "--prompts", "2", "--prompt-length", "4", "--new-tokens", "3")
    result = run("inference", *sizes, *QUICK, "--out", str(out), "--plot", str(plot), "--commit", "abc1234")
    assert result.exit_code == 0
    assert "No GPU is used: all runs on the CPU" in result.output
    assert "stock transformers Llama with ReLU" in result.output
    assert "active neurons per token: 6." in result.output or "active neurons per token: 5." in result.output
    records = read_records(out)
    assert [record.what for record in records] == [
        "bench_inference/forward/dense-eager",
        "bench_inference/forward/ours-eager",
        "bench_inference/generation/dense-eager",
        "bench_inference/generation/ours-eager",
    ]
    dense, ours, *_, generated = records
    assert (ours.baseline, ours.commit) == ("dense-eager", "abc1234")
    assert ours.shape["batch"] == 2
    assert ours.shape["sequence"] == 16
    assert ours.details["tokens"] == 32
    assert ours.error < 1e-4
    assert ours.details["same_tokens_as_dense"] == 1
    assert ours.details["over/dense-eager/low"] <= ours.details["over/dense-eager"]
    assert ours.details["peak_bytes"] > 4 * SMALL.parameters
    assert ours.sparsity["nnz"] == pytest.approx(6, rel=0.3)
    assert ours.sparsity["wanted_nnz"] == 6
    assert ours.versions["transformers"] == transformers.__version__
    assert generated.details["same_tokens_as_dense"] == 1
    assert dense.details["rounds"] == 2
    with Image.open(plot) as image:
        assert min(image.size) > 200
    more = ("--workload", "forward", "--contenders", "dense-eager")
    assert run("inference", *sizes, *QUICK, *more, "--out", str(out)).exit_code == 0
    assert len(read_records(out)) == 5  # appended


def test_training_end_to_end(tmp_path):
    out = tmp_path / "records.jsonl"
    sizes = ("--batch", "2", "--sequence-length", "16")
    result = run("training", *sizes, *QUICK, "--out", str(out))
    assert result.exit_code == 0
    assert "training step of tiny, 2 layers" in result.output
    assert "ours has the L1 term in it" in result.output
    records = {record.what: record for record in read_records(out)}
    for workload in ("step", "checkpointed"):
        ours = records[f"bench_training/{workload}/ours-eager"]
        assert ours.shape["checkpointing"] == (workload == "checkpointed")
        assert ours.ratio > 0
        assert ours.sparsity["wanted_nnz"] == 6
        assert ours.versions["transformers"] == transformers.__version__
        assert 0 < ours.error < 1e-5  # of a block's gradients, against float32
        assert ours.details["peak_bytes"] > 3 * 4 * SMALL.parameters  # weights and two moments
        dense = records[f"bench_training/{workload}/dense-eager"]
        assert dense.details["loss"] == pytest.approx(5.7, abs=0.5)


def test_the_largest_micro_batch_is_searched_for(tmp_path):
    out = tmp_path / "records.jsonl"
    sizes = ("--layers", "1", "--batch", "4", "--sequence-length", "64", "--checkpointing", "off")
    result = run("training", *sizes, *QUICK, "--search", "--memory", "0.006", "--out", str(out))
    assert result.exit_code == 0
    *_, dense, ours = read_records(out)
    assert dense.what == "bench_training/micro-batch/dense-eager"
    assert (ours.unit, ours.baseline) == ("sequences", "dense-eager")
    assert ours.sparsity == {"wanted_nnz": 6}
    assert 1 <= dense.value <= ours.value < 64


def test_several_processes_are_merged(tmp_path, monkeypatch):
    """Each has a seed of its own."""
    monkeypatch.setattr("twell.cli.bench.inference_job", seconds_by_seed)
    out = tmp_path / "records.jsonl"
    result = run("inference", "--processes", "2", *QUICK, "--out", str(out))
    assert result.exit_code == 0, result.output
    dense, ours = read_records(out)
    assert ours.details["processes"] == 2
    assert ours.details["rounds"] == 2
    assert dense.quantiles["p50"] == 3.5
    assert (ours.details["over/dense-eager/low"], ours.details["over/dense-eager/high"]) == (3, 4)


def test_a_model_reads_text(saved, tmp_path):
    root, corpus = saved
    out = tmp_path / "records.jsonl"
    arguments = ("--text", str(corpus), "--shape", "2x16", "--workload", "forward")
    assert run("inference", str(root / "ours"), *arguments, *QUICK, "--out", str(out)).exit_code == 0
    dense, ours = read_records(out)
    assert (ours.shape["model"], ours.shape["text"]) == ("ours", "text")
    assert "wanted_nnz" not in ours.sparsity
    assert ours.error < 1e-3
    assert dense.shape["layers"] == 2


@pytest.mark.usefixtures("patient")
def test_a_stock_model_is_compared_with_itself(saved, tmp_path):
    root, corpus = saved
    out = tmp_path / "records.jsonl"
    text = tmp_path / "text.txt"
    text.write_text("".join(file.read_text() for file in corpus.iterdir())[:200])
    arguments = ("--text", str(text), "--shape", "90x8", "--prompt-length", "4", "--new-tokens", "2")
    result = run("inference", str(root / "gpt2"), *arguments, *QUICK, "--out", str(out))
    assert result.exit_code == 0
    records = read_records(out)
    assert "repeated" in records[0].shape["text"]
    assert records[-1].details["same_tokens_as_dense"] == 1


def test_text_shorter_than_a_sequence(saved, tmp_path):
    root, _ = saved
    short = tmp_path / "short.txt"
    short.write_text("only this")
    with pytest.raises(ValueError, match=r"text: got \d+ tokens; accepted: at least 32, one sequence"):
        run("inference", str(root / "ours"), "--text", str(short), "--shape", "1x32", *QUICK)


def test_a_model_that_is_not_sparse(saved):
    root, corpus = saved
    with pytest.raises(ValueError, match=r"model: got a \w+ without blocks that have exact zeros"):
        run("inference", str(root / "silu"), "--text", str(corpus), *QUICK)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inference", "model", "--preset", "tiny"), "one of them"),
        (("inference", "model"), "text: got none"),
        (("inference", "--text", "python"), "presets have no tokenizer"),
        (("inference", "--shape", "32"), "SEQUENCESxTOKENS"),
        (("inference", "--shape", "1x4096", *QUICK), "at most 128, the preset's positions"),
        (
            ("inference", "--prompt-length", "100", "--new-tokens", "13", *QUICK),
            "prompt_length, new_tokens: got 100 and 13; accepted: together at most 112: the preset's 128",
        ),
        (("inference", "--workload", "decode"), "workload: got 'decode'"),
        (("inference", "--contenders", "dense-eager,theirs"), "contenders: got 'theirs'"),
        (("inference", "--preset", "paper-3b"), "preset: got 'paper-3b'"),
        (
            ("inference", "--device", "cpu", "--workload", "generation", "--contenders", "ours-compiled"),
            "contenders: got ours-compiled; accepted: of generation on this device: dense-eager, ours-eager",
        ),
        (("training", "--contenders", "dense-liger", "--device", "cpu"), "Liger's kernels need a GPU"),
        (("training", "runs/tiny"), "MODEL: got 'runs/tiny'; accepted: presets only: --preset tiny | small"),
        (("training", "--layers", "all"), "layers: got 'all'"),
        (("training", "--precision", "half"), "precision: got 'half'"),
        (("training", "--search", "--device", "cpu"), "--memory GIB on a CPU"),
        (("training", "--checkpointing", "maybe"), "checkpointing: got 'maybe'"),
    ],
)
def test_wrong_options_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        run(*arguments)


@pytest.mark.parametrize(
    ("build", "why"),
    [(None, "torch .* is built without CUDA"), ("13.0", "torch finds no driver or no GPU; .*")],
)
def test_a_gpu_that_is_not_there(monkeypatch, build, why):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(ValueError, match=f"device: got 'cuda'; accepted: 'cpu'; {why} .`twell doctor`.$"):
        run("inference", "--device", "cuda")


def test_layers_are_announced_while_they_are_built(monkeypatch):
    """They are shown, and the line that stays is that of all of them."""
    from twell.cli import bench

    shown, show = [], bench._Phases._show
    monkeypatch.setattr(bench._Phases, "_show", lambda self, text: (shown.append(text), show(self, text)))
    result = run(
        "inference", "--shape", "2x16", "--workload", "forward", *QUICK, "--contenders", "ours-eager"
    )
    assert result.exit_code == 0
    assert "building layer" not in result.output
    assert "drawing the weights of layers 1 to 2" in shown
    assert next(text for text in shown if "building layer" in text) == "building layer 1 of 2"
    assert any(text.startswith("building layer 2 of 2; ") and text.endswith(" left") for text in shown)


@pytest.mark.parametrize(
    ("weights", "positions", "device", "tokens"),
    [
        (1000, None, "cpu", 64),
        (1000, 2048, "cpu", 64),
        (1000, 70, "cpu", 38),  # less the prompt and the first tokens
        (60_000_000, 2048, "cpu", 16),
        (60_000_000, 2048, "cuda", 64),
    ],
)
def test_few_weights_are_timed_over_more_tokens(weights, positions, device, tokens):
    dense = SimpleNamespace(
        config=SimpleNamespace(max_position_embeddings=positions),
        parameters=lambda: [torch.empty(weights, device="meta")],
    )
    options = SimpleNamespace(device=device, prompt_length=16)
    assert bench_jobs._usual_new_tokens(SimpleNamespace(dense=dense), options) == tokens


def test_a_model_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(models, "free_bytes", lambda device: 1 << 20)
    with pytest.raises(ValueError, match=r"accepted: (--layers \d+|a smaller preset)"):
        run("inference", "--preset", "small", *QUICK)


def test_a_models_usual_sequence_is_as_long_as_its_positions(saved, tmp_path):
    root, corpus = saved
    out = tmp_path / "records.jsonl"
    arguments = ("--text", str(corpus), "--workload", "forward", "--contenders", "ours-eager")
    assert run("inference", str(root / "ours"), *arguments, *QUICK, "--out", str(out)).exit_code == 0
    (ours,) = read_records(out)
    positions = AutoConfig.from_pretrained(root / "ours").max_position_embeddings
    assert ours.shape["sequence"] == min(positions, 256)
    with pytest.raises(ValueError, match=f"at most {positions}, the model's positions"):
        run("inference", str(root / "ours"), *arguments, *QUICK, "--shape", f"2x{positions + 1}")


@pytest.mark.usefixtures("patient")
def test_tokens_are_compared_with_those_of_dense_only(tmp_path):
    out = tmp_path / "records.jsonl"
    sizes = ("--prompt-length", "4", "--new-tokens", "3", "--contenders", "ours-eager")
    result = run("inference", *sizes, "--workload", "generation", *QUICK, "--out", str(out))
    assert result.exit_code == 0
    assert "same tokens" not in result.output
    (ours,) = read_records(out)
    assert "same_tokens_as_dense" not in ours.details


def test_nothing_is_captured_on_a_cpu():
    with pytest.raises(ValueError, match="contenders: got 'ours-captured'; accepted: dense-eager, "):
        run("inference", *QUICK, "--contenders", "dense-eager,ours-captured")


@pytest.mark.parametrize("command", ["inference", "training"])
def test_the_help_names_every_contender(command):
    from twell.cli.bench_options import _CONTENDERS
    from twell.measure import inference, training

    named = {"inference": inference.CONTENDERS, "training": training.CONTENDERS}[command]
    said = _CONTENDERS[command].help
    assert all(name in said for name in named)


def test_bench_without_arguments_shows_its_commands():
    result = run()
    assert "inference" in result.output
    assert "training" in result.output


@pytest.mark.gpu
def test_a_gpu_runs_every_contender(tmp_path):
    out = tmp_path / "records.jsonl"
    sizes = ("--preset", "paper-0.5b", "--layers", "2", "--shape", "4x2048", "--new-tokens", "32")
    result = CliRunner().invoke(
        app,
        ["bench", "inference", *sizes, "--rounds", "3", "--processes", "1", "--out", str(out)],
        catch_exceptions=False,
    )
    assert result.exit_code == 0
    records = {record.what.partition("/")[2]: record for record in read_records(out)}
    for name in ("dense-eager", "dense-compiled", "best-dense", "ours-eager", "ours-compiled"):
        record = records[f"forward/{name}"]
        assert record.hardware["power_limit_w"] > 0
        assert record.hardware["sm_clock_mhz"] > 0
        assert record.error is None or record.error < 2e-2
    assert records["forward/ours-compiled"].details["sparse_share"] == 1
    assert {"generation/dense-captured", "generation/ours-captured"} <= records.keys()


@pytest.mark.gpu
def test_a_gpu_trains_every_contender(tmp_path):
    out = tmp_path / "records.jsonl"
    sizes = ("--preset", "paper-0.5b", "--layers", "2", "--batch", "8", "--sequence-length", "1024")
    quick = ("--rounds", "3", "--energy-seconds", "0.5", "--processes", "1")
    result = CliRunner().invoke(
        app,
        ["bench", "training", *sizes, *quick, "--out", str(out)],
        catch_exceptions=False,
    )
    assert result.exit_code == 0
    records = {record.what.partition("/")[2]: record for record in read_records(out)}
    for workload in ("step", "checkpointed"):
        for name in ("dense-eager", "dense-compiled", "ours-eager", "ours-compiled"):
            assert records[f"{workload}/{name}"].error < 1e-2
        assert records[f"{workload}/ours-compiled"].details["sparse_share"] == 1
