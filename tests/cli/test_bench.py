"""`twell bench`: small runs on the CPU, end to end; what it refuses, and what it keeps."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("transformers")
import transformers
from PIL import Image
from transformers import AutoConfig, GenerationMixin
from typer.testing import CliRunner

import twell.hf
from twell.cli import bench_jobs
from twell.cli.app import app
from twell.cli.status import FAILED
from twell.measure import models, read_records
from twell.measure.records import write_run

from .light_job import fails_after_measuring, seconds_by_seed
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


@pytest.mark.parametrize("building", [True, False])
def test_what_does_not_compile_stops_nobody_else(tmp_path, monkeypatch, building):
    """building: whether best dense's ways fail while they are built, else in their first call."""
    from torch._inductor.exc import InvalidCxxCompiler

    from twell.measure import baselines, inference

    def no_compiler(*given, **options):
        raise InvalidCxxCompiler

    def uncompiled(model, **options):
        model.forward = no_compiler
        return model

    monkeypatch.setattr(inference, "compile_layers", uncompiled)
    monkeypatch.setattr(baselines, "compile_layers", no_compiler if building else uncompiled)
    out = tmp_path / "records.jsonl"
    contenders = ("--contenders", "dense-eager,dense-compiled,best-dense,ours-eager")
    sizes = ("--shape", "2x16", "--workload", "forward")
    result = run("inference", *sizes, *contenders, *QUICK, "--out", str(out))
    assert result.exit_code == 0
    assert "dense-compiled: does not compile: No working C++ compiler found" in result.output
    assert "best-dense: max-autotune: does not compile: " in result.output
    assert [one.what.rpartition("/")[2] for one in read_records(out)] == ["dense-eager", "ours-eager"]


def test_what_was_measured_before_a_failure_is_kept(tmp_path, monkeypatch):
    """Generation is refused after the forward pass was measured."""
    out = tmp_path / "records.jsonl"
    sizes = ("--shape", "2x16", "--prompt-length", "200", "--new-tokens", "3")
    job = bench_jobs.inference_job

    def refusing(options, emit, say):
        job(bench_jobs.replace(options, workloads=("forward",)), emit, say)
        raise ValueError("prompt: got 200 tokens; accepted: 128")

    monkeypatch.setattr("twell.cli.bench.inference_job", refusing)
    result = run("inference", *sizes, *QUICK, "--out", str(out))
    assert result.exit_code != 0
    assert "forward of tiny" in result.output
    assert len(read_records(out)) == 2


@pytest.mark.parametrize("processes", [1, 2])
def test_after_any_failure_what_was_measured_is_shown(tmp_path, monkeypatch, processes):
    monkeypatch.setattr("twell.cli.bench.inference_job", fails_after_measuring)
    out = tmp_path / "records.jsonl"
    result = run("inference", *QUICK, "--processes", str(processes), "--out", str(out))
    assert result.exit_code == FAILED
    assert "ours-eager: 3.00x dense-eager" in result.output
    assert len(read_records(out)) == 2
    assert result.stderr.splitlines()[-1].endswith(
        "IndexError: index [64] is out of range; what was measured before is above"
    )
    assert "Traceback" not in result.stderr


def test_a_failure_before_anything_was_measured_is_raised(monkeypatch):
    def fails(options, emit, say):
        raise IndexError("index 64 is out of range")

    monkeypatch.setattr("twell.cli.bench.inference_job", fails)
    with pytest.raises(IndexError, match="index 64"):
        run("inference", *QUICK)


def test_generation_beyond_a_models_positions_is_refused_before_anything_runs(saved, monkeypatch):
    from twell.measure import inference

    root, corpus = saved
    monkeypatch.setattr(inference, "bench_forward", lambda *given, **options: pytest.fail("it ran"))
    positions = AutoConfig.from_pretrained(root / "gpt2").max_position_embeddings
    sizes = ("--shape", "2x16", "--prompt-length", str(positions - 20), "--new-tokens", "5")
    with pytest.raises(ValueError, match=f"together at most {positions - 16}: the model's {positions} "):
        run("inference", str(root / "gpt2"), "--text", str(corpus), *sizes, *QUICK)


