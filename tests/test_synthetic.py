"""Synthetic workloads have the sparsity they promise; trace files round-trip."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from twell.synthetic import ActivationTrace, SyntheticFfn, firing_rates, load_trace, make_ffn

UNION_OF_REAL_TEXT = 956  # active neurons per 128 tokens of a trained layer with 24 of 5632 active


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fired(block: SyntheticFfn) -> torch.Tensor:
    """bool [M, H]: which neurons the selector fires, in float64."""
    selector = block.up if block.gate is None else block.gate
    return block.x.double() @ selector.double().T > 0


def assert_mean_nnz(block: SyntheticFfn, nnz: float, closest: float) -> None:
    """The mean is `nnz` within 4 standard errors, which the case must make narrower than `closest`."""
    per_token = fired(block).sum(dim=1).double()
    standard_error = (per_token.std() / math.sqrt(per_token.numel())).item()
    assert 4 * standard_error < closest * nnz
    assert abs(per_token.mean().item() - nnz) < 4 * standard_error


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("nnz", [2, 24, 150])
def test_make_ffn_fires_the_wanted_number_of_neurons(gated, nnz):
    assert_mean_nnz(make_ffn(4096, 96, 1024, nnz, gated=gated), nnz, closest=0.08)


def test_make_ffn_reaches_dense_regimes_without_dead_neurons():
    block = make_ffn(2048, 64, 256, 200)
    assert_mean_nnz(block, 200, closest=0.03)
    assert fired(block).any(dim=0).all()


def test_make_ffn_extremes():
    assert fired(make_ffn(64, 32, 100, 0)).sum() == 0
    assert fired(make_ffn(64, 32, 100, 100)).all()


def test_each_neuron_fires_at_its_own_rate():
    """With uniform rates every neuron's count is binomial: 5 standard deviations for each of 200."""
    tokens, rate = 4000, 0.1
    counts = fired(make_ffn(tokens, 48, 200, 20, sigma=0.0, dead=0.0)).sum(dim=0).double()
    deviation = math.sqrt(tokens * rate * (1 - rate))
    assert (counts - tokens * rate).abs().max() < 5 * deviation


def test_tokens_differ_and_features_are_as_described():
    block = make_ffn(2000, 33, 64, 8)
    assert (block.x[:, 0] == 8.0).all()
    rest = block.x[:, 1:]
    assert abs(rest.mean().item()) < 5 / math.sqrt(rest.numel())
    assert abs(rest.var().item() - 1) < 5 * math.sqrt(2 / rest.numel())


@pytest.mark.parametrize("seed", range(4))
def test_union_of_128_tokens_matches_real_text(seed):
    rates = firing_rates(5632, 24, generator=seeded(seed))
    expected_union = (1 - (1 - rates) ** 128).sum().item()
    assert expected_union == pytest.approx(UNION_OF_REAL_TEXT, rel=0.15)


def test_measured_union_of_128_tokens_matches_real_text():
    blocks = fired(make_ffn(8 * 128, 192, 5632, 24)).view(8, 128, 5632)
    mean_union = blocks.any(dim=1).sum(dim=1).double().mean().item()
    assert mean_union == pytest.approx(UNION_OF_REAL_TEXT, rel=0.15)


@pytest.mark.parametrize(("neurons", "nnz"), [(1, 0.2), (7, 1.5), (1000, 24), (1000, 499.999), (5632, 0.01)])
def test_rates_sum_to_nnz_and_stay_probabilities(neurons, nnz):
    rates = firing_rates(neurons, nnz, dead=0.0, generator=seeded(0))
    assert (rates.dtype, tuple(rates.shape)) == (torch.float64, (neurons,))
    assert rates.sum().item() == pytest.approx(nnz, rel=1e-9)
    assert rates.min() >= 0
    assert rates.max() <= 0.5


@pytest.mark.parametrize(("dead", "zeros"), [(0.0, 0), (0.3, 300), (0.777, 777), (0.9, 900)])
def test_dead_share_never_fires(dead, zeros):
    rates = firing_rates(1000, 12, dead=dead, generator=seeded(1))
    assert int((rates == 0).sum()) == zeros
    ever_fired = fired(make_ffn(512, 32, 1000, 12, dead=dead)).any(dim=0)
    assert int(ever_fired.sum()) <= 1000 - zeros


def test_dead_neurons_are_scattered():
    dead = (firing_rates(1000, 12, generator=seeded(2)) == 0).double()
    for half in (dead[:500], dead[500:]):
        assert abs(half.sum().item() - 150) < 5 * math.sqrt(500 * 0.3 * 0.7)


