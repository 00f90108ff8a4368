"""Shares of active neurons: measured, kept in a config, read from it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from twell import SparseMLP
from twell.shares import FIELD, SIZES, keep_shares, measure_shares, stored_shares

LAYERS = 2


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(*(SparseMLP(16, 64, gated=gated) for gated in (True, False)))


def union(mlp, x, groups):
    """Mean share over groups of tokens, by the plainest means."""
    selector = (mlp.gate_proj if mlp.gated else mlp.up_proj).weight
    active = (x @ selector.mT) > 0
    return torch.stack([active[list(group)].any(0).double().mean() for group in groups]).mean().item()


def test_decode_batches_hold_distant_tokens_and_blocks_neighbours(model):
    x = torch.randn(256, 16)
    # Neighbours are alike, so that unions of neighbours and of distant tokens differ.
    x = x[::32].repeat_interleave(32, 0) + 0.01 * x
    shares = measure_shares(model, [x])
    first = model[0]
    assert list(shares) == [str(size) for size in SIZES]
    assert all(len(layers) == LAYERS for layers in shares.values())
    assert shares["1"][0] == pytest.approx(union(first, x, [[t] for t in range(256)]), abs=1e-4)
    distant = [range(start, 256, 64) for start in range(64)]
    assert shares["4"][0] == pytest.approx(union(first, x, distant), abs=1e-4)
    assert shares["4"][0] > union(first, x, [range(t, t + 4) for t in range(0, 256, 4)]) + 0.1
    neighbours = [range(128), range(128, 256)]
    assert shares["128"][0] == pytest.approx(union(first, x, neighbours), abs=1e-4)
    assert shares["128"][1] == pytest.approx(union(model[1], first(x), neighbours), abs=1e-4)


def test_batches_count_alike_and_short_ones_not_at_all(model):
    x, y = torch.randn(2, 128, 16)
    each = [measure_shares(model, [batch])["16"][0] for batch in (x, y)]
    both = measure_shares(model, [x, {"input": y}, (torch.randn(127, 16),)])
    assert both["16"][0] == pytest.approx(sum(each) / 2, abs=1e-4)
    assert measure_shares(model, [torch.randn(127, 16)]) == {}
    assert measure_shares(nn.Linear(16, 16), [x]) == {}


def test_nothing_stays_behind(model):
    model.train()
    measure_shares(model, [torch.randn(128, 16)])
    assert model.training
    assert not any(block._forward_pre_hooks for block in model)


def test_kept_and_read_back(model):
    config = SimpleNamespace(num_hidden_layers=LAYERS)
    assert stored_shares(config) == []
    shares = measure_shares(model, [torch.randn(128, 16)])
    keep_shares(config, shares)
    assert stored_shares(config) == [
        {size: shares[str(size)][layer] for size in SIZES} for layer in range(LAYERS)
    ]
    keep_shares(config, {})
    assert not hasattr(config, FIELD)
    keep_shares(config, {})


@pytest.mark.parametrize(
    "stored",
    [[0.1, 0.2], {"few": [0.1, 0.2]}, {"1": 0.1}, {"1": [0.1]}, {"1": [0.1, 1.5]}, {"1": [0.1, "0.2"]}],
    ids=str,
)
def test_what_is_damaged_is_refused(stored):
    config = SimpleNamespace(num_hidden_layers=LAYERS, **{FIELD: stored})
    with pytest.raises(ValueError, match=FIELD):
        stored_shares(config)
