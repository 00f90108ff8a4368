"""The paper's models: every layer fires as many neurons as was asked for, as unevenly as trained ones."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")

from twell.measure import models
from twell.measure.models import (
    PRESETS,
    ModelSize,
    active_by_layer,
    build_pair,
    decoder_layers,
    preset_size,
    require_room,
    shared_twin,
    tensor_bytes,
)
from twell.reference import relative_error
from twell.sparsify.blocks import named_blocks


@pytest.fixture(scope="module")
def size() -> ModelSize:
    return ModelSize(hidden=128, neurons=512, layers=3, vocabulary=500, positions=256, nnz=9.0)


@pytest.fixture(scope="module")
def pair(size):
    return build_pair(size, dtype=torch.float32, device="cpu", seed=3)


def test_every_layer_has_the_wanted_nnz_on_new_tokens(pair, size):
    ids = torch.randint(size.vocabulary, (8, 256), generator=torch.Generator().manual_seed(1))
    found = active_by_layer(pair.sparse, ids)
    assert len(found) == 3
    assert found == pytest.approx([9.0] * 3, rel=0.1)


def test_rates_are_skewed_and_many_neurons_dead(pair, size):
    ids = torch.randint(size.vocabulary, (8, 256), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        fired = torch.stack([*pair.sparse(ids, record_sparsity=True).firing]).float() / ids.numel()
    for rates in fired:
        assert (rates == 0).float().mean() > 0.25
        assert rates.max() > 20 * rates.mean()


def test_both_models_compute_the_same(pair, size):
    ids = torch.randint(size.vocabulary, (2, 64))
    with torch.no_grad():
        dense, sparse = pair.dense(ids).logits, pair.sparse(ids).logits
    assert torch.allclose(dense, sparse, atol=1e-4)
    assert dense.argmax(-1).unique().numel() > 10  # not one token for everything


@pytest.mark.parametrize("layer", [0, 4, 7])
def test_a_wrong_block_shows_in_the_logits(layer):
    """Comparing logits would prove nothing if blocks hardly changed them."""
    deep = ModelSize(hidden=128, neurons=512, layers=8, vocabulary=500, positions=256, nnz=9.0)
    right = build_pair(deep, dtype=torch.float32, device="cpu").dense
    ids = torch.randint(500, (2, 64), generator=torch.Generator().manual_seed(1))
    rounded, wrong = copy.deepcopy(right).bfloat16(), copy.deepcopy(right)
    with torch.no_grad():
        wrong.model.layers[layer].mlp.down_proj.weight.zero_()
        expected, *found = (model(ids).logits.float() for model in (right, rounded, wrong))
    of_rounding, of_one_block = (relative_error(one, expected) for one in found)
    assert of_one_block > 5 * of_rounding


def test_seeds_make_models(size):
    small = ModelSize(hidden=64, neurons=128, layers=1, vocabulary=64, positions=64, nnz=4)
    first, again, other = (
        build_pair(small, dtype=torch.float32, device="cpu", seed=seed).dense.lm_head.weight
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_build_leaves_the_random_state_alone(size):
    small = ModelSize(hidden=64, neurons=128, layers=1, vocabulary=64, positions=64, nnz=4)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_pair(small, dtype=torch.bfloat16, device="cpu")
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_default_dtype() == torch.float32


def test_most_neurons_can_be_active():
    small = ModelSize(hidden=64, neurons=128, layers=1, vocabulary=64, positions=64, nnz=100)
    pair = build_pair(small, dtype=torch.float32, device="cpu")
    assert active_by_layer(pair.sparse, torch.randint(64, (4, 64)))[0] == pytest.approx(100, rel=0.1)


def test_a_twin_shares_its_weights(pair):
    twin = shared_twin(pair.sparse)
    ours, theirs = dict(pair.sparse.named_parameters()), dict(twin.named_parameters())
    assert all(theirs[name] is parameter for name, parameter in ours.items())
    assert not set(map(id, twin.modules())) & set(map(id, pair.sparse.modules()))
    assert len(named_blocks(twin)) == len(decoder_layers(twin)) == 3


def test_sizes_count_every_parameter(pair, size):
    assert sum(p.numel() for p in pair.dense.parameters()) == size.parameters
    assert tensor_bytes(pair.dense) >= 4 * size.parameters


def test_presets_have_the_sizes_of_training():
    from twell.train.presets import preset
    from twell.train.settings import run_config

    for name, size in PRESETS.items():
        model = run_config(preset(name)).model
        assert (size.hidden, size.neurons, size.layers) == (
            model.hidden_size,
            model.intermediate_size,
            model.layers,
        )
    assert PRESETS["paper-2b"].parameters == pytest.approx(2.1e9, rel=0.03)


def test_a_model_that_does_not_fit_says_what_would(monkeypatch):
    monkeypatch.setattr(models, "free_bytes", lambda device: 4 << 30)
    size = preset_size("paper-2b")
    with pytest.raises(
        ValueError, match=r"needs 8\.\d GiB of the 4\.0 GiB .* accepted: --layers \d+"
    ) as error:
        require_room(size, bytes_per_parameter=4, device="cpu", name="paper-2b")
    layers = int(str(error.value).split("--layers ")[1].split(",")[0])
    require_room(preset_size("paper-2b", layers=layers), bytes_per_parameter=4, device="cpu", name="paper-2b")
    with pytest.raises(ValueError, match="--layers"):
        require_room(
            preset_size("paper-2b", layers=layers + 1), bytes_per_parameter=4, device="cpu", name="paper-2b"
        )
    monkeypatch.setattr(models, "free_bytes", lambda device: 1 << 20)
    with pytest.raises(ValueError, match="a smaller preset"):
        require_room(size, bytes_per_parameter=4, device="cpu", name="paper-2b")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "paper2b"}, r"preset: got 'paper2b'; .*; did you mean 'paper-2b'\?$"),
        ({"name": "gigantic"}, r"preset: got 'gigantic'; accepted: one of tiny, .*, paper-2b$"),
        ({"name": "tiny", "layers": 0}, "layers: got 0"),
    ],
)
def test_wrong_presets(arguments, message):
    with pytest.raises(ValueError, match=message):
        preset_size(**arguments)


def test_heads_need_whole_sizes():
    with pytest.raises(ValueError, match="hidden: got 100"):
        ModelSize(hidden=100, neurons=8, layers=1)
