"""What is taken for what; what is refused, and what a run that is not finished shows."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil

import pytest
from typer.testing import CliRunner

from twell.cli.app import app
from twell.measure.records import Record, write_records
from twell.report import make_report, marker, read_inputs
from twell.report.origin_sections import commands
from twell.report.sweep import sweeps

from ..test_documents import ROOT, check_command
from .conftest import bench_records

MARKS = marker.HTML, marker.MARKDOWN


def test_every_kind_is_recognised(everything):
    inputs = read_inputs(everything)
    assert [run.name for run in inputs.runs] == ["none", "some"]
    assert [run.l1 for run in inputs.runs] == [0, 1e-3]
    assert [one.name for one in inputs.profiles] == ["profile"]
    assert len(inputs.records) == 3
    assert read_inputs([everything[2] / "profile.json"]).profiles[0].profile == inputs.profiles[0].profile
    assert [run.l1 for run in sweeps(inputs.runs)[0]] == [0, 1e-3]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")), ids=lambda path: path.stem
)
def test_committed_records_become_a_report(path):
    report = make_report([path])
    assert len(report.sections) >= 3
    assert report.html()
    assert report.markdown("figures")


def test_of_repeated_records_the_last_counts(tmp_path):
    write_records(tmp_path / "r.jsonl", [*bench_records(), *bench_records(**{"ours-eager": 0.5})])
    records = read_inputs([tmp_path / "r.jsonl"]).records
    assert [record.value for record in records] == [2.0, 1.5, 0.5]


def test_what_ran_apart_is_no_comparison(tmp_path):
    """Another sparsity is another model; a newer run takes an older one's place if it has all of it."""

    def run(day: int, *contenders: str, nnz: float = 12.0) -> list[Record]:
        return [
            dataclasses.replace(r, date=f"2026-11-{day:02}T00:00:00+00:00", sparsity={"nnz": nnz})
            for r in bench_records()
            if r.what.rsplit("/", 1)[-1] in contenders
        ]

    both = "dense-eager", "ours-eager"
    old, new = run(1, *both, nnz=11.98), run(2, *both, "best-dense", nnz=12.02)
    lone, dense = run(3, "ours-eager"), run(4, *both, nnz=90.0)
    write_records(tmp_path / "r.jsonl", [*old, *new, *lone, *dense])
    assert list(read_inputs([tmp_path / "r.jsonl"]).records) == [*new, *lone, *dense]
    report = make_report([tmp_path / "r.jsonl"])
    shown = [
        len(table.rows) for section in report.sections for table in section.blocks if hasattr(table, "rows")
    ]
    assert shown[:3] == [3, 1, 2]


def test_runs_of_one_name_are_told_apart(made, tmp_path):
    shutil.copytree(made / "some", tmp_path / "some")
    names = [run.name for run in read_inputs([made / "some", tmp_path / "some"]).runs]
    assert names == [str(made / "some"), str(tmp_path / "some")]


def test_where_a_run_was_trained(made, tmp_path):
    shutil.copytree(made / "some", tmp_path / "some")
    (run,) = read_inputs([tmp_path / "some"]).runs
    assert run.place["hardware"]["device"] == "cpu"
    assert "Not noted" not in make_report([tmp_path / "some"]).html()
    (tmp_path / "some" / "environment.json").write_text('{"hardware": 3}')
    assert read_inputs([tmp_path / "some"]).runs[0].place == {}
    report = make_report([tmp_path / "some", made / "none"])
    assert "Not noted which machine trained: some." in report.html()


def test_a_run_that_is_not_finished_is_shown_and_not_compared(made, tmp_path):
    shutil.copytree(made / "some", tmp_path / "half")
    (tmp_path / "half" / "summary.json").unlink()
    lines = (made / "some" / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "half" / "metrics.jsonl").write_text("\n".join([*lines[:5], "{damaged"]))
    report = make_report([made / "none", tmp_path / "half"])
    assert "at step 5" in report.html()
    assert "Speed and loss over lambda" not in [section.title for section in report.sections]


def test_commands_exist_and_name_what_was_run(everything):
    [_, commands, legend] = make_report(everything).sections[-1].blocks
    text = commands.lines
    assert text[0].startswith("twell train --config")
    for line in text:
        check_command(shlex.split(line)[1:])
    assert f"twell profile {everything[0].parent / 'some'} --text corpus" in "\n".join(text)
    assert legend.text == "In capitals, what you fill in. NEW_FOLDER: where to write."
    assert "--shape 4x32" in "\n".join(text)


def of_model(name: str) -> list[Record]:
    """Of a trained model on text."""
    return [
        dataclasses.replace(r, shape={**r.shape, "model": name, "text": "held-out text"})
        for r in bench_records()
    ]


