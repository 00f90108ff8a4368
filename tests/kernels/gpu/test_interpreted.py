"""The portable kernels on small shapes that cross every tile border, in Triton's interpreter."""

from __future__ import annotations

import threading

import pytest
import torch

from twell import Activation, Plan, ffn, ffn_with_stats, recorded_paths, reference
from twell.backends import get_backend
from twell.kernels.gpu.dense import fused_hidden
from twell.layer_state import Reading
from twell.problem import Decision, FfnArgs
from twell.synthetic import make_ffn

from ...accuracy import assert_accurate, every_activation, stock_dense

HIDDEN, NEURONS = 40, 104  # neither is a multiple of a tile


def block(tokens, nnz=20, dtype=torch.float16, gated=True, bias=False, seed=0):
    x, up, down, gate = make_ffn(tokens, HIDDEN, NEURONS, nnz, gated=gated, dtype=dtype, seed=seed).operands()
    biases = {}
    if bias:
        generator = torch.Generator().manual_seed(seed)
        sizes = {"up_bias": NEURONS, "down_bias": HIDDEN} | ({"gate_bias": NEURONS} if gated else {})
        biases = {name: torch.randn(n, generator=generator).to(dtype) for name, n in sizes.items()}
    return (x, up, down, gate), biases


def check(tensors, biases, activation, plan):
    y = ffn(*tensors, activation=activation, plan=plan, **biases)
    exact = reference.ffn(*tensors, activation=activation, dtype=torch.float64, **biases)
    assert_accurate(y, exact.y, stock_dense(*tensors, activation=activation, **biases))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("tokens", [1, 7, 16, 33])
@pytest.mark.parametrize("rows", [0, 16], ids=["decode", "block"])
def test_matches_the_oracle(interpreted, dtype, gated, tokens, rows):
    tensors, biases = block(tokens, dtype=dtype, gated=gated)
    check(tensors, biases, "relu", Plan(path="block", block_rows=rows, backend=interpreted))


@every_activation()
@pytest.mark.parametrize("rows", [0, 16], ids=["decode", "block"])
def test_activations_and_biases(interpreted, activation, gated, rows):
    # float32: in 16 bits a pre-activation next to the threshold may fall on either side of it
    tensors, biases = block(21, dtype=torch.float32, gated=gated, bias=True)
    check(tensors, biases, activation, Plan(path="block", block_rows=rows, backend=interpreted))


@pytest.mark.parametrize("nnz", [0, 1, NEURONS])
@pytest.mark.parametrize("rows", [0, 16], ids=["decode", "block"])
@pytest.mark.parametrize("tokens", [1, 20])
def test_from_none_to_all_active(interpreted, nnz, rows, tokens):
    tensors, biases = block(tokens, nnz=nnz)
    check(tensors, biases, "relu", Plan(path="block", block_rows=rows, backend=interpreted))


@pytest.mark.parametrize("rows", [0, 16], ids=["decode", "block"])
def test_a_nan_gate_reaches_the_output(interpreted, rows):
    (x, up, down, gate), _ = block(20)
    x = x.clone()
    x[3, 5] = float("nan")
    y = ffn(x, up, down, gate, plan=Plan(path="block", block_rows=rows, backend=interpreted))
    assert torch.isnan(y[3]).all()
    assert not torch.isnan(y[:3]).any()


@pytest.mark.parametrize("rows", [0, 16], ids=["decode", "block"])
@pytest.mark.parametrize("activation", ["relu", "drelu"])
def test_an_inactive_token_keeps_its_zero_beside_an_infinite_up(interpreted, rows, activation):
    """Token 1 activates neuron 0, token 0 does not; token 0's up value overflows: 0 x inf must stay 0."""
    up, gate, x = torch.zeros(8, 8), torch.zeros(8, 8), torch.zeros(2, 8)
    x[:, 0] = torch.tensor([-1.0, 1.0])
    gate[0, 0] = 1.0
    x[0, 1] = up[0, 1] = 3e38  # their product is infinite in float32
    down = torch.ones(8, 8)
    plan = Plan(path="block", block_rows=rows, backend=interpreted)
    y = ffn(x, up, down, gate, activation=activation, plan=plan)
    assert torch.equal(y[0], torch.zeros(8))


