"""The CPU backend's paths against the oracle, over shapes, densities, dtypes, layouts and variants."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from twell import Plan, ffn, ffn_with_stats, policy, recorded_paths, reference
from twell.activations import Activation
from twell.kernels import dense
from twell.kernels.cpu import forward, gemm
from twell.kernels.cpu.gemm import reads_badly
from twell.kernels.cpu.weights import WeightViews, site_of
from twell.problem import FfnArgs
from twell.synthetic import make_ffn

from ...accuracy import assert_accurate, every_activation, stock_dense

PATHS = ["auto", "row", "block", "dense"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# 16-bit products take other ways on CPUs with units for them.
DTYPES_AND_UNITS = [(dtype, False) for dtype in DTYPES] + [(dtype, True) for dtype in DTYPES[2:]]
on_every_cpu = pytest.mark.parametrize(
    ("dtype", "native"),
    DTYPES_AND_UNITS,
    ids=lambda v: str(v) if isinstance(v, torch.dtype) else f"units={v}",
)


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
@on_every_cpu
@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 129])
@pytest.mark.parametrize("nnz", [0, 1.5, 12, 160])
def test_matches_oracle(path, dtype, native, tokens, nnz, cpu_choices):
    cpu_choices.native = native
    check(make_ffn(tokens, 48, 160, nnz, dtype=dtype, seed=tokens).operands(), cpu_plan(path))


@pytest.mark.parametrize("path", PATHS)
@every_activation()
@pytest.mark.parametrize("tokens", [1, 33])
def test_variants(path, gated, activation, tokens):
    block = make_ffn(tokens, 40, 136, 20, gated=gated, seed=3)
    biases = {"up_bias": torch.randn(136) / 8, "down_bias": torch.randn(40)}
    if gated:
        biases["gate_bias"] = torch.randn(136) / 8
    check(block.operands(), cpu_plan(path), activation=activation, **biases)


@pytest.mark.parametrize("path", PATHS)
@on_every_cpu
@pytest.mark.parametrize("tokens", [1, 3, 20, 300])
def test_neuron_major_down(path, dtype, native, tokens, cpu_choices):
    cpu_choices.native = native
    x, up, down, gate = make_ffn(tokens, 32, 96, 9, dtype=dtype, seed=5).operands()
    check((x, up, down.mT.contiguous().mT, gate), cpu_plan(path))


@pytest.mark.parametrize("path", PATHS)
@on_every_cpu
@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_neuron_major_down_with_a_bias(path, dtype, native, tokens, cpu_choices):
    cpu_choices.native = native
    x, up, down, gate = make_ffn(tokens, 32, 96, 9, dtype=dtype, seed=5).operands()
    bias = torch.linspace(-1, 1, 32, dtype=torch.float64).to(dtype)
    check((x, up, down.mT.contiguous().mT, gate), cpu_plan(path), down_bias=bias)


@pytest.mark.parametrize("path", PATHS)
def test_several_chunks_with_a_ragged_end(path, monkeypatch):
    monkeypatch.setattr(forward, "CHUNK_TOKENS", range(32, 33))
    check(make_ffn(101, 32, 96, 9, seed=6).operands(), cpu_plan(path, block_rows=16))


def test_an_l1_beyond_the_largest_number_is_infinite():
    x = torch.ones(3, 1, dtype=torch.float64)
    up, down = (torch.full((1, 1), value, dtype=torch.float64) for value in (1e308, 1e-308))
    y, stats = ffn_with_stats(x, up, down, plan=cpu_plan("block", block_rows=1))
    assert stats.l1.item() == float("inf")
    torch.testing.assert_close(y, x)


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


@pytest.mark.parametrize("path", [*PATHS, "stock"])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 8, 40])
@pytest.mark.parametrize("place", ["gate_bias", "up_bias", "down_bias"])
@pytest.mark.parametrize("neuron_major", [True, False])
def test_a_bias_that_cancels_is_added_before_rounding(
    path, native, dtype, tokens, place, neuron_major, cpu_choices
):
    """Sums of about 17 with a bias of -17.5: what is left has few bits once the sum is rounded by itself."""
    cpu_choices.native = native
    torch.manual_seed(0)
    x, up, gate = torch.randn(tokens, 64), torch.randn(96, 64) / 8, torch.randn(96, 64) / 8
    down = torch.randn(64, 96) / 8
    biases = {"gate_bias": torch.zeros(96), "up_bias": torch.zeros(96), "down_bias": torch.zeros(64)}
    x[:, 0] = 16.0
    if place == "down_bias":
        # Neuron 0 gives 16 * 1 for every token, and down makes 17.5 and a little of it.
        gate[0], up[0] = 0.0, 0.0
        gate[0, 0], up[0, 0] = 1 / 16, 1.0
        down[:, 0] = 17.0 / 16
    else:
        (gate if place == "gate_bias" else up)[:, 0] = 17.0 / 16
    biases[place] -= 17.0
    if neuron_major:
        down = down.mT.contiguous().mT
    operands = tuple(t.to(dtype) for t in (x, up, down, gate))
    biases = {name: bias.to(dtype) for name, bias in biases.items()}
    plan = Plan(path="dense", backend="dense") if path == "stock" else cpu_plan(path)
    with torch.no_grad():
        y = ffn(*operands, plan=plan, **biases)
    exact = reference.ffn(*operands, dtype=torch.float64, **biases).y
    assert_accurate(y, exact, stock_dense(*operands, **biases))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tokens", [1, 8])
def test_many_active_neurons_round_as_stock(path, tokens, cpu_choices):
    """Rows added one after the other would err 7 times as much: 1,000 of 16,384 active."""
    cpu_choices.row_limit = 1.0
    x, up, down, gate = make_ffn(tokens, 256, 16384, 1000, sigma=0.5, seed=11).operands()
    check((x, up, down.mT.contiguous().mT, gate), cpu_plan(path))


@pytest.mark.parametrize("tokens", [1, 3, 40, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_the_other_form_of_products(tokens, bias, cpu_choices, monkeypatch):
    """The form that the CPU at hand may not like is right, too."""
    monkeypatch.setattr(gemm, "_SMALL", 0)
    monkeypatch.setattr(policy.cpu, "_WORTH_LOOKING_SECONDS", 0.0)
    monkeypatch.setattr(policy.cpu, "_MANY_WORTH_LOOKING_SECONDS", 0.0)
    cpu_choices.form_gain, cpu_choices.row_limit, cpu_choices.block_gain = 2.0, 0.0, 0.0
    operands = make_ffn(tokens, 48, 160, 80, seed=12).operands()
    biases = {"up_bias": torch.randn(160), "gate_bias": torch.randn(160) / 4} if bias else {}
    if bias:
        biases["down_bias"] = torch.randn(48)
    x, up, down, gate = operands
    exact = reference.ffn(*operands, dtype=torch.float64, **biases).y
    taken = []
    for name in ("_weight_first", "_onednn"):
        form = getattr(gemm, name)
        monkeypatch.setattr(gemm, name, lambda *a, form=form: taken.append(form) or form(*a))
    gemm._trial.cache_clear()
    for plan, layout, shape in product(
        (cpu_plan("auto"), None), (down, down.mT.contiguous().mT), ((tokens,), (1, tokens))
    ):
        for _ in range(2):  # the second may be granted by the first
            del taken[:]
            with torch.no_grad(), recorded_paths() as ran:
                y = ffn(x.view(*shape, 48), up, layout, gate, plan=plan, **biases)
            assert [piece.path for piece in ran] == ["dense"]
            assert len(taken) == 3
            # A few roundings of float32 per product of three: whatever order a library sums in.
            error = reference.relative_error(y.view(tokens, 48), exact)
            assert error < 16 * torch.finfo(torch.float32).eps
    gemm._trial.cache_clear()


class OnlyLinear(torch.Tensor):
    """A weight that knows how to be multiplied in one way, as quantised ones do."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        if function is not torch.nn.functional.linear and "__get__" not in str(function):
            raise NotImplementedError(f"{function}")
        with torch._C.DisableTorchFunctionSubclass():
            return function(*arguments, **options or {})


