"""Limits of the CPU's sparse paths: the probes run the real paths here and give numbers that make sense."""

from __future__ import annotations

import pytest
import torch

from twell import crossover
from twell.kernels.cpu import measurements
from twell.kernels.cpu.weights import CpuSite, WeightViews

pytestmark = pytest.mark.real_cpu

SITE = CpuSite(
    tokens=64,
    hidden=128,
    neurons=512,
    dtype=torch.float64,
    gated=True,
    neuron_major_down=True,
    threads=1,
)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TWELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measurements, "_known", {})


@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("neuron_major", [True, False])
def test_real_limits(tokens, dtype, neuron_major):
    site = SITE._replace(tokens=tokens, dtype=dtype, neuron_major_down=neuron_major)
    limit = crossover.row_limit(site)
    assert 0 <= limit <= 0.25
    assert crossover.row_limit(site) == limit
    assert isinstance(crossover.block_pays(site), bool)
    assert all(value >= 0 for value in measurements.kept_measurements().values())


@pytest.mark.parametrize(
    ("dense", "at_low", "at_high", "limit"),
    [
        (1.0, 2.0, 3.0, 0.0),  # never pays
        (1.0, 0.14, 0.5, 0.2),  # 0.9 = 0.1 + 4 d
        (1.0, 0.1, 0.1, 0.25),  # always: as far as was probed, and no further
        (1.0, 0.9, 1.8, 0.01),
    ],
)
def test_the_limit_lies_where_row_and_dense_meet(dense, at_low, at_high, limit):
    assert crossover.row_and_dense_meet(dense, at_low, at_high) == pytest.approx(limit)


@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize("neuron_major", [True, False])
def test_what_is_timed_computes_the_block(tokens, neuron_major):
    site = SITE._replace(tokens=tokens, neuron_major_down=neuron_major)
    args, *_ = crossover._probe_layers(site)
    activated = crossover._activations(site, 0.1)
    assert activated.bool().float().mean().item() == pytest.approx(0.1, abs=0.05)
    exact = (activated * (args.x @ args.up.mT)) @ args.down.mT
    for finish in (crossover._row_finish, crossover._block_finish, crossover._dense_finish):
        y = finish(WeightViews(args, tuned=False), activated.clone())
        torch.testing.assert_close(y, exact)


def test_gains_are_dense_time_over_the_other_path(monkeypatch):
    monkeypatch.setattr(crossover, "_seconds", lambda layers, *finishes: [3.0, 1.5])
    assert crossover._measure_block_gain(SITE) == 2.0


def test_tuning_measures_again_and_keeps(monkeypatch):
    monkeypatch.setattr(crossover, "_measure_row_limit", lambda site: 0.2)
    monkeypatch.setattr(crossover, "_measure_block_gain", lambda site: 3.0)
    assert crossover.remeasure(SITE) == (0.2, True)
    monkeypatch.setattr(crossover, "_measure_row_limit", lambda site: 0.1)
    monkeypatch.setattr(crossover, "_measure_block_gain", lambda site: 1.0)
    assert crossover.row_limit(SITE) == 0.2
    assert crossover.remeasure(SITE) == (0.1, False)
    assert crossover.row_limit(SITE) == 0.1
    assert not crossover.block_pays(SITE)


@pytest.mark.parametrize(
    ("sizes", "probed"),
    [
        ((1, 100, 90), (1, 128, 256)),
        ((300, 3000, 14336), (256, 2048, 4096)),
        ((63, 511, 512), (16, 256, 512)),
    ],
)
def test_a_size_near_the_block_is_probed(sizes, probed):
    tokens, hidden, neurons = sizes
    site = crossover._probe_site(SITE._replace(tokens=tokens, hidden=hidden, neurons=neurons))
    assert (site.tokens, site.hidden, site.neurons) == probed
    assert site._replace(tokens=tokens, hidden=hidden, neurons=neurons) == SITE._replace(
        tokens=tokens, hidden=hidden, neurons=neurons
    )


def test_names_tell_kinds_apart():
    kinds = [
        SITE,
        SITE._replace(dtype=torch.float32),
        SITE._replace(gated=False),
        SITE._replace(neuron_major_down=False),
        SITE._replace(threads=2),
        SITE._replace(tokens=1),
        SITE._replace(hidden=256),
        SITE._replace(neurons=1024),
    ]
    names = {crossover._name("row limit", crossover._probe_site(kind)) for kind in kinds}
    assert len(names) == len(kinds)


def test_measuring_leaves_the_random_state_and_the_defaults_alone():
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert 0 <= crossover.row_limit(SITE._replace(dtype=torch.float32)) <= 0.25
    finally:
        torch.set_default_dtype(dtype)
    assert torch.equal(torch.get_rng_state(), state)
