"""`twell verify`: a tiny local checkpoint, text and tasks, against figures that hold and that do not."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("typer")
from typer.testing import CliRunner

from twell.cli.app import app
from twell.evaluation import PAPER_TASKS, evaluate_text, load_model
from twell.hf import SparseLlamaConfig, SparseQwen2Config
from twell.train.data import DataConfig
from twell.train.data.sources import documents
from twell.verification import (
    FAILED,
    NOT_JUDGED,
    PASSED,
    Expected,
    _accuracy_check,
    _activity_checks,
    published,
)

TOKENS = 640
TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{query}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def run(*arguments):
    runner = CliRunner(env={"COLUMNS": "160"})
    return runner.invoke(app, ["verify", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture(scope="module")
def task_folder(saved, tmp_path_factory):
    """Two tasks whose right answers are what the model says, but for one question of the second."""
    pytest.importorskip("lm_eval")
    import torch

    folder = tmp_path_factory.mktemp("tasks")
    model, tokenizer = load_model(str(saved[0] / "ours"))
    rows = []
    for query, choices in [
        ("import", [" torch", " the"]),
        ("def", [" self", " main"]),
        ("return", [" x", " None"]),
    ]:
        scores = []
        for choice in choices:
            start, ids = (tokenizer(text)["input_ids"] for text in (query, query + choice))
            with torch.no_grad():
                log = model(input_ids=torch.tensor([ids])).logits.log_softmax(-1)
            scores.append(sum(log[0, at - 1, ids[at]].item() for at in range(len(start), len(ids))))
        rows.append({"query": query, "choices": choices, "gold": scores.index(max(scores))})
    for name, wrong in (("all_right", 0), ("one_wrong", 1)):
        given = [{**row, "gold": 1 - row["gold"]} if place < wrong else row for place, row in enumerate(rows)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=folder / f"{name}.jsonl"))
    (folder / "no_data.yaml").write_text(TASK.format(name="no_data", data=folder / "nowhere.jsonl"))
    return folder


@pytest.fixture(scope="module")
def nnz(saved):
    root, corpus = saved
    model, tokenizer = load_model(str(root / "ours"))
    found = evaluate_text(
        model, tokenizer, documents(DataConfig(source=str(corpus))), sequence_length=64, max_tokens=TOKENS
    )
    return sum(found.l0) / len(found.l0)


def test_figures_that_hold_pass(saved, task_folder, nnz, tmp_path):
    root, corpus = saved
    tasks = ("--tasks", "all_right", "--tasks", "one_wrong", "--include", task_folder)
    given = ("--expect", f"nnz={nnz * 1.05}", "--expect", "accuracy=83")
    options = ("--text", corpus, "--tokens", TOKENS, "--out", tmp_path / "found.json")
    done = run(root / "ours", *options, *tasks, *given)
    assert done.exit_code == 0, done.output
    assert done.output.strip().endswith("verified")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["passed"]
    assert found["tasks"] == {"all_right": 100.0, "one_wrong": pytest.approx(200 / 3)}
    assert [check["verdict"] for check in found["checks"]] == [PASSED, PASSED]
    assert found["checks"][0]["measured"] == f"{nnz:.1f}"
    assert len(found["profile"]["layers"]) == 2


def test_activity_is_drawn(saved, nnz, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from twell import plots

    drawn = []
    real = plots.layer_activity

    def draw(active, *arguments, **options):
        drawn.append(active)
        real(active, *arguments, **options)

    monkeypatch.setattr(plots, "layer_activity", draw)
    root, corpus = saved
    plot = tmp_path / "activity.png"
    options = ("--text", corpus, "--tokens", TOKENS, "--skip", "tasks", "--expect", f"nnz={nnz}")
    done = run(root / "ours", *options, "--plot", plot)
    assert f"plot: {plot}" in done.output.splitlines()
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert sum(drawn[0]) / 2 == pytest.approx(nnz, rel=1e-4)


def test_tasks_are_named_before_they_run(saved, task_folder):
    from twell.evaluation import evaluate_tasks

    model, tokenizer = load_model(str(saved[0] / "ours"))
    said: list = []
    tasks = ["all_right", "one_wrong", "no_data"]
    evaluate_tasks(model, tokenizer, tasks, include=task_folder, missing={}, say=said.append)
    assert said == [["all_right"], ["one_wrong"], ["no_data"]]
    said.clear()
    evaluate_tasks(model, tokenizer, tasks[:2], include=task_folder, say=said.append)
    assert said == [tasks[:2]]


def test_figures_that_do_not_hold_fail(saved, nnz):
    root, corpus = saved
    done = run(
        root / "ours", "--text", corpus, "--tokens", TOKENS, "--skip", "tasks", "--expect", f"nnz={nnz * 1.2}"
    )
    assert done.exit_code == 1
    assert "failed: mean nnz" in done.output


def test_what_cannot_be_measured_is_named_and_the_rest_measured(saved, task_folder, nnz):
    root, corpus = saved
    tasks = ("--tasks", "all_right", "--tasks", "no_data", "--include", task_folder)
    done = run(root / "ours", "--text", corpus, "--tokens", TOKENS, *tasks, "--expect", f"nnz={nnz}")
    assert done.exit_code == 1
    assert "not measured: task no_data" in done.output
    assert "1 of 2 tasks could be run" in done.output
    assert "all_right" in done.output
    assert "incomplete" in done.output


def test_a_name_that_the_hub_does_not_give_is_one_line(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"model: got 'SakanaAI/SparseLM1.5B', which .*hf download") as error:
        run("SakanaAI/SparseLM1.5B")
    assert "\n" not in str(error.value)


def test_bad_input(saved, tmp_path):
    root, corpus = saved
    for arguments, message in [
        ((root / "ours", "--text", corpus), "none of the paper's; accepted: SakanaAI/SparseLM0.5B"),
        ((root / "ours", "--expect", "speed=3"), "--expect: got speed=3; accepted: nnz=NUMBER"),
        ((root / "ours", "--expect", "nnz=few"), "--expect: got nnz=few"),
        ((root / "ours", "--text", corpus, "--expect", "accuracy=101"), "expect accuracy: got 101"),
        ((root / "ours", "--skip", "words"), "--skip: got words; accepted: text or tasks"),
        ((root / "ours", "--skip", "text", "--skip", "tasks"), "something has to be measured"),
        ((root / "silu", "--text", corpus, "--expect", "nnz=3"), "without blocks that have exact zeros"),
        ((root / "ours", "--text", tmp_path / "nowhere", "--expect", "nnz=3"), "nowhere"),
        ((root / "ours", "--out", tmp_path), "out: got .*a new file"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(*arguments)


@pytest.mark.parametrize(
    ("layers", "nnz", "accuracy"), [(8, 39, 40.4), (18, None, 44.7), (28, 29, 46.2), (38, 24, 48.8)]
)
def test_the_papers_models_are_known_by_their_sizes(layers, nnz, accuracy):
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": layers}
    expected = published(SparseLlamaConfig(**sizes))
    assert (expected.nnz, expected.accuracy, expected.shapes) == (nnz, accuracy, True)
    assert published(SparseQwen2Config(**{**sizes, "hidden_size": 1024})) is None
    assert published(SparseLlamaConfig(**{**sizes, "num_hidden_layers": 12})) is None


def layer(mean, first):
    return SimpleNamespace(nnz=SimpleNamespace(mean=mean), nnz_by_position=[first, mean])


def test_the_papers_distribution_of_activity_is_checked():
    paper = Expected(source="the paper's 1.5B model", nnz=29, accuracy=46.2, shapes=True)

    def verdicts(*layers):
        means = [one.nnz.mean for one in layers]
        profile = SimpleNamespace(layers=layers, mean_nnz=sum(means) / len(means))
        return [check.verdict for check in _activity_checks(profile, paper)]

    assert verdicts(layer(10, 90), layer(12, 90), layer(50, 300), layer(44, 300)) == [PASSED] * 3
    assert verdicts(layer(60, 70), layer(12, 30), layer(30, 40), layer(14, 10)) == [PASSED, FAILED, FAILED]
    scores = dict.fromkeys(PAPER_TASKS, 46.2)
    assert _accuracy_check(scores, 7, None, paper).verdict == PASSED
    assert _accuracy_check(scores | {"piqa": 58.0}, 7, None, paper).verdict == FAILED
    assert _accuracy_check(scores, 7, 20, paper).verdict == NOT_JUDGED  # of 20 examples each
    assert _accuracy_check({"own": 46.2}, 1, None, paper).verdict == NOT_JUDGED