@pytest.mark.parametrize("tokens", [1, 8])
def test_weights_of_another_kind_are_multiplied_their_way(tokens, cpu_choices, monkeypatch):
    monkeypatch.setattr(gemm, "_SMALL", 0)
    cpu_choices.form_gain = 2.0
    x, up, down, gate = make_ffn(tokens, 48, 160, 80, seed=12).operands()
    with torch.no_grad():
        wanted = stock_dense(x, up, down, gate)
        for _ in range(2):
            found = ffn(x, *(weight.as_subclass(OnlyLinear) for weight in (up, down, gate)))
            assert torch.equal(found, wanted)


@pytest.fixture
def dense_forms(cpu_choices, monkeypatch):
    """The other form is the faster one for weights of any size; the list says where dense blocks took it."""
    monkeypatch.setattr(gemm, "_SMALL", 0)
    cpu_choices.form_gain = 2.0
    taken: list[int] = []

    def watched(tokens, weight):
        form = gemm.form_for(tokens, weight)

        def run(x, weight):
            taken.append(x.shape[0])
            return form(x, weight)

        return None if form is None else run

    monkeypatch.setattr(dense, "form_for", watched)
    return taken


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (3,), (64,), (2, 3), (1, 2, 3), (65,)], ids=str)
def test_the_other_form_of_dense_blocks(shape, bias, gated, dense_forms):
    """A small block that an automatic plan leaves dense, asked for and then granted ahead."""
    tokens = torch.Size(shape).numel()
    x, *weights = make_ffn(tokens, 48, 160, 80, gated=gated, seed=12).operands()
    x = x.view(*shape, 48)
    biases = {"up_bias": torch.randn(160), "down_bias": torch.randn(48)} if bias else {}
    exact = reference.ffn(x, *weights, dtype=torch.float64, **biases).y
    with torch.no_grad():
        for y in (ffn(x, *weights, **biases), ffn(x, *weights, **biases)):
            assert y.shape == x.shape
            assert reference.relative_error(y, exact) < 16 * torch.finfo(torch.float32).eps
    products = 3 if gated else 2
    if tokens != 1:  # one token has another form only where torch has oneDNN
        assert dense_forms == ([tokens] * 2 * products if tokens <= 64 else [])


