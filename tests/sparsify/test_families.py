"""Every language model of transformers: sparse and exact, or refused with a reason."""

from __future__ import annotations

import importlib.metadata

import pytest

pytest.importorskip("transformers")

import transformers

from twell.measure import read_records

from . import families, tiny_models

# One of each shape a block comes in.
REPRESENTATIVE = [
    *("bart", "bert", "ctrl", "falcon", "funnel", "gpt2", "gpt_neo", "led", "llama", "m2m_100", "modernbert"),
    *("mt5", "nemotron", "opt", "pegasus", "pegasus_x", "persimmon", "phi3", "roberta-prelayernorm"),
    *("switch_transformers", "t5", "vit", "xglm", "xlnet"),
]
REFUSED = {"mixtral": "experts", "bitnet": "parameters besides", "bloom": "no projection"}
ENOUGH = 150


@pytest.fixture(autouse=True)
def quiet():
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def recorded() -> dict[str, dict]:
    return {record.shape["model_type"]: record.shape for record in read_records(families.RECORDS)}


@pytest.mark.parametrize("model_type", REPRESENTATIVE)
def test_a_family_runs_sparse(model_type):
    outcome = families.judge(model_type)
    assert outcome.verdict == "sparse", outcome.reason


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_family_is_refused_with_a_reason(model_type):
    outcome = families.judge(model_type)
    assert outcome.verdict in ("refused", "no relu")
    assert REFUSED[model_type] in outcome.reason


def test_the_walk_notices_a_wrong_block(monkeypatch):
    from twell.sparsify import blocks

    stock = blocks.BlockTwin.forward
    monkeypatch.setattr(blocks.BlockTwin, "forward", lambda twin, x: 1.01 * stock(twin, x))
    outcome = families.judge("opt")
    assert outcome.verdict == "WRONG"
    assert "its output differs" in outcome.reason


def test_the_walk_notices_a_dense_block(monkeypatch):
    from twell.sparsify import blocks

    monkeypatch.setattr(blocks.BlockTwin, "why_stock", lambda twin, x: "a test says so")
    outcome = families.judge("llama")
    assert outcome.verdict == "WRONG"
    assert "0 tokens ran sparse" in outcome.reason


def test_enough_families_were_sparse():
    verdicts = [shape["verdict"] for shape in recorded().values()]
    assert "WRONG" not in verdicts
    assert verdicts.count("sparse") >= ENOUGH
    assert all(shape["reason"] for shape in recorded().values() if shape["verdict"] != "sparse")


@pytest.mark.families
@pytest.mark.parametrize("model_type", families.types_to_walk())
def test_every_family(model_type):
    """As recorded, so that the table in docs/models.md stays true; new types are not wrong, at least."""
    outcome = families.judge(model_type)
    assert outcome.verdict != "WRONG", outcome.reason
    known = recorded().get(model_type)
    if known is not None and _is_recorded_version():
        assert (outcome.verdict, outcome.reason) == (known["verdict"], known["reason"]), (
            "record the walk again"
        )


def _is_recorded_version() -> bool:
    """Other versions of transformers build other models."""
    recorded_with = read_records(families.RECORDS)[0].versions["transformers"]
    return recorded_with == importlib.metadata.version("transformers")


def test_tiny_configs_say_relu():
    assert tiny_models.tiny_config("llama").hidden_act == "relu"
    assert tiny_models.tiny_config("nemotron").hidden_act == "relu2"
    assert tiny_models.tiny_config("mt5").feed_forward_proj == "gated-relu"
