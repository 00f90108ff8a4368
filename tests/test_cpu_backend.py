"""The CPU backend's paths against the oracle, over shapes, densities, dtypes, layouts and variants."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from twell import Plan, ffn, ffn_with_stats, reference
from twell.kernels import cpu, cpu_choice, cpu_multiply
from twell.kernels.cpu_weights import CpuSite
from twell.synthetic import make_ffn

from .accuracy import assert_accurate, stock_dense

PATHS = ["auto", "row", "block", "dense"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def cpu_plan(path: str, block_rows: int = 0) -> Plan:
    return Plan(path=path, block_rows=block_rows, backend="cpu")


def check(operands: tuple, plan: Plan, **options) -> None:
    y, stats = ffn_with_stats(*operands, plan=plan, **options)
    exact = reference.ffn(*operands, dtype=torch.float64, **options)
    assert_accurate(y, exact.y, stock_dense(*operands, **options))
    tolerance = 8 * torch.finfo(operands[0].dtype).eps
    assert stats.l1.item() == pytest.approx(exact.l1.item(), rel=tolerance, abs=1e-30)
    # A pre-activation within rounding of zero may fall on either side: none does at these seeds in
    # wide dtypes, a handful may in 16 bits.
    misses = (stats.firing - exact.firing).abs().sum().item()
    allowed = 0 if operands[0].dtype in (torch.float32, torch.float64) else 0.01 * exact.firing.sum()
    assert misses <= allowed
    assert stats.l0.item() == pytest.approx(stats.firing.sum().item() / max(operands[0].shape[0], 1))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 129])
@pytest.mark.parametrize("nnz", [0, 1.5, 12, 160])
def test_matches_oracle(path, dtype, tokens, nnz):
    check(make_ffn(tokens, 48, 160, nnz, dtype=dtype, seed=tokens).operands(), cpu_plan(path))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ["relu", "relu2", "fatrelu(0.25)"])
@pytest.mark.parametrize("tokens", [1, 33])
def test_variants(path, gated, activation, tokens):
    block = make_ffn(tokens, 40, 136, 20, gated=gated, seed=3)
    biases = {"up_bias": torch.randn(136) / 8, "down_bias": torch.randn(40)}
    if gated:
        biases["gate_bias"] = torch.randn(136) / 8
    check(block.operands(), cpu_plan(path), activation=activation, **biases)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 20, 300])
def test_neuron_major_down(path, dtype, tokens):
    x, up, down, gate = make_ffn(tokens, 32, 96, 9, dtype=dtype, seed=5).operands()
    check((x, up, down.mT.contiguous().mT, gate), cpu_plan(path))


@pytest.mark.parametrize("path", PATHS)
def test_several_chunks_with_a_ragged_end(path, monkeypatch):
    monkeypatch.setattr(cpu, "CHUNK_TOKENS", range(32, 33))
    check(make_ffn(101, 32, 96, 9, seed=6).operands(), cpu_plan(path, block_rows=16))


@pytest.mark.parametrize("rows", [1, 5, 64, 1000])
def test_block_rows(rows):
    check(make_ffn(70, 32, 96, 9, seed=7).operands(), cpu_plan("block", rows))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("hidden", "neurons"), [(8, 8), (24, 1000), (1000, 24), (10, 9)])
def test_awkward_sizes(path, hidden, neurons):
    check(make_ffn(13, hidden, neurons, neurons / 4, seed=8).operands(), cpu_plan(path))


def test_an_empty_batch_gives_an_empty_result():
    x, up, down, gate = make_ffn(3, 16, 32, 4).operands()
    for path in PATHS:
        y, stats = ffn_with_stats(x[:0], up, down, gate, plan=cpu_plan(path))
        assert y.shape == (0, 16)
        assert stats.l1.item() == 0
        assert stats.l0.item() == 0
        assert stats.firing.tolist() == [0] * 32


class TestAutoChoosesByDensity:
    """`auto` takes each path where it should: seen through which chunk function ran."""

    @pytest.fixture
    def taken(self, monkeypatch):
        taken: list[str] = []
        # These blocks are far too small to pay; the choice by density is what is looked at.
        monkeypatch.setattr(cpu_choice, "_SPARSE_OVERHEAD_SECONDS", 0.0)
        monkeypatch.setattr(cpu_choice, "_row_limit", lambda site: 0.13)
        monkeypatch.setattr(cpu_choice, "_block_pays", lambda site: True)
        for path in ("row", "block", "dense"):
            run = getattr(cpu, f"finish_{path}")

            def recording(*args, path=path, run=run):
                taken.append(path)
                return run(*args)

            monkeypatch.setattr(cpu, f"finish_{path}", recording)
        return taken

    @pytest.mark.parametrize(("nnz", "expected"), [(4, "row"), (400, "dense")])
    def test_few_or_all_active(self, taken, nnz, expected):
        ffn(*make_ffn(128, 32, 400, nnz).operands(), plan=cpu_plan("auto"))
        assert taken == [expected]

    def test_tokens_that_share_many_neurons(self, taken):
        x, up, down, gate = make_ffn(128, 32, 400, 100, sigma=0.0, dead=0.75, max_rate=1.0).operands()
        check((x, up, down, gate), cpu_plan("auto"))
        assert taken == ["block"]

    def test_work_too_small_to_pay(self, taken, monkeypatch):
        monkeypatch.setattr(cpu_choice, "_SPARSE_OVERHEAD_SECONDS", 1.0)
        for tokens in (1, 128):
            ffn(*make_ffn(tokens, 32, 400, 4).operands(), plan=cpu_plan("auto"))
        assert taken == ["dense", "dense"]

    def test_one_token(self, taken):
        ffn(*make_ffn(1, 32, 400, 400).operands(), plan=cpu_plan("auto"))
        assert taken == ["dense"]

    def test_once_dense_the_rest_is_not_looked_at(self, taken, monkeypatch):
        monkeypatch.setattr(cpu, "CHUNK_TOKENS", range(32, 33))
        x, up, down, gate = make_ffn(256, 32, 400, 4).operands()
        x[64:128, 0] *= -1  # the constant feature flips, so the second block of 64 fires nearly all
        check((x, up, down, gate), cpu_plan("auto"))
        assert taken == ["row", "dense", "dense"]


class TestMeasuredLimits:
    """The probes run the real paths on this machine and give limits that make sense."""

    SITE = CpuSite(
        tokens=64,
        hidden=8,
        neurons=512,
        dtype=torch.float64,
        gated=True,
        neuron_major_down=True,
        threads=1,
    )

    @pytest.mark.parametrize("tokens", [1, 5, 300])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("neuron_major", [True, False])
    def test_row_limit_is_a_share_and_cached(self, tokens, dtype, neuron_major):
        site = replace(self.SITE, tokens=tokens, dtype=dtype, neuron_major_down=neuron_major)
        limit = cpu_choice.row_limit(site)
        assert 0 <= limit <= 0.25
        assert cpu_choice.row_limit(site) == limit
        assert isinstance(cpu_choice.block_pays(site), bool)

    def test_a_slow_row_path_gets_no_share(self, monkeypatch):
        monkeypatch.setattr(
            cpu_choice, "_seconds", lambda layers, finish, a: 2.0 if "row" in finish.__name__ else 1.0
        )
        site = CpuSite(
            tokens=7, hidden=8, neurons=8, dtype=torch.float64, gated=False, neuron_major_down=True, threads=1
        )
        assert cpu_choice._row_limit.__wrapped__(site) == 0.0

    def test_the_limit_lies_where_row_and_dense_meet(self, monkeypatch):
        def seconds(layers, finish, activated):
            density = (activated != 0).float().mean().item()
            return 1.0 if "dense" in finish.__name__ else 0.1 + 4.0 * density

        monkeypatch.setattr(cpu_choice, "_seconds", seconds)
        assert cpu_choice._row_limit.__wrapped__(self.SITE) == pytest.approx(0.2, abs=0.02)  # 0.9 = 0.1 + 4 d


def test_measuring_the_machine_leaves_the_random_state_alone():
    cpu_choice._row_limit.cache_clear()
    cpu_choice._block_pays.cache_clear()
    cpu_multiply._fastest.cache_clear()
    before = torch.get_rng_state()
    cpu_choice.row_limit(TestMeasuredLimits.SITE)
    cpu_choice.block_pays(TestMeasuredLimits.SITE)
    ffn(*make_ffn(4, 32, 96, 9).operands(), plan=cpu_plan("row"))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_default_device_and_dtype_do_not_matter(tokens, dtype):
    """Also in a fresh process: tensors made at import and by the probes must not follow the defaults."""
    block = make_ffn(tokens, 32, 96, 9, dtype=dtype)
    x, up, down, gate = block.operands()
    operands = (x, up, down.mT.contiguous().mT, gate)
    plain = [ffn_with_stats(*operands, plan=cpu_plan(path)) for path in PATHS]
    cpu_choice._row_limit.cache_clear()
    cpu_multiply._fastest.cache_clear()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            again = [ffn_with_stats(*operands, plan=cpu_plan(path)) for path in PATHS]
            site = replace(TestMeasuredLimits.SITE, tokens=tokens, dtype=dtype)
            assert 0 <= cpu_choice.row_limit(site) <= 0.25
            same = make_ffn(tokens, 32, 96, 9, dtype=dtype, device="cpu")
    finally:
        torch.set_default_dtype(before)
    for one, other in zip(block.operands(), same.operands(), strict=True):
        assert torch.equal(one, other)
    for (y, stats), (y_again, stats_again) in zip(plain, again, strict=True):
        torch.testing.assert_close(y_again, y, rtol=1e-2, atol=1e-3)
        assert torch.equal(stats_again.firing, stats.firing)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 3, 8])
def test_16_bit_sums_round_once(dtype, tokens):
    """Large terms that cancel: partial sums kept in 16 bits would lose what is left."""
    down = torch.zeros(8, 64)
    down[:, 0], down[:, 1], down[:, 8] = 1000.0, 1.25, -1000.0
    operands = (torch.ones(tokens, 64), torch.eye(64), down.mT.contiguous().mT)
    operands = tuple(t.to(dtype) for t in operands)
    for plan in (Plan(path="dense"), *(cpu_plan(path) for path in PATHS)):
        with torch.no_grad():
            y = ffn(*operands, plan=plan)
        assert y.shape == (tokens, 8)
        assert (y == 1.25).all()


class TestNonFinite:
    """A NaN or Inf that meets an active neuron reaches the output."""

    @pytest.mark.parametrize("path", PATHS)
    @pytest.mark.parametrize("tokens", [1, 20])
    def test_nan_input_row(self, path, tokens):
        x, up, down, gate = make_ffn(tokens, 32, 96, 9).operands()
        clean = ffn(x, up, down, gate, plan=cpu_plan(path))
        x[0, 3] = float("nan")
        y = ffn(x, up, down, gate, plan=cpu_plan(path, block_rows=1))
        assert y[0].isnan().all()
        assert torch.allclose(y[1:], clean[1:], rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("path", PATHS)
    @pytest.mark.parametrize("operand", ["up", "down"])
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    @pytest.mark.parametrize("tokens", [1, 20])
    def test_weight_of_an_active_neuron(self, path, operand, value, tokens):
        x, up, down, gate = make_ffn(tokens, 32, 96, 9).operands()
        gate[7, 0] = 100.0  # neuron 7 fires for every token
        (up if operand == "up" else down.mT)[7, 5] = value
        y = ffn(x, up, down, gate, plan=cpu_plan(path))
        bad = ~y.isfinite()
        assert (bad.all(dim=1) if operand == "up" else bad[:, 5]).all()

    @pytest.mark.parametrize("activation", ["relu", "relu2", "fatrelu(0.5)"])
    def test_nan_gate_counts_as_active(self, activation):
        x, up, down, gate = make_ffn(4, 32, 96, 0).operands()
        gate[11] = float("nan")
        _, stats = ffn_with_stats(x, up, down, gate, activation=activation, plan=cpu_plan("row"))
        assert stats.firing[11].item() == 4
        assert stats.firing.sum().item() == 4

    def test_weights_of_dead_neurons_are_not_touched(self):
        x, up, down, gate = make_ffn(20, 32, 96, 9).operands()
        gate[7, 0] = -1000.0
        up[7], down[:, 7] = float("nan"), float("inf")
        assert ffn(x, up, down, gate, plan=cpu_plan("row")).isfinite().all()
        assert ffn(x, up, down, gate, plan=cpu_plan("block")).isfinite().all()
