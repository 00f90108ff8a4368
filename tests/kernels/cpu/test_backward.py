"""The CPU's backward on the active set against autograd through the oracle, and when it is taken."""

from __future__ import annotations

import pytest
import torch

from twell import policy, reference
from twell.activations import Activation
from twell.kernels.cpu import backward as module
from twell.kernels.cpu import csr
from twell.kernels.cpu.backward import cpu_backward
from twell.kernels.cpu.weights import site_of
from twell.kernels.dense import dense_backward
from twell.layer_state import LayerState
from twell.problem import Decision, FfnArgs, Saved
from twell.synthetic import make_ffn

from ...accuracy import assert_accurate, every_activation, stock_dense

NAMES = FfnArgs._fields[:-1]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
L1 = 0.3
SAVED = Saved(torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int32))


@pytest.fixture(autouse=True)
def one_thread():
    """Where other programs run, the threads of such small operations mostly wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def taken(monkeypatch):
    """Blocks of any size and density take the active set; the list says how often that was."""
    taken: list[int] = []
    run = module._sparse_backward

    def recording(args, *rest):
        taken.append(args.x.shape[0])
        return run(args, *rest)

    monkeypatch.setattr(module, "_sparse_backward", recording)
    monkeypatch.setattr(policy.cpu, "_STOCK_TOKENS", 1)
    for name in ("_MIN_TOKENS", "_MIN_TOKENS_COPYING", "_MIN_HIDDEN"):
        monkeypatch.setattr(policy.cpu, name, 1)
    monkeypatch.setattr(policy.cpu, "_MAX_DENSITY", {torch.float32: 1.0, torch.float64: 1.0})
    monkeypatch.setattr(policy.cpu, "_WORTH_LOOKING_SECONDS", 0.0)
    monkeypatch.setattr(policy.cpu, "_MANY_WORTH_LOOKING_SECONDS", 0.0)
    return taken


def block(
    tokens=33, hidden=40, neurons=136, nnz=12.0, *, activation="relu", biases=False, **options
) -> FfnArgs:
    x, up, down, gate = make_ffn(tokens, hidden, neurons, nnz, **options).operands()
    up_bias = down_bias = gate_bias = None
    if biases:
        torch.manual_seed(tokens)
        up_bias, gate_bias = ((torch.randn(neurons) / 8).to(x.dtype) for _ in range(2))
        down_bias = torch.randn(hidden).to(x.dtype)
    return FfnArgs(
        x,
        up,
        down,
        gate,
        up_bias,
        down_bias,
        None if gate is None else gate_bias,
        Activation.parse(activation),
    )


def seed_of(args: FfnArgs) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(1)
    return torch.randn(args.x.shape[0], args.down.shape[0], generator=generator).to(args.x.dtype)


def l1_of(args: FfnArgs) -> torch.Tensor:
    return torch.tensor(L1, dtype=torch.promote_types(args.x.dtype, torch.float32))


def everything(args: FfnArgs) -> FfnArgs:
    return FfnArgs(*(tensor is not None for tensor in args[:-1]), args.activation)


def decided(args: FfnArgs, grad_y, grad_l1, needed) -> tuple:
    """The CPU's backward, sparse or dense as an automatic plan decides."""
    return cpu_backward(args, SAVED, policy.cpu.decide_backward(args, None), grad_y, grad_l1, needed)


def run(args: FfnArgs, backward=decided, grad_y=None) -> tuple:
    grad_y = seed_of(args) if grad_y is None else grad_y
    return backward(args, grad_y, l1_of(args), everything(args))


def autograd(args: FfnArgs, exact: bool) -> list:
    """Gradients of (y * grad_y).sum() + L1 * l1: through the oracle in float64, or stock PyTorch's."""
    dtype = torch.float64 if exact else args.x.dtype
    tensors = [None if t is None else t.detach().to(dtype).requires_grad_() for t in args[:-1]]
    options = dict(zip(NAMES, tensors, strict=True), activation=args.activation)
    if exact:
        result = reference.ffn(**options, dtype=torch.float64)
        y, l1 = result.y, result.l1
    else:
        y = stock_dense(**options)
        identity = torch.eye(args.up.shape[0], dtype=dtype)
        hidden = stock_dense(**options | {"down": identity, "down_bias": None})
        l1 = hidden.abs().sum() / args.x.shape[0]
    given = [t for t in tensors if t is not None]
    loss = (y * seed_of(args).to(dtype)).sum() + L1 * l1
    found = iter(torch.autograd.grad(loss, given))
    return [None if t is None else next(found) for t in tensors]