def test_commands_do_not_pass_a_short_name_as_a_path(tmp_path):
    write_records(tmp_path / "r.jsonl", of_model("mine"))
    lines, legend = commands(read_inputs([tmp_path / "r.jsonl"]))
    assert lines[0].startswith("twell bench inference MODEL --text FILE --workload forward ")
    assert lines[1:] == [f"twell report {tmp_path / 'r.jsonl'}"]
    assert 'MODEL: the folder or Hugging Face name of "mine"' in legend
    assert "FILE: your text" in legend
    assert "NEW_FOLDER" not in legend


def test_commands_tell_two_models_apart(tmp_path):
    write_records(tmp_path / "r.jsonl", [*of_model("mine"), *of_model("yours")])
    lines, legend = commands(read_inputs([tmp_path / "r.jsonl"]))
    assert [line.split()[3] for line in lines[:2]] == ["MODEL_1", "MODEL_2"]
    assert 'MODEL_1: the folder or Hugging Face name of "mine"; MODEL_2: ' in legend


def test_commands_that_lack_nothing_need_no_legend(tmp_path):
    write_records(tmp_path / "r.jsonl", bench_records())
    lines, legend = commands(read_inputs([tmp_path / "r.jsonl"]))
    assert "--preset tiny" in lines[0]
    assert legend == ""


def run(*arguments):
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["report", *map(str, arguments)])


def test_the_command_writes_page_and_markdown(everything, tmp_path):
    done = run(*everything, "--out", tmp_path / "r.html", "--markdown", tmp_path / "r.md")
    assert done.exit_code == 0, done.output
    assert "1.50x as fast as best dense" in done.output
    assert (tmp_path / "r.html").read_text().startswith("<!DOCTYPE html>")
    for figure in (tmp_path / "r_figures").iterdir():
        assert f"r_figures/{figure.name}" in (tmp_path / "r.md").read_text()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("gone", None, "does not exist"),
        ("folder", "", "a folder without config.yaml or profile.json"),
        ("notes.txt", "hello", "notes.txt"),
        ("empty.jsonl", "\n", "is empty"),
        ("broken.jsonl", "{", "is no JSON Lines file"),
        ("other.jsonl", '{"a": 1}', "no records"),
        ("metrics.jsonl", '{"step": 1, "tokens": 2}', "the run's folder"),
        ("other.json", "{}", "which `twell profile` writes"),
        ("bad.jsonl", '{"what": "x", "unit": "s"}', "line 1"),
    ],
)
def test_other_inputs_are_refused_in_one_line(tmp_path, name, content, said):
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    done = run(path, "--out", tmp_path / "r.html")
    assert isinstance(done.exception, ValueError)
    assert said in str(done.exception)
    assert "accepted" in str(done.exception)
    assert "\n" not in str(done.exception)
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize("name", ["model", "layers", "dtype", "batch", "sequence"])
def test_records_without_what_they_were_measured_with_are_refused(tmp_path, name):
    first, *others = bench_records()
    shape = {key: value for key, value in first.shape.items() if key != name}
    write_records(tmp_path / "edited.jsonl", [dataclasses.replace(first, shape=shape), *others])
    with pytest.raises(
        ValueError, match=f"bench_inference/forward/dense-eager has no usable {name}; accepted"
    ):
        read_inputs([tmp_path / "edited.jsonl"])


@pytest.mark.parametrize(
    ("part", "entry"),
    [
        ("shape", {"layers": "two"}),
        ("shape", {"D": "wide"}),
        ("shape", {"model": 3}),
        ("details", {"processes": 1e308}),
        ("details", {"tokens": -1}),
        ("sparsity", {"nnz_most": None}),
    ],
)
def test_edited_records_are_refused_by_the_name_of_the_entry(tmp_path, part, entry):
    first, *others = bench_records()
    ((name, value),) = entry.items()
    changed = {key: old for key, old in getattr(first, part).items() if key != name}
    changed |= {} if value is None else entry
    write_records(tmp_path / "edited.jsonl", [dataclasses.replace(first, **{part: changed}), *others])
    with pytest.raises(ValueError, match=f"dense-eager has no usable {name}; accepted"):
        read_inputs([tmp_path / "edited.jsonl"])


def test_an_interrupted_run_does_not_replace_a_whole_one(tmp_path):
    def run(day: int, rounds: int) -> list[Record]:
        date = f"2026-11-{day:02}T00:00:00+00:00"
        return [dataclasses.replace(r, date=date, rounds=[r.rounds[0][:rounds]]) for r in bench_records()]

    whole, interrupted, again = run(2, 6), run(3, 1), run(4, 6)
    for records, kept in (
        ([*whole, *interrupted], whole),
        ([*run(1, 1), *whole], whole),
        ([*whole, *interrupted, *again], again),
        ([*run(1, 1), *interrupted], interrupted),
    ):
        write_records(tmp_path / "r.jsonl", records)
        assert list(read_inputs([tmp_path / "r.jsonl"]).records) == kept


