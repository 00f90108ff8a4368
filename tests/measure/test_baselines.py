"""Dense baselines: they compute what the dense model computes, and layers share what is compiled."""

from __future__ import annotations

import logging

import pytest
import torch

pytest.importorskip("transformers")
from torch._dynamo.utils import counters

from twell.measure.baselines import (
    _all_active,
    _merged,
    can_merge,
    compile_layers,
    dense_ways,
    many_compilations,
    quiet_autotuning,
)
from twell.measure.models import ModelSize, active_by_layer, build_pair, shared_twin

SIZE = ModelSize(hidden=64, neurons=256, layers=5, vocabulary=100, positions=64, nnz=6)
IDS = torch.arange(32).view(2, 16)


@pytest.fixture(scope="module")
def pair():
    return build_pair(SIZE, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_all_layers_share_one_graph(pair, kind, fresh_compiler):
    model = compile_layers(shared_twin(getattr(pair, kind)), backend="eager")
    before = counters["stats"]["unique_graphs"]
    with many_compilations(), torch.no_grad():
        found = model(IDS, use_cache=False).logits
    assert counters["stats"]["unique_graphs"] - before == 2  # a layer, and the last norm
    with torch.no_grad():
        assert torch.allclose(found, pair.dense(IDS, use_cache=False).logits, atol=1e-4)


def test_many_contenders_stay_compiled(pair, fresh_compiler):
    """More of them than torch's own limit: with fullgraph, giving up would raise."""
    before = counters["stats"]["unique_graphs"]
    with many_compilations(), torch.no_grad():
        for length in range(2, 14):
            compile_layers(shared_twin(pair.dense), backend="eager")(IDS[:, :length], use_cache=False)
    assert counters["stats"]["unique_graphs"] - before == 24


def test_the_merged_block_is_the_same_function(pair):
    assert can_merge(pair.dense)
    assert not can_merge(pair.sparse)
    merged = _merged(pair.dense)
    with torch.no_grad():
        found, expected = (model(IDS, use_cache=False).logits for model in (merged, pair.dense))
    assert torch.allclose(found, expected, atol=1e-5)
    assert type(pair.dense.model.layers[0].mlp).__name__ == "LlamaMLP"  # the model itself stays


def test_all_neurons_can_be_made_to_fire(pair):
    twin = _all_active(pair.sparse)
    assert active_by_layer(twin, IDS) == [SIZE.neurons] * SIZE.layers
    assert active_by_layer(pair.sparse, IDS)[0] < 20


def test_ways_of_a_model_that_was_not_built_here(pair):
    ways = dense_ways(pair.dense, pair.sparse, all_active=False)
    assert list(ways) == ["max-autotune", "merged gate-up"]


def test_autotuning_is_silent_and_speaks_again():
    import torch._inductor.select_algorithm as selection

    before = selection.PRINT_AUTOTUNE, selection.log.level
    with quiet_autotuning():
        assert not selection.PRINT_AUTOTUNE
        assert not selection.log.isEnabledFor(logging.ERROR)
    assert (selection.PRINT_AUTOTUNE, selection.log.level) == before
