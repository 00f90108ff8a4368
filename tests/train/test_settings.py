"""Settings from presets, YAML and arguments."""

from __future__ import annotations

import pytest

pytest.importorskip("yaml")

from twell.train.config import RunConfig
from twell.train.presets import PRESETS, about, preset
from twell.train.settings import read_settings, run_config, to_yaml, with_overrides


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_and_survives_yaml(name, tmp_path):
    config = run_config(
        with_overrides(preset(name), ["model.init_from=x", "data.source=y"] if name == "relufy" else [])
    )
    assert config.preset == name
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    assert run_config(read_settings(tmp_path / "run.yaml")) == config


@pytest.mark.parametrize(("name", "layers", "steps"), [("paper-0.5b", 8, 10_000), ("paper-2b", 38, 40_000)])
def test_the_presets_of_the_paper(name, layers, steps):
    config = run_config(preset(name))
    assert (config.model.hidden_size, config.model.intermediate_size) == (2048, 5632)
    assert (config.model.layers, config.train.steps) == (layers, steps)
    assert config.tokens_per_step == 1_048_576
    assert config.data.source == "hf:skymizer/fineweb-edu-dedup-45B"
    assert config.recipe.l1 == 2e-5


def test_overrides_with_and_without_section():
    settings = with_overrides(
        preset("tiny"), ["train.steps=7", "l1=1e-4", "gated=false", "report=[tensorboard]"]
    )
    config = run_config(settings)
    assert config.train.steps == 7
    assert config.recipe.l1 == 1e-4
    assert config.model.gated is False
    assert config.train.report == ("tensorboard",)
    assert preset("tiny")["train"]["steps"] != 7


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stepz=7", r"override: got 'train.stepz'.*did you mean 'steps'"),
        ("stepz=7", r"did you mean 'train.steps'"),
        ("trian.steps=7", r"did you mean 'train'"),
        ("seed=1", r"data.seed or train.seed"),
        ("steps", r"override: got 'steps'; accepted: key=value"),
        ("train.steps=many", r"train.steps: got 'many'; accepted: an integer"),
        ("train.steps=1.5", r"train.steps: got 1.5; accepted: an integer"),
        ("model.gated=3", r"model.gated: got 3; accepted: true or false"),
        ("train.steps=0", r"train.steps: got 0; accepted: a number above 0"),
        ("train.keep=1", r"train.keep: got 1"),
        ("model.heads=5", r"model.heads: got 5; accepted: a divisor"),
        ("model.activation=swish", r"activation: got"),
        (
            "data.sequence_length=100000",
            r"data.sequence_length: got 100000; accepted: at most model.positions",
        ),
        ("recipe.l1=-1", r"recipe.l1: got -1"),
        ("train.precision=int8", r"train.precision: got 'int8'"),
        ("train.clip=.nan", r"train.clip: got nan"),
        ("recipe.l1=.inf", r"recipe.l1: got inf"),
        ("model.plan=bogus", r"path: got 'bogus'"),
        ("train.seed=99999999999", r"train.seed: got 99999999999"),
        ("data.source=[a", r"override: got 'data.source=\[a'; accepted: a value in YAML"),
    ],
)
def test_bad_settings_name_the_setting(override, message):
    with pytest.raises(ValueError, match=message):
        run_config(with_overrides(preset("tiny"), [override]))


def test_unknown_preset_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"preset: got 'paper-1.5'.*did you mean 'paper-1.5b'"):
        preset("paper-1.5")


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ([], "model.init_from and data.source"),
        (["data.source=text"], "model.init_from"),
        (["model.init_from=x"], "data.source"),
    ],
)
def test_relufy_names_what_it_needs(given, missing):
    accepted = r"with model\.init_from=MODEL, .* and data\.source=TEXT"
    with pytest.raises(ValueError, match=f"preset: got 'relufy' without {missing}; accepted: {accepted}"):
        run_config(with_overrides(preset("relufy"), given))


def test_every_preset_says_what_it_is():
    assert about("tiny") == "2 layers, D 256, H 1,536; 0.6 million tokens; a few minutes on two CPU cores"
    assert "D 2,048, H 5,632; 10.5 billion tokens; " in about("paper-0.5b")
    assert "as the checkpoint; 65.5 million tokens; " in about("relufy")
    assert all(len(about(name).split("; ")) == 3 for name in PRESETS)


def test_one_name_will_do_for_a_list():
    config = run_config(with_overrides(preset("tiny"), ["train.report=tensorboard", "data.source=text"]))
    assert config.train.report == ("tensorboard",)
    assert config.data.source == "text"


def test_unknown_names_in_a_file(tmp_path):
    with pytest.raises(ValueError, match=r"setting: got 'trian'.*did you mean 'train'"):
        run_config({"trian": {}})
    with pytest.raises(ValueError, match=r"train.step: got 3.*did you mean 'steps'"):
        run_config({"train": {"step": 3}})
    with pytest.raises(ValueError, match="setting: got '1'"):
        run_config({1: 2})
    with pytest.raises(ValueError, match=r"train.1: got 2"):
        run_config({"train": {1: 2}})
    with pytest.raises(ValueError, match="train: got 3; accepted: a section"):
        run_config({"train": 3})
    (tmp_path / "broken.yaml").write_text("train: [")
    with pytest.raises(ValueError, match="accepted: valid YAML"):
        read_settings(tmp_path / "broken.yaml")
    with pytest.raises(ValueError, match="a YAML file that exists"):
        read_settings(tmp_path / "missing.yaml")


def test_yaml_reads_small_numbers_as_text_and_they_count():
    assert run_config({"train": {"lr": "1e-3"}}).train.lr == 1e-3
    assert run_config({"train": {"steps": 1e3}}).train.steps == 1000


def test_defaults():
    assert run_config({}) == RunConfig()
