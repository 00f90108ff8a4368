"""Every setting has a meaning; what `data` accepts, and where it keeps things."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from twell.train.config import ModelConfig, RunConfig, meanings
from twell.train.data import DataConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("source", ""),
        ("source", ()),
        ("source", ("a", 3)),
        ("source", None),
        ("text_field", ""),
        ("tokenizer", None),
        ("vocab_size", 256),
        ("vocab_size", 300.0),
        ("tokenizer_bytes", 0),
        ("sequence_length", 0),
        ("sequence_length", True),
        ("held_out", 1.0),
        ("held_out", -0.1),
        ("held_out", float("nan")),
        ("held_out", "0.1"),
        ("held_out_tokens", 0),
        ("max_tokens", 100),
        ("max_tokens", 1e9),
        ("seed", -1),
        ("cache", ""),
    ],
)
def test_a_bad_setting_is_named(field, value):
    with pytest.raises(ValueError, match=rf"^data\.{field}: got .*; accepted: "):
        DataConfig(**{field: value})


def test_drelu_needs_a_gate():
    assert not ModelConfig(activation="drelu").dense
    with pytest.raises(ValueError, match=r"^activation: got 'drelu' for a non-gated block; accepted: 'relu'"):
        ModelConfig(activation="drelu", gated=False)


def test_a_list_of_sources_becomes_a_tuple():
    config = DataConfig(source=["a.txt", "b"])
    assert config.source == config.sources == ("a.txt", "b")
    assert DataConfig(source="a.txt").sources == ("a.txt",)
    assert DataConfig(**dataclasses.asdict(config)) == config


def test_the_cache_follows_the_environment(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert DataConfig().cache_folder == Path("/somewhere/twell/data")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert DataConfig().cache_folder == Path("~/.cache/twell/data").expanduser()
    assert DataConfig(cache="~/mine").cache_folder == Path("~/mine").expanduser()


def test_every_setting_has_a_meaning():
    found = {key: (default, meaning) for key, default, meaning in meanings()}
    sections = RunConfig().as_dict()
    expected = {"preset": sections.pop("preset")}
    expected |= {f"{name}.{key}": value for name, keys in sections.items() for key, value in keys.items()}
    assert {key: default for key, (default, _) in found.items()} == expected
    for key, (_, meaning) in found.items():
        assert meaning.endswith("."), f"{key} has no meaning: declare it with setting(default, meaning)"
        assert len(meaning) <= 100, f"{key}: say it in one line"
        assert "\n" not in meaning