def test_records_of_unknown_workloads_are_shown_as_others(tmp_path):
    strange = [dataclasses.replace(r, what=r.what.replace("forward", "sideways")) for r in bench_records()]
    write_records(tmp_path / "strange.jsonl", strange)
    assert "sideways/ours-eager" in make_report([tmp_path / "strange.jsonl"]).html()


def test_a_new_run_without_logs_is_refused(made, tmp_path):
    (tmp_path / "new").mkdir()
    shutil.copy(made / "some" / "config.yaml", tmp_path / "new")
    with pytest.raises(ValueError, match="has logged nothing yet"):
        read_inputs([tmp_path / "new"])
    with pytest.raises(ValueError, match="accepted"):
        read_inputs([])


def test_outputs_are_checked_first(made, tmp_path):
    for arguments, said in (
        (("--out", tmp_path / "none" / "r.html"), "a folder that exists"),
        (("--out", tmp_path), "a file to write"),
        (("--out", made / "bench.jsonl"), "an input or a file of one"),
        (("--markdown", made / "bench.jsonl"), "an input or a file of one"),
        (("--out", tmp_path / "r.md", "--markdown", tmp_path / "r.md"), "the file of --out"),
    ):
        done = run(made / "bench.jsonl", *arguments)
        assert said in str(done.exception)
    assert json.loads((made / "bench.jsonl").read_text().splitlines()[0])


def test_a_folder_that_is_an_input_keeps_its_data(made):
    folder = made / "some"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for data in before:
        assert "an input or a file of one" in str(run(folder, "--out", data).exception)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    notes = folder / "model" / "README.md"
    notes.write_text("# My model\n")
    assert "an input or a file of one" in str(run(folder, "--markdown", notes).exception)
    assert notes.read_text() == "# My model\n"
    notes.unlink()
    for _ in range(2):  # a report may lie there, and be replaced
        assert run(folder, "--out", folder / "report.html").exit_code == 0
    (folder / "report.html").unlink()


@pytest.mark.parametrize("option", ["--out", "--markdown"])
@pytest.mark.parametrize("content", ["# My notes\n", "<!DOCTYPE html>\n<title>Mine</title>\n", "\xff", "{}"])
def test_only_reports_are_replaced(made, tmp_path, option, content):
    mine = tmp_path / "mine"
    mine.write_bytes(content.encode("latin-1"))
    spare = [] if option == "--out" else ["--out", tmp_path / "spare.html"]
    done = run(made / "bench.jsonl", option, mine, *spare)
    assert isinstance(done.exception, ValueError)
    assert "which is no report" in str(done.exception)
    assert "move that file away" in str(done.exception)
    assert "\n" not in str(done.exception)
    assert mine.read_bytes() == content.encode("latin-1")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    mine.write_text("")  # as of `mktemp`
    for _ in range(2):
        assert run(made / "bench.jsonl", option, mine, *spare).exit_code == 0


def test_reports_of_earlier_versions_are_replaced(made, tmp_path):
    page, text = tmp_path / "r.html", tmp_path / "r.md"
    arguments = (made / "bench.jsonl", "--out", page, "--markdown", text)
    assert run(*arguments).exit_code == 0
    now = page.read_text(), text.read_text()
    earlier = [whole.replace(f"{mark}\n", "", 1).lstrip() for whole, mark in zip(now, MARKS, strict=True)]
    assert all(
        mark in whole and mark not in old for mark, whole, old in zip(MARKS, now, earlier, strict=True)
    )
    page.write_text(earlier[0])
    text.write_text(earlier[1])
    assert run(*arguments).exit_code == 0
    assert (page.read_text(), text.read_text()) == now


def test_figures_replace_figures_only(made, tmp_path):
    arguments = (made / "bench.jsonl", "--out", tmp_path / "r.html", "--markdown", tmp_path / "r.md")
    assert run(*arguments).exit_code == 0
    figure = tmp_path / "r_figures" / "bench-0-speed.svg"
    figure.write_text("<svg></svg>")
    before = (tmp_path / "r.md").stat().st_mtime_ns
    assert "which is no figure of a report" in str(run(*arguments).exception)
    assert figure.read_text() == "<svg></svg>"
    assert (tmp_path / "r.md").stat().st_mtime_ns == before
    shutil.rmtree(tmp_path / "r_figures")
    (tmp_path / "r_figures").write_text("mine")
    assert "a file where its figures go" in str(run(*arguments).exception)
