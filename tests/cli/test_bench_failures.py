"""`twell bench` where something fails: what was measured stays, and others go on."""

from __future__ import annotations

import errno

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("transformers")
from transformers import AutoConfig

from twell.cli import bench_jobs
from twell.cli.status import FAILED
from twell.measure import read_records
from twell.measure.records import write_run

from .light_job import fails_after_measuring, seconds_by_seed
from .small_bench import QUICK, run

pytestmark = pytest.mark.usefixtures("small_bench")


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