def test_sigma_sets_the_spread_of_the_rates():
    uniform = firing_rates(1000, 10, sigma=0.0, dead=0.0, generator=seeded(0))
    torch.testing.assert_close(uniform, torch.full_like(uniform, 0.01), rtol=1e-9, atol=0)
    skewed = firing_rates(20_000, 20, sigma=2.0, dead=0.0, generator=seeded(0))
    assert skewed.log().std().item() == pytest.approx(2.0, abs=5 * 2 / math.sqrt(2 * 20_000))


def test_rates_are_clipped_at_max_rate():
    rates = firing_rates(1000, 60, max_rate=0.2, generator=seeded(0))
    assert rates.max().item() == 0.2
    assert int((rates == 0.2).sum()) > 1
    assert rates.sum().item() == pytest.approx(60, rel=1e-9)


def test_every_living_neuron_at_max_rate():
    rates = firing_rates(100, 35, generator=seeded(0))
    assert sorted(rates.tolist()) == [0.0] * 30 + [0.5] * 70
    assert firing_rates(10, 0).tolist() == [0.0] * 10
    assert firing_rates(10, 0, dead=1.0).tolist() == [0.0] * 10


def test_same_seed_same_block_whatever_the_global_generator():
    torch.manual_seed(1)
    first = make_ffn(8, 6, 20, 3, seed=5)
    torch.manual_seed(2)
    again, other = make_ffn(8, 6, 20, 3, seed=5), make_ffn(8, 6, 20, 3, seed=6)
    assert all(torch.equal(a, b) for a, b in zip(first.operands(), again.operands(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first.operands(), other.operands(), strict=True))


def test_global_generator_is_left_alone():
    torch.manual_seed(3)
    untouched = torch.rand(4)
    torch.manual_seed(3)
    make_ffn(8, 6, 20, 3)
    assert torch.equal(torch.rand(4), untouched)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [True, False])
def test_operands_have_the_shapes_and_dtype_asked_for(dtype, gated):
    block = make_ffn(3, 4, 10, 2, gated=gated, dtype=dtype)
    x, up, down, gate = block.operands()
    assert (tuple(x.shape), tuple(up.shape), tuple(down.shape)) == ((3, 4), (10, 4), (4, 10))
    assert {t.dtype for t in (x, up, down)} == {dtype}
    if gated:
        assert (tuple(gate.shape), gate.dtype) == ((10, 4), dtype)
        assert not torch.equal(gate, up)
    else:
        assert gate is None