def check(args: FfnArgs) -> None:
    ours, exact, stock = run(args), autograd(args, exact=True), autograd(args, exact=False)
    for name, mine, true, theirs in zip(NAMES, ours, exact, stock, strict=True):
        assert (mine is None) == (true is None), name
        if mine is not None:
            assert_accurate(mine, true, theirs, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 64])
@pytest.mark.parametrize("nnz", [0, 1.5, 12, 136])
def test_matches_the_oracle(taken, dtype, tokens, nnz):
    check(block(tokens, nnz=nnz, dtype=dtype, seed=tokens))
    assert taken == [tokens]


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@every_activation()
@pytest.mark.parametrize("biases", [True, False])
def test_variants(taken, dtype, gated, activation, biases):
    check(block(gated=gated, activation=activation, biases=biases, dtype=dtype, seed=3))
    assert taken


@pytest.mark.parametrize("tokens", [31, 32, 101])
@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_several_chunks_and_pieces(taken, tokens, rows, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_TOKENS", 32)
    monkeypatch.setattr(csr, "PIECE_ROWS", rows)
    check(block(tokens, biases=True, seed=4))
    assert taken


@pytest.mark.parametrize(("tokens", "neurons"), [(5000, 64), (32, 8192)])
def test_long_sums_are_as_exact_as_stock(taken, tokens, neurons):
    check(block(tokens, 32, neurons, 0.5 * neurons, sigma=0.5, seed=5))
    assert taken


@pytest.mark.parametrize(("hidden", "neurons"), [(8, 8), (24, 500), (500, 24), (10, 9), (3, 1)])
def test_awkward_sizes(taken, hidden, neurons):
    check(block(13, hidden, neurons, neurons / 4, biases=True, seed=6))
    assert taken


def test_down_may_have_another_size(taken):
    args = block(biases=True)
    check(args._replace(down=args.down[:24].contiguous(), down_bias=args.down_bias[:24].contiguous()))
    assert taken


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_strides(taken, dtype):
    args = block(biases=True, dtype=dtype)

    def spread(tensor):  # every other element of a larger tensor, transposed
        wide = torch.full([2 * size for size in tensor.mT.shape], float("nan"), dtype=dtype)
        wide[::2, ::2] = tensor.mT
        return wide[::2, ::2].mT

    apart = args._replace(**{name: spread(getattr(args, name)) for name in ("x", "up", "down", "gate")})
    check(apart)
    for grad_y in (spread(seed_of(args)), torch.ones((), dtype=dtype).expand(33, 40)):
        for mine, theirs in zip(run(apart, grad_y=grad_y), run(args, grad_y=grad_y), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert taken


def test_the_gradient_of_down_lies_as_down_does(taken):
    args = block()
    assert run(args)[2].is_contiguous()
    neuron_major = args._replace(down=args.down.mT.contiguous().mT)
    assert run(neuron_major)[2].mT.is_contiguous()
    torch.testing.assert_close(run(args)[2], run(neuron_major)[2], rtol=0, atol=0)
    assert taken


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("wanted", [*NAMES, "all but x", "none"])
def test_only_what_is_needed(taken, gated, wanted):
    args = block(gated=gated, biases=True)
    names = {"all but x": NAMES[1:], "none": ()}.get(wanted, (wanted,))
    needed = FfnArgs(*(name in names for name in NAMES), args.activation)
    whole = run(args)
    some = decided(args, seed_of(args), l1_of(args), needed)
    for name, mine, every in zip(NAMES, some, whole, strict=True):
        assert (mine is None) == (name not in names or every is None), name
        if mine is not None:
            torch.testing.assert_close(mine, every, rtol=0, atol=0)
    assert taken


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("wanted", NAMES)
def test_dense_gradients_only_of_what_is_needed(gated, wanted):
    args = block(gated=gated, biases=True)
    needed = FfnArgs(*(name == wanted for name in NAMES), args.activation)
    whole = dense_backward(args, seed_of(args), l1_of(args), everything(args))
    some = dense_backward(args, seed_of(args), l1_of(args), needed)
    for name, mine, every in zip(NAMES, some, whole, strict=True):
        assert (mine is None) == (name != wanted or every is None), name
        if mine is not None:
            torch.testing.assert_close(mine, every, rtol=0, atol=0)


def test_without_l1(taken):
    args = block(dtype=torch.float64, biases=True)
    ours = decided(args, seed_of(args), None, everything(args))
    dense = dense_backward(args, seed_of(args), None, everything(args))
    for mine, theirs in zip(ours, dense, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert taken


def test_an_empty_batch(taken):
    args = block(biases=True)
    ours = run(args._replace(x=args.x[:0]))
    for mine, tensor in zip(ours[1:], args[1:-1], strict=True):
        torch.testing.assert_close(mine, torch.zeros_like(tensor))
    assert ours[0].shape == (0, 40)


class TestNonFinite:
    """NaN and Inf reach all they meet on the active set, and nothing that dense PyTorch keeps finite."""

    @staticmethod
    def compare(args, grad_y=None):
        ours, dense = run(args, grad_y=grad_y), run(args, dense_backward, grad_y)
        for mine, theirs in zip(ours, dense, strict=True):
            if mine is not None:
                assert (theirs.isfinite() <= mine.isfinite()).all()
        return [None if g is None else ~g.isfinite() for g in ours]

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    @every_activation()
    def test_in_the_gradient(self, taken, value, gated, activation):
        args = block(gated=gated, activation=activation, biases=True)
        grad_y = seed_of(args)
        grad_y[5, 7] = value
        x, up, down, gate, up_bias, down_bias, gate_bias = self.compare(args, grad_y)
        pre = torch.nn.functional.linear(args.x, args.selector, args.selector_bias)[5]
        active = args.activation(pre) != 0
        assert active.any()
        assert x.any(1).nonzero().tolist() == [[5]]
        lifted = active
        if activation == "drelu":
            lifted = active & (torch.nn.functional.linear(args.x, args.up, args.up_bias)[5] > 0)
            assert not torch.equal(lifted, active)
        assert torch.equal(up.all(1), lifted)
        assert torch.equal(up_bias, lifted)
        assert torch.equal(down[7], active)
        assert down_bias.nonzero().tolist() == [[7]]
        assert gate is None or torch.equal(gate.all(1), active)
        assert gate_bias is None or torch.equal(gate_bias, active)
        assert taken

    @every_activation()
    @pytest.mark.parametrize("operand", ["x", "selector"])
    def test_a_nan_before_the_activation_is_active(self, taken, gated, operand, activation):
        args = block(gated=gated, activation=activation, biases=True)
        getattr(args, operand)[11, 2] = float("nan")  # a token with all its neurons, or the other way round
        found = self.compare(args)
        dense = [None if g is None else ~g.isfinite() for g in run(args, dense_backward)]
        for mine, theirs in zip(found, dense, strict=True):
            assert mine is None or torch.equal(mine, theirs)
        assert found[0].any() or found[1].any()
        assert taken

    @pytest.mark.parametrize("name", ["up", "down"])
    def test_weights_of_one_neuron_reach_the_tokens_that_use_it(self, taken, name):
        args = block(neurons=64, nnz=20)
        active = torch.nn.functional.linear(args.x, args.gate) > 0
        neuron = int(active.sum(0).argmax())
        getattr(args, name)[(neuron, 3) if name == "up" else (3, neuron)] = float("inf")
        x, *_ = self.compare(args)
        assert torch.equal(x.any(1), active[:, neuron])
        assert not active[:, neuron].all()
        assert taken


class TestWhenItIsTaken:
    """By size and density; never where something has to see through the operations."""

    def test_density(self, taken, monkeypatch):
        monkeypatch.setattr(policy.cpu, "_MAX_DENSITY", {torch.float32: 0.1})
        for nnz in (4, 16, 40, 136):
            run(block(300, nnz=nnz, sigma=1.0))
        assert len(taken) == 1

    @pytest.mark.parametrize("tokens", [1, 40, 300])
    def test_neuron_major_weights_pay_for_fewer_tokens(self, taken, monkeypatch, tokens):
        monkeypatch.setattr(policy.cpu, "_MIN_TOKENS", 16)
        monkeypatch.setattr(policy.cpu, "_MIN_TOKENS_COPYING", 256)
        args = block(tokens, nnz=2)
        run(args)
        run(args._replace(down=args.down.mT.contiguous().mT))
        assert len(taken) == {1: 0, 40: 1, 300: 2}[tokens]

    @pytest.mark.parametrize("threads", [1, 2])
    def test_blocks_as_they_come(self, threads, monkeypatch):
        torch.set_num_threads(threads)
        monkeypatch.setattr(policy.cpu, "_WORTH_LOOKING_SECONDS", 0.0)  # many cores may need larger blocks
        monkeypatch.setattr(policy.cpu, "_MANY_WORTH_LOOKING_SECONDS", 0.0)
        sparse: list[bool] = []
        look = policy.cpu._is_sparse
        monkeypatch.setattr(policy.cpu, "_is_sparse", lambda args: sparse.append(look(args)) or sparse[-1])
        for nnz in (4, 400):
            check(block(256, 128, 1024, nnz, seed=8))
        run(block(256, 64, 256, 2))
        run(block(8, 128, 1024, 4))
        assert sparse == [True, False]

    @pytest.mark.parametrize(
        ("dtype", "native", "nnz", "dense"),
        [
            (torch.float32, False, 4, False),
            (torch.float32, False, 120, True),
            (torch.bfloat16, False, 4, False),
            (torch.bfloat16, False, 120, False),  # stock products of 16 bits would take far longer
            (torch.bfloat16, True, 4, True),
        ],
        ids=str,
    )
    def test_steps_that_are_left_to_dense(self, taken, monkeypatch, cpu_choices, dtype, native, nnz, dense):
        monkeypatch.setattr(policy.cpu, "_MAX_DENSITY", {torch.float32: 0.1})
        cpu_choices.native = native
        args = block(300, nnz=nnz, sigma=1.0, dtype=dtype)
        decision = policy.cpu.decide_training(args, 0, LayerState(), hooked=False)
        assert (decision.backend == "dense") == dense

    @pytest.mark.parametrize("gated", [True, False])
    @pytest.mark.parametrize("apart", [None, "up", "down", "gate"])
    def test_weights_that_must_be_copied_need_more_tokens(self, taken, monkeypatch, gated, apart):
        monkeypatch.setattr(policy.cpu, "_MIN_TOKENS_COPYING", 256)
        args = block(40, gated=gated)
        args = args._replace(down=args.down.mT.contiguous().mT)
        if apart is not None and getattr(args, apart) is not None:
            weight = getattr(args, apart)
            args = args._replace(**{apart: weight.repeat(2, 2)[::2, ::2]})
        copied = apart in ("up", "down") or (gated and apart == "gate")
        assert policy.cpu._backward_can_pay(args, site_of(args)) == (not copied)

    def test_matrix_units_for_16_bits(self, taken, cpu_choices):
        cpu_choices.native = True
        args = block(dtype=torch.bfloat16)
        for mine, theirs in zip(run(args), run(args, dense_backward), strict=True):
            assert mine is None or torch.equal(mine, theirs)
        assert not taken

    def test_second_derivatives(self, taken):
        args = block(5, 8, 16, 6, dtype=torch.float64)
        tensors = [t.clone().requires_grad_() for t in args[:4]]
        args = FfnArgs(*tensors, *args[4:])
        (second,) = torch.autograd.grad(run(args)[0].square().sum(), tensors[1])
        assert second.isfinite().all()
        assert not taken
        with torch.no_grad():
            run(args)
        assert taken

    def test_traces_and_transforms(self, taken):
        args, needed = block(), everything(block())

        def up_of(x, grad_y):
            row = Decision("row", 0, "cpu", "")
            return cpu_backward(args._replace(x=x), SAVED, row, grad_y, None, needed)[1]

        whole = dense_backward(args, seed_of(args), None, needed)[1]
        each = torch.func.vmap(up_of)(args.x.unsqueeze(1), seed_of(args).unsqueeze(1))
        torch.testing.assert_close(each.sum(0), whole, rtol=1e-4, atol=1e-5)
        graph = torch.fx.experimental.proxy_tensor.make_fx(up_of)(args.x, seed_of(args))
        torch.testing.assert_close(graph(args.x, seed_of(args)), whole)
        assert not taken

    def test_autocast_does_not_narrow_it(self, taken):
        args = block()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = run(args)
        for mine, theirs in zip(inside, run(args), strict=True):
            assert mine is None or torch.equal(mine, theirs)
        assert len(taken) == 2