def test_a_text_too_short_for_a_prompt_is_refused_before_anything_runs(saved, tmp_path, monkeypatch):
    from twell.measure import inference

    root, _ = saved
    monkeypatch.setattr(inference, "bench_forward", lambda *given, **options: pytest.fail("it ran"))
    short = tmp_path / "short.txt"
    short.write_text("only this")
    sizes = ("--shape", "1x4", "--prompt-length", "32", "--new-tokens", "2")
    with pytest.raises(ValueError, match=r"text: got .* accepted: at least 32"):
        run("inference", str(root / "ours"), "--text", str(short), *sizes, *QUICK)


@pytest.mark.parametrize("place", ["folder", "file/records.jsonl"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path, monkeypatch, place):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr("twell.cli.bench.inference_job", lambda *given: pytest.fail("it ran"))
    with pytest.raises(ValueError, match="out: got '"):
        run("inference", *QUICK, "--out", str(tmp_path / place))


def test_a_file_that_holds_no_records_is_named_with_its_option(tmp_path):
    out = tmp_path / "README.md"
    out.write_text("# Read me")
    said = r"out: got '.*README.md', which is no file of records \(line 1: record: got invalid JSON .*\); "
    with pytest.raises(ValueError, match=said):
        run("inference", *QUICK, "--out", str(out))


def full_disk(times: int):
    """In place of `write_run`: the first writes fail."""
    tries = []

    def write(path, records) -> None:
        tries.append(records)
        if len(tries) <= times:
            raise OSError(errno.ENOSPC, "no space left to write it")
        write_run(path, records)

    return write


@pytest.mark.parametrize(("failing", "status"), [(1, 0), (100, FAILED)])
def test_a_write_that_fails_loses_nothing(tmp_path, monkeypatch, failing, status):
    """Each result is written as it comes, and all of them again at the end."""
    monkeypatch.setattr("twell.cli.bench.inference_job", seconds_by_seed)
    monkeypatch.setattr("twell.cli.bench._WRITE_EVERY", 0)
    monkeypatch.setattr("twell.cli.bench.write_run", full_disk(failing))
    out = tmp_path / "records.jsonl"
    result = run("inference", *QUICK, "--out", str(out))
    assert result.exit_code == status
    assert result.output.count("records cannot be written, measuring goes on: ") == 1
    assert "ours-eager: 3.00x dense-eager" in result.output
    assert ("twell: records were not written: " in result.stderr) == (status == FAILED)
    assert out.exists() == (status == 0)


def test_two_benches_share_a_file(tmp_path, monkeypatch):
    """What another one writes meanwhile stays, and nothing is there twice."""
    out, other = tmp_path / "records.jsonl", tmp_path / "other.jsonl"
    monkeypatch.setattr("twell.cli.bench._WRITE_EVERY", 0)
    monkeypatch.setattr("twell.cli.bench.inference_job", seconds_by_seed)
    assert run("inference", *QUICK, "--out", str(other), "--commit", "other").exit_code == 0

    def with_another(options, emit, say):
        seconds_by_seed(options, emit, say)
        write_run(out, read_records(other))
        seconds_by_seed(options, emit, say)

    monkeypatch.setattr("twell.cli.bench.inference_job", with_another)
    assert run("inference", *QUICK, "--out", str(out), "--commit", "mine").exit_code == 0
    assert sorted(one.commit for one in read_records(out)) == ["mine", "mine", "other", "other"]


@pytest.mark.parametrize(("before", "said"), [(True, "before is above"), (False, "nothing was measured yet")])
def test_ctrl_c_is_answered_and_seen_by_scripts(tmp_path, monkeypatch, before, said):
    job = seconds_by_seed

    def interrupted(options, emit, say):
        if before:
            job(options, emit, say)
        raise KeyboardInterrupt

    monkeypatch.setattr("twell.cli.bench.inference_job", interrupted)
    out = tmp_path / "records.jsonl"
    result = run("inference", *QUICK, "--out", str(out))
    assert result.exit_code == 130
    assert "twell: interrupted; " in result.stderr
    assert said in result.stderr
    assert out.exists() == before


def test_tables_fit_a_terminal_of_80_columns(monkeypatch):
    from rich.console import Console

    from twell.cli import bench_view
    from twell.measure.results import Measured, merge

    shape = {"model": "paper-2b", "layers": 38, "batch": 32, "sequence": 2048, "dtype": "bfloat16"}
    found = [
        Measured(
            workload="forward",
            contender=contender,
            meaning="in words",
            shape=shape,
            tokens=65536,
            seconds=(seconds, seconds * 1.1),
            joules=(400.0,),
            sparsity={"nnz": 24.1, "nnz_least": 23.9, "nnz_most": 24.4},
            details={"peak_bytes": 123.4 * 2**20, "largest_difference": 5e-7, "same_tokens_as_dense": 1.0},
        )
        for contender, seconds in (("dense-eager", 7.1), ("dense-compiled", 0.5), ("ours-compiled", 0.035))
    ]
    console = Console(width=80)
    with console.capture() as captured:
        bench_view.show(console, merge(found), [])
    table = captured.get().split("dense-eager: in words")[0]
    for figure in ("123.4 MiB", "5.0e-07", "100.0%", "6.1", "202.86x", "dense-compiled"):
        assert figure in table
    assert max(len(line) for line in table.splitlines()[1:]) <= 80


@pytest.mark.parametrize(("slowest", "noisy"), [(1.1, False), (3.0, True)])
def test_times_that_vary_are_said_to(slowest, noisy):
    from rich.console import Console

    from twell.cli import bench_view
    from twell.measure.results import Measured, merge

    shape = {"model": "tiny", "layers": 2, "batch": 2, "sequence": 16, "dtype": "float32"}
    rounds = {"dense-eager": (2.0,) * 6, "ours-eager": (1.0,) * 5 + (slowest,)}
    found = [
        Measured(
            workload="forward", contender=name, meaning="in words", shape=shape, tokens=32, seconds=seconds
        )
        for name, seconds in rounds.items()
    ]
    console = Console(width=80)
    with console.capture() as captured:
        bench_view.show(console, merge(found), [])
    assert ("These times vary a lot" in captured.get()) == noisy


@pytest.mark.parametrize(
    ("widened", "against"),
    [
        ((1, 1), "from the same model in float32, relative"),
        ((0, 0), "from dense eager, relative"),
        ((1, 0), "from the same model in float32, in some processes from dense eager, relative"),
    ],
)
def test_the_legend_says_what_logits_were_compared_with(widened, against):
    from twell.cli import bench_view
    from twell.measure.results import Measured, merge

    found = [
        Measured(
            workload="forward",
            contender="ours-eager",
            meaning="in words",
            shape={"dtype": "bfloat16"},
            tokens=8,
            process=process,
            seconds=(1.0,),
            details={"against_float32": wide},
        )
        for process, wide in enumerate(widened)
    ]
    assert against in " ".join(bench_view._legend(merge(found)))


def shown(*groups: dict, **seconds: float) -> str:
    """What is printed of tables whose contenders took so long. groups: changes of their results."""
    from rich.console import Console

    from twell.cli import bench_view
    from twell.measure.results import Measured, merge

    shape = {"model": "tiny", "layers": 2, "batch": 2, "sequence": 16, "dtype": "float32"}
    found = [
        Measured(
            **{
                "workload": "forward",
                "meaning": "in words",
                "tokens": 32,
                "seconds": (took,) * 6,
                **changes,
                "contender": name.replace("_", "-"),
                "shape": {**shape, **changes.get("shape", {})},
            }
        )
        for changes in groups
        for name, took in {"dense_eager": 2.0, "ours_eager": 1.0, **seconds}.items()
    ]
    console = Console(width=80)
    with console.capture() as captured:
        bench_view.show(console, merge(found), [])
    return captured.get()


def test_what_all_tables_share_is_said_once_at_the_end():
    details = {"against_float32": 1, "same_tokens_as_dense": 1.0}
    output = shown(*({"shape": {"sequence": length}, "details": details} for length in (16, 32, 64)))
    for line in (
        "gains: medians of",
        "difference: the largest",
        "dense-eager: in words",
        "ours-eager: in words",
    ):
        assert output.count(line) == 1
    assert (
        output.index("2 x 64 tokens") < output.index("in these tables:") < output.index("gains: medians of")
    )
    assert output.count("ours-eager: 2.00x dense-eager") == 3
    assert "in this table:" in shown({"details": details})


def test_a_contender_that_means_something_else_is_explained_again():
    output = shown({"meaning": "one way"}, {"meaning": "another", "shape": {"sequence": 32}})
    assert "ours-eager: one way" in output
    assert "ours-eager: another" in output


@pytest.mark.parametrize(("text", "hint"), [("random tokens", False), ("text", True)])
@pytest.mark.parametrize(
    ("share", "seconds", "said", "gained"),
    [
        (0.0, 1.0, "ran all of its feed-forward calls dense: too small [for D 8]", True),
        (0.0, 2.0, "ran all of its feed-forward calls dense: too small [for D 8]", False),
        (0.75, 1.0, "ran 25% of its feed-forward calls dense: too small [for D 8]", False),
        (1.0, 1.0, None, False),
    ],
)
def test_why_calls_ran_dense(text, hint, share, seconds, said, gained):
    why = {"details": {"sparse_share": share}, "dense_reason": "too small [for D 8]", "shape": {"text": text}}
    output = shown(why, ours_eager=seconds)
    assert ("feed-forward calls dense" in output) == (said is not None)
    assert said is None or f"ours-eager {said}\n" in output
    explain = "`twell explain MODEL --text FILE --tokens 32`"
    assert (explain in output) == (hint and said is not None)
    assert ("What blocks gain that ran dense" in output) == gained


def test_a_run_says_why_its_calls_ran_dense():
    """And once why there is no energy."""
    sizes = ("--shape", "2x16", "--prompts", "2", "--prompt-length", "4", "--new-tokens", "3")
    result = run("inference", *sizes, "--rounds", "2", "--energy-seconds", "0.01", "--device", "cpu")
    assert result.exit_code == 0
    assert result.output.count("ours-eager ran all of its feed-forward calls dense: ") == 2
    assert "twell explain" not in result.output
    assert result.output.count("energy") == 1


def test_the_same_note_of_several_processes_is_printed_once(monkeypatch):
    from twell.measure.processes import NOTE

    def noting(options, emit, say):
        say(f"{NOTE}no energy: none is counted here")
        seconds_by_seed(options, emit, say)
        say(f"{NOTE}no energy: none is counted here")

    monkeypatch.setattr("twell.cli.bench.inference_job", noting)
    result = run("inference", *QUICK)
    assert result.output.count("no energy") == 1


def generate_with_times(monkeypatch, out, *times: float, options: tuple[str, ...] = QUICK):
    """times: how long calls take, two of each contender in a round: 18 tokens, then 16."""
    from twell.measure import inference

    ends = [end for seconds in times for end in (0.0, seconds)]
    monkeypatch.setattr(inference, "perf_counter", lambda: ends.pop(0))
    sizes = ("--prompt-length", "4", "--new-tokens", "2", "--workload", "generation")
    result = run("inference", *sizes, *options, "--out", str(out))
    assert ends == []
    return result


def test_rounds_in_which_times_vary_by_more_than_tokens_take_do_not_count(tmp_path, monkeypatch):
    """A sample is a difference of two times, which noise can make negative."""
    good, noisy = (20.0, 18.0), (9.0, 9.0)
    # The order changes after a round that counts.
    times = *good, *noisy, *good, *good, *noisy, *good, *good, 22.0, 18.0
    result = generate_with_times(monkeypatch, tmp_path / "records.jsonl", *times)
    assert result.exit_code == 0
    dense, ours = read_records(tmp_path / "records.jsonl")
    assert (dense.rounds, ours.rounds) == ([[1.0, 2.0]], [[1.0, 1.0]])
    assert ours.details["noisy_rounds"] == 2
    assert "2 rounds were too noisy and not counted; raise --new-tokens" in result.output


def test_noise_that_ends_a_measurement_early_is_said(tmp_path, monkeypatch):
    good, noisy = (20.0, 18.0), (9.0, 9.0)
    times = *good, *good, *(noisy * 20)
    result = generate_with_times(monkeypatch, tmp_path / "records.jsonl", *times)
    assert "1 of 2 rounds count; in 10 others, times varied by more than what is measured" in " ".join(
        result.output.split()
    )
    assert "10 rounds were too noisy" in result.output
    assert [one.rounds for one in read_records(tmp_path / "records.jsonl")] == [[[1.0]], [[1.0]]]


def test_short_calls_are_made_before_they_are_timed(tmp_path, monkeypatch):
    """What they capture for themselves belongs to no round."""
    tokens, generate = [], GenerationMixin.generate

    def counted(self, *given, **options):
        tokens.append(options["max_new_tokens"])
        return generate(self, *given, **options)

    monkeypatch.setattr(GenerationMixin, "generate", counted)
    good = (20.0, 18.0)
    generate_with_times(monkeypatch, tmp_path / "records.jsonl", *(good * 4))
    assert tokens == [18] * 6 + [16, 16] + [18, 16] * 4


def test_generation_takes_as_many_rounds_as_are_asked_for_in_turn(tmp_path, monkeypatch):
    ran, generate = [], GenerationMixin.generate

    def noted(self, *given, **options):
        if options["max_new_tokens"] == 16:  # once in a round, and once before
            ran.append("ours" if isinstance(self, twell.hf.SparseLlamaForCausalLM) else "dense")
        return generate(self, *given, **options)

    monkeypatch.setattr(GenerationMixin, "generate", noted)
    out, good = tmp_path / "records.jsonl", (20.0, 18.0)
    options = ("--rounds", "7", *QUICK[2:])
    generate_with_times(monkeypatch, out, *(good * 14), options=options)
    assert [len(one.rounds[0]) for one in read_records(out)] == [7, 7]
    ahead, back = ["dense", "ours"], ["ours", "dense"]
    assert ran == ahead + ahead + back + back + ahead + ahead + back + back


def test_noise_alone_is_no_measurement(tmp_path, monkeypatch):
    result = generate_with_times(monkeypatch, tmp_path / "records.jsonl", *[9.0] * 40)
    assert "dense-eager: 10 rounds in a row took times that vary by more than" in result.output
    assert read_records(tmp_path / "records.jsonl") == []


@pytest.mark.parametrize("processes", [1, 2])
def test_rounds_before_an_interruption_are_kept(tmp_path, monkeypatch, processes):
    from twell.cli import bench

    say, counted = bench._Phases.__call__, []

    def interrupt(self, text: str) -> None:
        say(self, text)
        if "round 3 of 9" in text:
            counted.append(text)
            raise KeyboardInterrupt

    monkeypatch.setattr(bench._Phases, "__call__", interrupt)
    out = tmp_path / "records.jsonl"
    options = ("--rounds", "9", "--energy-seconds", "0", "--device", "cpu", "--processes", str(processes))
    result = run("inference", "--shape", "2x16", "--workload", "forward", *options, "--out", str(out))
    assert result.exit_code == 130
    assert "interrupted; what was measured before is above" in result.output
    assert [len(one.rounds[0]) for one in read_records(out)] == [2, 2]
    assert len(counted) == 1


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