def test_named_dense_blocks_multiply_as_torch_does(dense_forms):
    operands = make_ffn(3, 48, 160, 80).operands()
    with torch.no_grad():
        for _ in range(2):
            ffn(*operands, plan=Plan(path="dense"))
    assert dense_forms == []


@pytest.mark.parametrize(
    ("dtype", "native", "tokens", "upcast"),
    [
        (torch.bfloat16, False, 16, True),
        (torch.float16, False, 300, True),
        (torch.bfloat16, False, 15, False),
        (torch.bfloat16, True, 300, False),
        (torch.float32, False, 300, False),
        (torch.float64, False, 300, False),
    ],
    ids=str,
)
def test_what_is_multiplied_in_float32(dtype, native, tokens, upcast, cpu_choices):
    cpu_choices.native = native
    x, up, down, gate = make_ffn(tokens, 16, 32, 4, dtype=dtype).operands()
    weights = WeightViews(FfnArgs(x, up, down, gate, None, None, None, Activation()), tuned=False)
    assert weights.site.upcast == upcast
    assert weights.site.projection_dtype == (torch.float32 if upcast else dtype)
    assert weights.activate_selector(x).dtype == weights.site.projection_dtype
    assert weights.project_down(weights.project_up(x)).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("native", [True, False])
def test_which_weights_no_product_reads_well(dtype, native, cpu_choices):
    cpu_choices.native = native
    down = torch.empty(8, 16, dtype=dtype)
    assert not reads_badly(down)
    assert reads_badly(torch.empty(16, 8, dtype=dtype).mT) == (dtype in DTYPES[2:] and not native)
    assert not reads_badly(torch.empty(16, 8, dtype=dtype, device="meta").mT)


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("tokens", [1, 7])
def test_dense_sums_of_all_rows(tokens, record, cpu_choices):
    """16-bit, few tokens, `down` neuron by neuron, no units: the down projection is an embedding bag."""
    x, up, down, gate = make_ffn(tokens, 48, 160, 80, dtype=torch.bfloat16, seed=13).operands()
    operands = (x, up, down.mT.contiguous().mT, gate)
    for plan in (cpu_plan("dense"), Plan(path="dense")):
        with torch.no_grad():
            y = ffn_with_stats(*operands, plan=plan)[0] if record else ffn(*operands, plan=plan)
        assert_accurate(y, reference.ffn(*operands, dtype=torch.float64).y, stock_dense(*operands))


