"""The recipes are valid runs, follow the paper's sweep, and the paper's figures belong to runs."""

from __future__ import annotations

import pytest

pytest.importorskip("yaml")

from twell.reproduction.paper import NOTES, PAPER
from twell.reproduction.recipes import DENSE, LAMBDAS, SCALES, SPARSE, experiments_of, plan, run_name, runs_of
from twell.train.presets import PAPER_CORPUS
from twell.train.run_folder import differences
from twell.verification import PAPER_MODELS

scales = pytest.mark.parametrize("name", SCALES)


@scales
def test_every_run_is_valid_and_belongs_to_an_experiment(name):
    found = plan(name, text="text.txt")
    assert set(found.experiments) == {"lambda", "sizes", "activation", "gate", "dead"}
    used = {run for one in found.experiments.values() for run in (*one.runs, one.reference)}
    assert used == set(found.runs) == set(runs_of(SCALES[name]))
    assert all(config.data.source == "text.txt" for config in found.configs.values())


@scales
def test_no_two_runs_are_the_same(name):
    configs = list(plan(name, text="text.txt").configs.items())
    for place, (one, config) in enumerate(configs):
        for other, another in configs[:place]:
            assert differences(config, another), f"{one} and {other} are the same run"


@scales
def test_runs_differ_from_the_base_in_what_they_are_about_only(name):
    configs = plan(name, text="text.txt").configs
    about = {
        "silu": {"model.activation", "recipe.l1"},
        "ramp": {"recipe.l1_end"},
        "revival": {"recipe.revive_every"},
        DENSE: {"recipe.l1"},
        "non-gated-lambda-2e-5": {"model.gated", "model.intermediate_size"},
    }
    for run, expected in about.items():
        found = {entry.partition("=")[0] for entry in differences(configs[SPARSE], configs[run])}
        assert found == expected
    gated, plain = (configs[run].model for run in (SPARSE, "non-gated-lambda-2e-5"))
    assert 3 * gated.intermediate_size == 2 * plain.intermediate_size  # as many weights


def test_lambdas_are_the_papers():
    paper = plan("paper").configs
    sweep = experiments_of(SCALES["paper"])["lambda"].runs
    assert [paper[run].recipe.l1 for run in sweep] == list(LAMBDAS)
    assert [*map(run_name, LAMBDAS)] == list(sweep)
    assert all(config.data.source == PAPER_CORPUS for config in paper.values())
    for name, scale in SCALES.items():
        assert set(scale.lambdas) <= set(LAMBDAS)
        found = plan(name, text="x")
        for run, config in found.configs.items():
            l1 = found.runs[run].l1
            assert config.recipe.l1 == pytest.approx(0 if l1 is None else l1 * scale.l1_factor)


def test_the_papers_models_have_its_sizes():
    configs = plan("paper").configs
    for model, run in (("0.5b", "0.5b-lambda-0"), ("1b", "1b-lambda-0"), ("2b", "2b-lambda-0")):
        assert PAPER_MODELS[configs[run].model.layers].name.lower() == model
        assert (configs[run].model.hidden_size, configs[run].model.intermediate_size) == (2048, 5632)
    assert PAPER_MODELS[configs[DENSE].model.layers].name == "1.5B"


def test_figures_of_the_paper_belong_to_runs_and_agree_with_other_copies():
    known = experiments_of(SCALES["paper"])
    assert set(PAPER) | set(NOTES) <= set(known)
    for experiment, figures in PAPER.items():
        assert set(figures) <= set(known[experiment].runs)
    for layers, run in (
        (8, "0.5b-lambda-2e-5"),
        (18, "1b-lambda-2e-5"),
        (28, SPARSE),
        (38, "2b-lambda-2e-5"),
    ):
        figures = PAPER["sizes"][run]
        assert (figures.nnz, figures.accuracy) == PAPER_MODELS[layers][1:]


def test_only_the_chosen_experiments():
    found = plan("tiny", ["dead", "activation"])
    assert list(found.experiments) == ["activation", "dead"]
    assert set(found.runs) == {"silu", DENSE, SPARSE, "ramp", "revival"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("huge",), r"^scale: got 'huge'; accepted: 'tiny'|tiny"),
        (("tiny", ["lamda"]), r"^experiments: got 'lamda'; accepted: lambda, sizes"),
        (("small",), r"^text: got none; accepted: --text FILE"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan(*arguments)


def test_a_setting_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"^override: got 'train.stpes'"):
        plan("tiny", overrides=["train.stpes=3"])