@pytest.mark.parametrize("path", ["decode", "block", "row"])
def test_drelu_clamps_up_and_keeps_its_nan(interpreted, path):
    """Gate and up of one neuron, token by token: what is inactive or clamped is exactly 0, a NaN stays."""
    x, gate, up = (torch.zeros(rows, 16, dtype=torch.float16) for rows in (5, 8, 8))
    x[:, 0], x[:, 1] = torch.tensor([2, 2, 2, -2, -2]), torch.tensor([3, -3, 0, 3, -3])
    gate[3, 0] = up[3, 1] = 1.0
    rows = 16 if path == "block" else 0
    plan = Plan(path="row" if path == "row" else "block", block_rows=rows, backend=interpreted)
    up_bias, down = torch.zeros(8).half(), torch.ones(8, 8).half()
    y = ffn(x, up, down, gate, activation="drelu", up_bias=up_bias, plan=plan)
    assert y[:, 0].tolist() == [6.0, 0.0, 0.0, 0.0, 0.0]
    up_bias[3] = float("nan")
    y = ffn(x, up, down, gate, activation="drelu", up_bias=up_bias, plan=plan)
    assert y.isnan().all(1).tolist() == [True, True, True, False, False]
    assert not y[3:].any()


def test_strided_operands(interpreted):
    (x, up, down, gate), _ = block(20)
    wide = torch.randn(20, 2 * HIDDEN).half()
    wide[:, ::2] = x
    strided = wide[:, ::2]
    plan = Plan(path="block", block_rows=16, backend=interpreted)
    assert torch.equal(ffn(strided, up, down, gate, plan=plan), ffn(x, up, down, gate, plan=plan))
    rows = down.mT.contiguous().mT  # neuron-major
    assert torch.equal(ffn(x, up, rows, gate, plan=plan), ffn(x, up, down, gate, plan=plan))


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_statistics(interpreted, gated):
    tensors, biases = block(37, gated=gated, bias=True, dtype=torch.float32)
    _, stats = ffn_with_stats(*tensors, plan=Plan(path="block", block_rows=16, backend=interpreted), **biases)
    exact = reference.ffn(*tensors, dtype=torch.float64, **biases)
    assert torch.equal(stats.firing, exact.firing)
    assert stats.l1.item() == pytest.approx(exact.l1.item(), rel=1e-5)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_l1_of_many_blocks(interpreted, gated):
    """The first of 8 blocks is so large that float32 would lose each of the others, one by one."""
    x, values, ones = torch.zeros(128, 8), torch.zeros(8, 8), torch.zeros(8, 8)
    x[:16, 0], x[16:, 0], x[:, 1] = 1.0, 2.0**-24, 1.0
    values[:, 0] = ones[:, 1] = 1.0
    tensors = (x, ones, torch.eye(8), values) if gated else (x, values, torch.eye(8))
    _, stats = ffn_with_stats(*tensors, plan=Plan(path="block", block_rows=16, backend=interpreted))
    exact = reference.ffn(*tensors, dtype=torch.float64).l1.item()
    assert abs(stats.l1.item() - exact) <= torch.finfo(torch.float32).eps / 2 * exact


def test_slabs_of_tokens_give_the_same(interpreted, monkeypatch):
    tensors, _ = block(70)
    plan = Plan(path="block", block_rows=16, backend=interpreted)
    whole = ffn(*tensors, plan=plan)
    monkeypatch.setattr("twell.kernels.gpu.block.WORKSPACE_BYTES", 2 * 2 * NEURONS * 16 * 2)
    assert torch.equal(ffn(*tensors, plan=plan), whole)


def test_registered_op(interpreted):
    tensors, _ = block(9, dtype=torch.float32)
    op = torch.ops.twell.ffn.default
    args = (*tensors, None, None, None, "relu", "block", 16, interpreted, True)
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


def test_output_size_may_differ(interpreted):
    (x, up, _, gate), _ = block(20)
    down = torch.randn(24, NEURONS).half()
    for rows in (0, 16):
        check((x, up, down, gate), {}, "relu", Plan(path="block", block_rows=rows, backend=interpreted))


def test_statistics_ignore_what_padding_makes_of_an_infinite_weight(interpreted):
    """20 tokens in blocks of 16: the 12 zeros past the end times -inf are NaN, and no token's."""
    (x, up, down, gate), _ = block(20, dtype=torch.float32)
    x, gate = x.clone(), gate.clone()
    x[:, 0], gate[3, 0] = 8.0, float("-inf")
    y, stats = ffn_with_stats(x, up, down, gate, plan=Plan(path="block", block_rows=16, backend=interpreted))
    expected, dense = ffn_with_stats(x, up, down, gate, plan=Plan(path="dense"))
    assert torch.equal(stats.firing, dense.firing)
    assert stats.l1.item() == pytest.approx(dense.l1.item(), rel=1e-5)
    assert torch.allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_one_token_with_a_strange_stride(interpreted):
    (x, up, down, gate), _ = block(1)
    strange = torch.zeros(1, HIDDEN + 1).half()[:, :HIDDEN].copy_(x)
    assert strange.stride() == (HIDDEN + 1, 1)
    plan = Plan(path="block", block_rows=16, backend=interpreted)
    assert torch.equal(ffn(strange, up, down, gate, plan=plan), ffn(x, up, down, gate, plan=plan))


