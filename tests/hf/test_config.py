"""Configs: what they accept, what they make of released ones, what they refuse."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("transformers")

from transformers import AutoConfig, LlamaConfig
from transformers.activations import ACT2FN

import twell
from twell.hf import SparseLlamaConfig, SparseQwen2Config

from .tiny import SIZES


@pytest.mark.parametrize("config_class", [SparseLlamaConfig, SparseQwen2Config])
def test_round_trip(config_class, tmp_path):
    config = config_class(
        **SIZES, sparsity_l1_coeff=2e-5, sparsity_activation="relu2", sparsity_layer_sizes=[7, 9]
    )
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is config_class
    assert loaded.sparsity_l1_coeff == 2e-5
    assert loaded.sparsity_activation == loaded.hidden_act == "relu2"
    assert loaded.neurons_per_layer() == [7, 9]


def test_drelu_is_for_gated_blocks():
    config = SparseLlamaConfig(**SIZES, sparsity_activation="drelu")
    assert (config.sparsity_activation, config.hidden_act) == ("drelu", "relu")
    with pytest.raises(ValueError, match="activation: got 'drelu' for a non-gated block; accepted: 'relu'"):
        SparseLlamaConfig(**SIZES, sparsity_activation="drelu", sparsity_gated_mlp=False)


@pytest.mark.parametrize("activation", ["relu", "relu2", "fatrelu(0.1)", "drelu"])
def test_hidden_act_is_one_that_stock_classes_have(activation):
    assert SparseLlamaConfig(**SIZES, sparsity_activation=activation).hidden_act in ACT2FN


def test_hidden_act_of_released_configs_is_overridden_and_said(caplog):
    with caplog.at_level(logging.INFO, logger="twell"):
        config = SparseLlamaConfig(**SIZES, hidden_act="silu")
    assert config.hidden_act == "relu"
    assert [r.levelname for r in caplog.records if "hidden_act 'silu'" in r.getMessage()] == ["INFO"]
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="twell"):
        SparseLlamaConfig(**SIZES)
    assert not caplog.records


def test_fields_of_released_configs():
    config = SparseLlamaConfig(
        **SIZES, sparsity_new_intermediate_size=40, sparsity_tokens_until_dead=1000, sparsity_do_track=True
    )
    assert config.neurons_per_layer() == [40, 40]
    assert config.intermediate_size == 40
    assert config.to_dict()["sparsity_tokens_until_dead"] == 1000
    for unset in (None, 0, -1):
        assert SparseLlamaConfig(**SIZES, sparsity_new_intermediate_size=unset).intermediate_size == 48


def test_activation_objects_are_kept_as_text():
    config = SparseLlamaConfig(**SIZES, sparsity_activation=twell.fatrelu(0.25))
    assert config.sparsity_activation == "fatrelu(0.25)"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sparsity_l1_coeff", -1e-5),
        ("sparsity_l1_coeff", float("nan")),
        ("sparsity_l1_coeff", "2e-5"),
        ("sparsity_gated_mlp", "yes"),
        ("sparsity_new_intermediate_size", 4.5),
        ("sparsity_layer_sizes", [48]),
        ("sparsity_layer_sizes", [48, 48, 48]),
        ("sparsity_layer_sizes", [48, 0]),
        ("sparsity_layer_sizes", [48, 4.0]),
        ("sparsity_layer_sizes", 48),
    ],
)
def test_bad_fields_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        SparseLlamaConfig(**SIZES, **{field: value})


def test_bad_activation():
    with pytest.raises(ValueError, match="activation: got 'silu'"):
        SparseLlamaConfig(**SIZES, sparsity_activation="silu")


def test_checks_of_the_stock_config_still_run():
    with pytest.raises(Exception, match="not a multiple of the number of attention"):
        SparseLlamaConfig(**SIZES | {"hidden_size": 33})


@pytest.mark.parametrize("stock", ["relu", "relu2", "relu_squared"])
def test_a_stock_config_keeps_exact_zeros(stock, tmp_path, caplog):
    LlamaConfig(**SIZES, hidden_act=stock).save_pretrained(tmp_path)
    config = SparseLlamaConfig.from_pretrained(tmp_path)
    assert config.sparsity_activation == config.hidden_act == ("relu" if stock == "relu" else "relu2")
    assert not [record for record in caplog.records if record.name == "twell"]


def test_a_stock_config_without_exact_zeros_is_said(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("twell._log._logged", set())
    LlamaConfig(**SIZES, hidden_act="silu").save_pretrained(tmp_path)
    for _ in range(2):
        assert SparseLlamaConfig.from_pretrained(tmp_path).sparsity_activation == "relu"
    assert [r.levelname for r in caplog.records if "hidden_act 'silu'" in r.getMessage()] == ["WARNING"]


def test_sparsity_fields_given_to_from_pretrained_are_checked(tmp_path):
    SparseLlamaConfig(**SIZES, sparsity_activation="relu2").save_pretrained(tmp_path)
    for activation in ("relu", "relu2", "fatrelu(0.1)", "drelu"):
        config = SparseLlamaConfig.from_pretrained(tmp_path, sparsity_activation=activation)
        assert config.sparsity_activation == activation
        assert config.hidden_act == ("relu2" if activation == "relu2" else "relu")
    with pytest.raises(ValueError, match="activation: got 'gelu'"):
        AutoConfig.from_pretrained(tmp_path, sparsity_activation="gelu")


def test_activations_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="hidden_act: got 'relu2'; accepted: 'relu'"):
        SparseLlamaConfig(**SIZES, hidden_act="relu2")
    assert SparseLlamaConfig(**SIZES, hidden_act="relu2", sparsity_activation="relu2").hidden_act == "relu2"


@pytest.mark.parametrize(
    ("stock", "asked", "activation"), [("silu", "relu2", "relu2"), ("relu2", "relu", "relu")]
)
def test_hidden_act_may_be_asked_for(stock, asked, activation, tmp_path):
    LlamaConfig(**SIZES, hidden_act=stock).save_pretrained(tmp_path / "stock")
    config = SparseLlamaConfig.from_pretrained(tmp_path / "stock", hidden_act=asked)
    assert (config.sparsity_activation, config.hidden_act) == (activation, activation)
    config.save_pretrained(tmp_path / "sparse")
    assert SparseLlamaConfig.from_pretrained(tmp_path / "sparse").sparsity_activation == activation