def test_device_is_honoured():
    assert {t.device.type for t in make_ffn(3, 4, 10, 2, device="meta").operands()} == {"meta"}


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((100, 35.5), {}, r"^nnz: got 35\.5; accepted: 0 to 35 \(70 living neurons at max_rate 0\.5"),
        ((100, -1), {}, r"^nnz: got -1; accepted: 0 to 35"),
        ((100, math.nan), {}, r"^nnz: got nan; accepted: 0 to 35"),
        ((100, 1), {"dead": 1.0}, r"^nnz: got 1; accepted: 0 to 0 \(0 living neurons"),
        ((100, 91), {"dead": 0.1, "max_rate": 1.0}, r"^nnz: got 91; accepted: 0 to 90 \(90 living"),
        ((0, 0), {}, r"^neurons: got 0; accepted: an integer >= 1"),
        ((10.0, 1), {}, r"^neurons: got 10\.0; accepted: an integer >= 1"),
        ((10, 1), {"dead": -0.1}, r"^dead: got -0\.1; accepted: a share in \[0, 1\]"),
        ((10, 1), {"dead": 1.1}, r"^dead: got 1\.1; accepted: a share in \[0, 1\]"),
        ((10, 1), {"dead": math.nan}, r"^dead: got nan; accepted: a share in \[0, 1\]"),
        ((10, 1), {"max_rate": 0.0}, r"^max_rate: got 0\.0; accepted: a probability in \(0, 1\]"),
        ((10, 1), {"max_rate": 1.5}, r"^max_rate: got 1\.5; accepted: a probability in \(0, 1\]"),
        ((10, 1), {"max_rate": math.nan}, r"^max_rate: got nan; accepted: a probability in \(0, 1\]"),
        ((10, 1), {"sigma": -1.0}, r"^sigma: got -1\.0; accepted: a finite number >= 0"),
        ((10, 1), {"sigma": math.nan}, r"^sigma: got nan; accepted: a finite number >= 0"),
    ],
)
def test_bad_rates_are_refused_by_name(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        firing_rates(*arguments, **options)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((4, 8, 100, 101), {}, r"^nnz: got 101; accepted: 0 to 100"),
        ((4, 8, 100, -1), {}, r"^nnz: got -1; accepted: 0 to"),
        ((4, 8, 100, 20), {"dead": 0.8}, r"^nnz: got 20; accepted: 0 to 10 .*lower dead or raise max_rate"),
        ((0, 8, 100, 1), {}, r"^tokens: got 0; accepted: an integer >= 1"),
        ((4, 0, 100, 1), {}, r"^hidden: got 0; accepted: an integer >= 1"),
        ((4, 1, 100, 1), {}, r"^hidden: got 1; accepted: at least 2 features"),
        ((4, 8, 0, 0), {}, r"^neurons: got 0; accepted: an integer >= 1"),
        ((4, 8, True, 0), {}, r"^neurons: got True; accepted: an integer >= 1"),
    ],
)
def test_bad_blocks_are_refused_by_name(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        make_ffn(*arguments, **options)


@pytest.fixture
def trace_file(tmp_path):
    """Three tokens, the middle one silent."""
    path = tmp_path / "layer.npz"
    np.savez(path, cnt=np.array([2, 0, 3], np.uint16), idx=np.array([1, 6, 0, 2, 6], np.uint16))
    return path


def test_trace_round_trip(trace_file):
    trace = load_trace(trace_file, neurons=7)
    assert isinstance(trace, ActivationTrace)
    assert (trace.tokens, trace.neurons) == (3, 7)
    assert (trace.counts.tolist(), trace.indices.tolist()) == ([2, 0, 3], [1, 6, 0, 2, 6])
    assert trace.counts.dtype == trace.indices.dtype == torch.int64
    assert trace.mean_nnz() == pytest.approx(5 / 3, rel=1e-12)
    assert load_trace(str(trace_file)).neurons == 5632


def test_trace_mask(trace_file):
    trace = load_trace(trace_file, neurons=7)
    expected = [[0, 1, 0, 0, 0, 0, 1], [0] * 7, [1, 0, 1, 0, 0, 0, 1]]
    assert trace.mask().dtype == torch.bool
    assert trace.mask().int().tolist() == expected
    for start in range(4):
        for stop in range(start, 4):
            assert trace.mask(start, stop).int().tolist() == expected[start:stop]
    assert trace.mask(1).int().tolist() == expected[1:]


def test_large_trace_equals_the_mask_it_was_written_from(tmp_path):
    mask = np.random.default_rng(0).random((200, 5632)) < 0.01
    np.savez_compressed(
        tmp_path / "large.npz",
        cnt=mask.sum(axis=1).astype(np.uint32),
        idx=np.nonzero(mask)[1].astype(np.uint16),
    )
    trace = load_trace(tmp_path / "large.npz")
    assert np.array_equal(trace.mask().numpy(), mask)
    assert np.array_equal(trace.mask(50, 120).numpy(), mask[50:120])
    assert trace.mean_nnz() == pytest.approx(mask.sum() / 200, rel=1e-12)


def test_empty_trace(tmp_path):
    np.savez(tmp_path / "empty.npz", cnt=np.zeros(0, np.uint16), idx=np.zeros(0, np.uint16))
    trace = load_trace(tmp_path / "empty.npz", neurons=3)
    assert (trace.tokens, trace.mean_nnz(), tuple(trace.mask().shape)) == (0, 0.0, (0, 3))


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 1), (0, 4), (4, None)])
def test_mask_refuses_a_range_outside_the_trace(trace_file, start, stop):
    trace = load_trace(trace_file, neurons=7)
    with pytest.raises(ValueError, match=r"^start, stop: got \(.*\); accepted: 0 <= start <= stop <= 3"):
        trace.mask(start, stop)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"cnt": [1]},
            r"^path: got .*trace\.npz with arrays \['cnt'\]; accepted: an \.npz with arrays cnt and idx",
        ),
        ({"idx": [1]}, r"^path: got .*; accepted: an \.npz with arrays cnt and idx"),
        (
            {"cnt": [2], "idx": [1]},
            r"^path: got .*cnt sums to 2, idx has 1 entries; accepted: .*length of idx",
        ),
        ({"cnt": [1], "idx": [1, 2]}, r"^path: got .*cnt sums to 1, idx has 2 entries; accepted: "),
    ],
)
def test_broken_trace_files_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "trace.npz", **{name: np.array(a, np.uint16) for name, a in arrays.items()})
    with pytest.raises(ValueError, match=message):
        load_trace(tmp_path / "trace.npz")


def test_trace_with_more_neurons_than_said_is_refused(trace_file):
    with pytest.raises(
        ValueError, match=r"^neurons: got 6; accepted: more than the trace's largest index, 6"
    ):
        load_trace(trace_file, neurons=6)
