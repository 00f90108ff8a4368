"""Released checkpoints: every spelling, gated or not, in one file or many, through every door."""

from __future__ import annotations

import json
import re

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from twell.hf import SparseLlamaForCausalLM, convert_state_dict
from twell.hf.spellings import in_stock_spelling

from .tiny import SPARSE, is_neuron_major, sparse_model, tokens

RELEASED_FIELDS = {
    "hidden_act": "silu",
    "sparsity_tokens_until_dead": 1000,
    "sparsity_mlp_execution_logic": "twell",
    "sparsity_use_hybrid_kernel": False,
    "sparsity_do_track": True,
}
MLP_KEY = re.compile(r"(.*\.mlp\.)(gate|up|down)_proj\.weight")


def respell(state: dict[str, torch.Tensor], spelling: str, gated: bool) -> dict[str, torch.Tensor]:
    """Convert stock keys and shapes to a released checkpoint's."""
    spelled = {}
    for key, value in state.items():
        match = MLP_KEY.fullmatch(key)
        if match is None or spelling == "stock":
            spelled[key] = value
            continue
        block, which = match.groups()
        if spelling == "upper":
            spelled[block + which.upper()] = value.mT if which == "down" else value
        else:
            transposed = which != "up" or not gated
            spelled[f"{block}{which}_weight"] = value.mT if transposed else value
    return {key: value.contiguous() for key, value in spelled.items()}


def release(model, folder, spelling: str, shards: int = 1) -> None:
    """Write a model as the released ones are: no auto_map, hidden_act of another model, training state."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | RELEASED_FIELDS
    for field in ("sparsity_activation", "sparsity_layer_sizes"):
        config.pop(field)
    (folder / "config.json").write_text(json.dumps(config))
    weights = folder / "model.safetensors"
    state = respell(load_file(weights), spelling, model.config.sparsity_gated_mlp)
    state["model.layers.0.mlp.tracker.fired"] = torch.zeros(5)
    state["metrics_accumulator.tokens"] = torch.zeros(1)
    weights.unlink()
    write(folder, state, shards)


def write(folder, state, shards: int = 1) -> None:
    if shards == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(state.items())[shard::shards])
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


spellings = pytest.mark.parametrize("spelling", ["stock", "lower", "upper"])


@spellings
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("neurons", [48, 32], ids=["tall", "square"])
def test_every_spelling_loads(spelling, gated, neurons, tmp_path):
    model = sparse_model(sparsity_gated_mlp=gated, intermediate_size=neurons, tie_word_embeddings=True)
    model.generation_config.max_new_tokens = 7
    release(model, tmp_path, spelling)
    ids = tokens()
    expected = model(ids)
    for loader in (SparseLlamaForCausalLM, AutoModelForCausalLM):
        loaded, info = loader.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is SparseLlamaForCausalLM
        assert torch.equal(loaded(ids).logits, expected.logits)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert loaded.config.hidden_act == "relu"
        assert loaded.config.sparsity_tokens_until_dead == 1000
        assert loaded.config.name_or_path == str(tmp_path)
        assert loaded.generation_config.max_new_tokens == 7
        assert is_neuron_major(loaded)
    backbone = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(backbone(ids).last_hidden_state, model.model(ids).last_hidden_state)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shards_dtype_and_options(family, dtype, tmp_path):
    model = sparse_model(family).to(torch.bfloat16)
    release(model, tmp_path, "upper", shards=3)
    loaded = SPARSE[family][1].from_pretrained(
        tmp_path, dtype=dtype, attn_implementation="eager", sparsity_l1_coeff=0.5
    )
    assert loaded.dtype == dtype
    assert loaded.l1_weight == 0.5
    assert loaded.config._attn_implementation == "eager"
    expected = model.to(dtype).state_dict()
    state = loaded.state_dict()
    assert all(torch.equal(state[key], expected[key]) for key in expected)


def test_loaded_models_are_saved_in_the_stock_spelling(tmp_path):
    model = sparse_model()
    release(model, tmp_path / "released", "lower")
    SparseLlamaForCausalLM.from_pretrained(tmp_path / "released").save_pretrained(tmp_path / "ours")
    saved = load_file(tmp_path / "ours" / "model.safetensors")
    expected = model.state_dict()
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[key], expected[key]) for key in expected)


def test_new_intermediate_size_of_released_configs(tmp_path):
    model = sparse_model()
    release(model, tmp_path, "upper")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"intermediate_size": 4096, "sparsity_new_intermediate_size": 48}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = tokens()
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@spellings
@pytest.mark.parametrize("gated", [True, False])
def test_state_dicts_convert(spelling, gated):
    model = sparse_model(sparsity_gated_mlp=gated)
    expected = model.state_dict()
    converted = convert_state_dict(respell(expected, spelling, gated), model.config)
    assert converted.keys() == expected.keys()
    assert all(torch.equal(converted[key], expected[key]) for key in expected)
    more = {"model.layers.0.mlp.tracker.fired": torch.zeros(5), "model.layers.0.mlp.qweight": torch.zeros(1)}
    stream = in_stock_spelling((respell(expected, spelling, gated) | more).items(), model.config)
    streamed = dict(stream)
    assert streamed.pop("model.layers.0.mlp.qweight").shape == (1,)  # not ours to judge
    assert streamed.keys() == expected.keys()
    assert all(torch.equal(streamed[key], expected[key]) for key in expected)


def renamed(state, old: str, new: str):
    return {key.replace(old, new): value for key, value in state.items()}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: renamed(s, "0.mlp.GATE", "0.mlp.GAIT"), "unknown key 'model.layers.0.mlp.GAIT'"),
        (lambda s: {k: v for k, v in s.items() if "1.mlp.UP" not in k}, "layer 1 without"),
        (lambda s: {k: v.mT.contiguous() if "UP" in k else v for k, v in s.items()}, r"shape \(32, 48\)"),
        (
            lambda s: s | {"model.layers.0.mlp.up_weight": s["model.layers.0.mlp.UP"].clone()},
            "both 'model.layers.0.mlp.UP' and 'model.layers.0.mlp.up_weight'",
        ),
    ],
    ids=["unknown", "missing", "shape", "twice"],
)
def test_damaged_checkpoints_are_refused(damage, message, tmp_path):
    release(sparse_model(), tmp_path, "upper")
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    write(tmp_path, damage(state))
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@spellings
def test_gated_weights_for_a_plain_config_are_refused(spelling, tmp_path):
    release(sparse_model(), tmp_path, spelling)
    with pytest.raises(ValueError, match="unknown key"):
        SparseLlamaForCausalLM.from_pretrained(tmp_path, sparsity_gated_mlp=False)


def test_missing_weights_of_other_file_formats_are_refused(tmp_path):
    model = sparse_model()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    state = model.state_dict()
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert SparseLlamaForCausalLM.from_pretrained(tmp_path)
    del state["model.layers.1.mlp.up_proj.weight"]
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="feed-forward weights"):
        SparseLlamaForCausalLM.from_pretrained(tmp_path)


def test_a_file_that_was_cut_off_is_named(tmp_path):
    sparse_model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(OSError, match=r"model\.safetensors: no whole safetensors file"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