class TestAutoChoosesByDensity:
    """`auto` takes each path where it should."""

    @pytest.fixture(autouse=True)
    def small_blocks_count(self, monkeypatch):
        # These blocks are far too small to pay; the choice by density is what is looked at.
        monkeypatch.setattr(policy.cpu, "_WORTH_LOOKING_SECONDS", 0.0)
        monkeypatch.setattr(policy.cpu, "_MANY_WORTH_LOOKING_SECONDS", 0.0)

    @staticmethod
    def paths_of(operands) -> list[str]:
        with recorded_paths() as ran:
            check(operands, cpu_plan("auto"))
        return [piece.path for piece in ran]

    @pytest.mark.parametrize(("nnz", "expected"), [(4, "row"), (400, "dense")])
    @pytest.mark.parametrize("tokens", [1, 9, 128])
    def test_few_or_all_active(self, nnz, expected, tokens):
        assert self.paths_of(make_ffn(tokens, 32, 400, nnz).operands()) == [expected]

    @pytest.mark.parametrize(("limit", "expected"), [(0.0, "dense"), (0.04, "dense"), (0.06, "row")])
    @pytest.mark.parametrize("tokens", [1, 128])
    def test_the_measured_limit_decides(self, limit, expected, tokens, cpu_choices):
        cpu_choices.row_limit, cpu_choices.block_gain = limit, 0.0
        # The same 20 of 400 neurons for every token: 5%.
        operands = make_ffn(tokens, 32, 400, 20, sigma=0.0, dead=0.95, max_rate=1.0).operands()
        assert self.paths_of(operands) == [expected]

    @pytest.mark.parametrize(("gain", "expected"), [(2.0, "block"), (1.05, "dense"), (0.5, "dense")])
    def test_tokens_that_share_many_neurons(self, gain, expected, cpu_choices):
        cpu_choices.block_gain = gain
        operands = make_ffn(128, 32, 400, 100, sigma=0.0, dead=0.75, max_rate=1.0).operands()
        assert self.paths_of(operands) == [expected]

    def test_tokens_that_share_few(self):
        assert self.paths_of(make_ffn(128, 32, 400, 80, sigma=0.0, dead=0.0).operands()) == ["dense"]

    @pytest.mark.parametrize("tokens", [1, 128])
    def test_work_too_small_to_pay(self, tokens, monkeypatch):
        monkeypatch.setattr(policy.cpu, "_WORTH_LOOKING_SECONDS", 1.0)
        monkeypatch.setattr(policy.cpu, "_MANY_WORTH_LOOKING_SECONDS", 1.0)
        assert self.paths_of(make_ffn(tokens, 32, 400, 4).operands()) == ["dense"]

    def test_once_dense_the_rest_is_not_looked_at(self, monkeypatch):
        monkeypatch.setattr(forward, "CHUNK_TOKENS", range(32, 33))
        x, up, down, gate = make_ffn(256, 32, 400, 4).operands()
        x[64:128, 0] *= -1  # the constant feature flips, so the second block of 64 fires nearly all
        assert self.paths_of((x, up, down, gate)) == ["row", "dense", "dense"]

    def test_what_stays_dense_keeps_its_reason(self, monkeypatch):
        """Shown to whoever asks why a block ran dense: of the chunk that was looked at, not "automatic"."""
        monkeypatch.setattr(forward, "CHUNK_TOKENS", range(32, 33))
        operands = make_ffn(256, 32, 400, 300).operands()
        with recorded_paths() as ran:
            check(operands, cpu_plan("auto"))
        first, *others = (piece.reason for piece in ran)
        assert "active" in first
        assert others == [first]

    def test_every_block_may_use_a_quarter_of_the_neurons(self):
        active = torch.zeros(128, 400, dtype=torch.bool)
        active[:64, :100] = active[64:, 300:] = True
        x, up, down, gate = make_ffn(128, 32, 400, 100).operands()
        site = site_of(FfnArgs(x, up, down, gate, None, None, None, Activation()))

        def pays(block_rows):
            return policy.cpu.MeasuredChunks(site).still_pays("block", active, int(active.sum()), block_rows)

        assert pays(64)
        assert not pays(128)
        active[5, 100] = True
        assert not pays(64)

    @pytest.mark.parametrize("block_gain", [2.0, 0.0])
    def test_a_sample_that_misleads(self, block_gain, cpu_choices):
        """The tokens that are looked at first are sparse, all others fire: found out by the whole."""
        cpu_choices.block_gain = block_gain
        x, up, down, gate = make_ffn(128, 32, 400, 4).operands()
        looked_at = torch.zeros(128, dtype=torch.bool)
        looked_at[::16] = True
        x[~looked_at, 0] *= -1
        assert self.paths_of((x, up, down, gate)) == ["dense"]


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_default_device_and_dtype_do_not_matter(tokens, dtype):
    """Also in a fresh process: tensors made at import must not follow the defaults."""
    block = make_ffn(tokens, 32, 96, 9, dtype=dtype)
    x, up, down, gate = block.operands()
    operands = (x, up, down.mT.contiguous().mT, gate)
    plain = [ffn_with_stats(*operands, plan=cpu_plan(path)) for path in PATHS]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            again = [ffn_with_stats(*operands, plan=cpu_plan(path)) for path in PATHS]
            same = make_ffn(tokens, 32, 96, 9, dtype=dtype, device="cpu")
    finally:
        torch.set_default_dtype(before)
    for one, other in zip(block.operands(), same.operands(), strict=True):
        assert torch.equal(one, other)
    for (y, stats), (y_again, stats_again) in zip(plain, again, strict=True):
        assert torch.equal(y_again, y)
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
    @pytest.mark.parametrize("activation", ["relu", "drelu"])
    def test_weight_of_an_active_neuron(self, path, operand, value, tokens, activation):
        x, up, down, gate = make_ffn(tokens, 32, 96, 9).operands()
        gate[7, 0] = 100.0  # neuron 7 fires for every token
        (up if operand == "up" else down.mT)[7, 5] = value
        x[:, 5] = x[:, 5].abs()  # an infinite up is positive: drelu lets it pass
        y = ffn(x, up, down, gate, activation=activation, plan=cpu_plan(path))
        bad = ~y.isfinite()
        assert (bad.all(dim=1) if operand == "up" else bad[:, 5]).all()

    @pytest.mark.parametrize("activation", ["relu", "relu2", "fatrelu(0.5)", "drelu"])
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