@pytest.mark.parametrize("rows", [1, 48, 256])
def test_block_rows_that_no_kernel_takes(interpreted, rows):
    tensors, _ = block(4)
    with pytest.raises(ValueError, match=f"block_rows: got {rows}; accepted: one of"):
        ffn(*tensors, plan=Plan(path="block", block_rows=rows, backend=interpreted))


@pytest.mark.parametrize("limit", [NEURONS * HIDDEN, NEURONS * 128])
def test_what_32_bits_cannot_index_runs_dense_and_says_so(interpreted, limit, monkeypatch, caplog):
    """The weights, or the rows of a block: whichever is larger decides."""
    from twell.kernels.gpu import sizes

    monkeypatch.setattr("twell._log._logged", set())
    tensors, _ = block(5)
    plan = Plan(path="block", backend=interpreted)
    for allowed, path in ((limit, "dense"), (NEURONS * 128 + 1, "decode")):
        monkeypatch.setattr(sizes, "_INDEX_LIMIT", allowed)
        with recorded_paths() as ran:
            ffn(*tensors, plan=plan)
        assert [piece.path for piece in ran] == [path]
    assert "32-bit" in caplog.text


def test_an_automatic_plan_runs_dense_where_nothing_was_measured(interpreted):
    """Without asking a CUDA device, which may not be there."""
    tensors, _ = block(5)
    for _ in range(2):
        with recorded_paths() as ran:
            ffn(*tensors, plan=Plan(backend=interpreted))
        assert [piece.path for piece in ran] == ["dense"]


@pytest.mark.parametrize("tokens", [1, 20, 64, 65, 200])
@pytest.mark.parametrize("activation", ["relu", "fatrelu(0.25)"])
def test_a_dense_call_counts_what_its_own_gate_activates(interpreted, tokens, activation):
    (x, up, down, gate), _ = block(tokens, dtype=torch.float32)
    x[-1] = float("nan")  # counts as active
    reading = Reading()
    args = FfnArgs(x, up, down, gate, None, None, None, Activation.parse(activation))
    decision = Decision("dense", 0, interpreted, "", reading=reading, read=True)
    y = get_backend(interpreted).forward(args, decision, False).y
    assert torch.equal(y.nan_to_num(), stock_dense(x, up, down, gate, activation=activation).nan_to_num())
    threshold = args.activation.threshold
    parts = (~(x @ gate.mT <= threshold)).split(64 if tokens <= 64 else 128)
    union = sum(part.any(0).sum().item() for part in parts)
    assert reading.share == union / (len(parts) * NEURONS)


def test_numbers_of_kinds_are_given_once():
    from twell.kernels.gpu.launch import kind_number

    class Slow:  # gives way to other threads while it is hashed
        def __init__(self, number):
            self.number = number

        def __hash__(self):
            return hash(str(self.number))

        def __eq__(self, other):
            return self.number == other.number

    found = {}

    def number(first):
        for which in range(first, 2000, 8):
            found[which] = kind_number((Slow(which),))

    threads = [threading.Thread(target=number, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found.values())) == len(found) == 2000
    assert kind_number((Slow(5),)) in (found[5], max(found.values()) + 1)  # another one if it was forgotten


@pytest.mark.parametrize("size", [0, 1, 4096, 9000])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("spec", ["relu", "relu2", "fatrelu(0.3)", "drelu"])
def test_fused_hidden_values_are_those_of_pytorch(spec, gated, size):
    if spec == "drelu" and not gated:
        pytest.skip("it has a gate")
    activation = Activation.parse(spec)
    fused = fused_hidden(activation, torch.float16, gated)
    if fused is None:
        assert (gated, spec == "relu2") == (False, False)  # where PyTorch takes one operation as well
        return
    pre, up = torch.randn(2, size, generator=torch.Generator().manual_seed(size)).half()
    if size > 3:
        pre[:3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
        up[2:5] = float("inf")
    expected = activation(pre) * activation.factor(up) if gated else activation(pre)
    found = fused(pre, up if gated else None)
    assert found is pre
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
