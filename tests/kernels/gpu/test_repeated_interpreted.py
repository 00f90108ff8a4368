"""Calls and steps that repeat recorded launches: on other tensors, elsewhere, with other tokens."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from twell import Plan, SparseMLP, accumulate_in_place, ffn, ffn_with_stats, functional, ops, recorded_paths
from twell.kernels.gpu import sizes
from twell.kernels.gpu.tape import Tape, recorded
from twell.kernels.gpu.workspace import carve
from twell.layer_state import layer_of

from ...accuracy import assert_accurate, stock_dense
from ...training import NAMES, SMALL, block
from .test_interpreted import HIDDEN, NEURONS
from .test_interpreted import block as operands_of


def exact_of(*tensors, **biases):
    wide = [None if t is None else t.double() for t in tensors]
    return stock_dense(*wide, **{name: bias.double() for name, bias in biases.items()})


def check(*tensors, plan, **biases):
    with torch.no_grad():
        y = ffn(*tensors, plan=plan, **biases)
    exact = exact_of(*tensors, **biases)
    assert_accurate(y, exact, stock_dense(*tensors, **biases))
    return y


@pytest.fixture
def only_repeated(monkeypatch):
    """After it was called, a call that is not repeated fails."""
    return lambda: monkeypatch.setattr(functional, "_run", None)


def other_tokens(x, count):
    x = torch.randn(count, x.shape[1]).to(x.dtype)
    x[:, 0] = 8.0
    return x


@pytest.mark.parametrize(
    ("gated", "bias", "rows"),
    [(True, True, 0), (True, False, 16), (False, True, 16), (False, False, 0)],
)
def test_other_tokens_and_weights_that_have_moved(interpreted, only_repeated, gated, bias, rows):
    plan, first = Plan(path="block", block_rows=rows, backend=interpreted), 18
    (x, up, down, gate), biases = operands_of(first, dtype=torch.float32, gated=gated, bias=bias)
    down = down.mT.contiguous().mT
    check(x, up, down, gate, plan=plan, **biases)
    only_repeated()
    with recorded_paths() as ran:
        for _ in range(2):
            x = other_tokens(x, first)
            check(x, up, down, gate, plan=plan, **biases)
            keep = up.data, down.data, x  # so that what is new lies elsewhere
            down.data = (down.data.mT * 3).mT
            if gated:  # else it is what the layer is known by
                up.data = up.data * 2
            check(x, up, down, gate, plan=plan, **biases)
            for tensor in biases.values():
                tensor.data = tensor.data * 2
            check(x, up, down, gate, plan=plan, **biases)
            del keep
    assert [piece.path for piece in ran] == ["decode" if rows == 0 else "block"] * 6


@pytest.mark.parametrize(
    ("rows", "first", "others"),
    [
        (0, 1, [1]),
        (0, 7, [5, 8]),
        (0, 33, [48]),
        (0, 64, [49, 63]),
        (0, 70, [65, 128]),
        (128, 130, [256]),
    ],
)
def test_other_numbers_of_tokens(interpreted, only_repeated, rows, first, others):
    plan = Plan(path="block", block_rows=rows, backend=interpreted)
    (x, up, down, gate), _ = operands_of(first, dtype=torch.float32)
    down = down.mT.contiguous().mT
    check(x, up, down, gate, plan=plan)
    numbers = [n for n in others if sizes.bucket(n) == sizes.bucket(first)]
    assert numbers
    only_repeated()
    for count in numbers:
        check(other_tokens(x, count), up, down, gate, plan=plan)


@pytest.mark.parametrize("workspace", [64 << 10, 2 << 30], ids=["slabs", "small-blocks"])
def test_a_number_of_tokens_that_takes_other_grids(interpreted, monkeypatch, workspace):
    """In the same bucket, but with several slabs, or blocks smaller than usual."""
    monkeypatch.setattr("twell.kernels.gpu.block.WORKSPACE_BYTES", workspace)
    plan = Plan(path="block", block_rows=16, backend=interpreted)
    (x, up, down, gate), _ = operands_of(113, dtype=torch.float32)
    down = down.mT.contiguous().mT
    for count in (70, 113, 70):
        check(x[:count], up, down, gate, plan=plan)


def test_no_tokens_after_some(interpreted):
    plan = Plan(path="block", backend=interpreted)
    (x, up, down, gate), _ = operands_of(2, dtype=torch.float32)
    for count in (2, 0, 1, 0, 2):
        assert check(x[:count], up, down, gate, plan=plan).shape == (count, HIDDEN)


def test_numbers_of_one_bucket_take_the_same_tiles_and_grids():
    kinds = {}
    for tokens in range(1, 600):
        few = tokens <= sizes.DECODE_TOKENS
        sixteens = -(-tokens // 16) if few else 0  # of few tokens, what the smallest tiles take
        kind = (1 << (tokens - 1).bit_length(), sixteens) if few else -(-tokens // 128)
        assert kinds.setdefault(sizes.bucket(tokens), kind) == kind


def test_leading_dimensions_and_strides_of_x(interpreted):
    plan = Plan(path="block", backend=interpreted)
    (x, up, down, gate), _ = operands_of(12, dtype=torch.float32)
    down = down.mT.contiguous().mT
    for shape in ((12, HIDDEN), (2, 3, 2, HIDDEN)):
        assert torch.equal(
            check(x.view(shape), up, down, gate, plan=plan).view(12, -1), ffn(x, up, down, gate, plan=plan)
        )
    transposed = x.mT.contiguous().mT
    assert torch.equal(check(transposed, up, down, gate, plan=plan), check(x, up, down, gate, plan=plan))
    shifted = torch.empty(12 * HIDDEN + 1)[1:].view(12, HIDDEN).copy_(x)  # 4 bytes off what kernels are for
    assert torch.equal(check(shifted, up, down, gate, plan=plan), check(x, up, down, gate, plan=plan))


@pytest.mark.parametrize("outputs", [HIDDEN, 16])
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_an_x_that_is_not_contiguous_is_read_as_it_is(interpreted, outputs, trained):
    """Flattened it is a copy: what kernels read in its place says nothing about x itself."""
    plan = Plan(path="block", block_rows=16, backend=interpreted)
    operands = block(4, outputs=outputs, neurons=40)
    up, down, gate = (operands[name].requires_grad_(trained) for name in ("up", "down", "gate"))
    for take in (lambda x: x[:, :2], lambda x: x.transpose(0, 1)):
        for whole in (torch.randn(2, 3, HIDDEN), torch.randn(2, 3, HIDDEN)):
            x = take(whole)
            y = ffn(x, up, down, gate, plan=plan)
            exact = exact_of(x, up, down, gate)
            assert_accurate(y.detach(), exact.detach(), stock_dense(x, up, down, gate).detach())
            if trained:
                (found,) = torch.autograd.grad(y.sum(), up)
                (want,) = torch.autograd.grad(exact.sum(), up)
                torch.testing.assert_close(found.double(), want.double(), rtol=1e-4, atol=1e-4)


def test_negated_views(interpreted):
    plan = Plan(path="block", backend=interpreted)
    (x, up, down, gate), _ = operands_of(4, dtype=torch.float32)
    down = down.mT.contiguous().mT
    for _ in range(2):
        for each in (x, torch._neg_view(-x)):
            check(each, up, down, gate, plan=plan)


def test_calls_of_one_shape_in_several_modes_take_turns(interpreted, only_repeated):
    plan = Plan(path="block", block_rows=16, backend=interpreted)
    operands = block(6, neuron_major=True)
    tensors = [operands[name] for name in NAMES[:4]]
    tensors[1].requires_grad_()

    def in_turn():
        results = [ffn(*tensors, plan=plan).detach()]
        with torch.no_grad():
            results.append(ffn(*tensors, plan=plan))
            results.append(ffn_with_stats(*tensors, plan=plan)[0])
        with torch.inference_mode():
            results.append(ffn(*tensors, plan=plan).clone())
        return results

    first = in_turn()
    layer = layer_of(tensors[3])
    assert len(layer.prepared) == 3  # statistics without gradients are not repeated
    left = {kind: call._left for kind, call in layer.prepared.items()}
    again = in_turn()
    assert {kind: call._left for kind, call in layer.prepared.items()} == {k: n - 1 for k, n in left.items()}
    for y, want in zip(again, first, strict=True):
        assert torch.equal(y, want)


def test_weights_of_another_layout_dtype_or_shape_are_not_repeated(interpreted):
    plan = Plan(path="block", backend=interpreted)
    (x, up, down, gate), _ = operands_of(8, dtype=torch.float32)
    down = down.mT.contiguous().mT
    check(x, up, down, gate, plan=plan)
    down.data = down.data.contiguous()
    check(x, up, down, gate, plan=plan)
    for tensor in (up, down, gate):
        tensor.data = tensor.data.half()
    check(x.half(), up, down, gate, plan=plan)
    up.data, gate.data, down.data = up.data[:64], gate.data[:64], down.data[:, :64]
    check(x.half(), up, down, gate, plan=plan)
    with pytest.raises(ValueError, match="up"):
        ffn(x, up, down, gate, plan=plan)


def test_one_weight_in_two_places(interpreted):
    """What cannot be told apart is not recorded: later it may be two."""
    plan = Plan(path="block", backend=interpreted)
    (x, up, down, _), _ = operands_of(8, dtype=torch.float32)
    down = down.mT.contiguous().mT
    gate = up
    check(x, up, down, gate, plan=plan)
    assert not layer_of(gate).tapes
    check(x, up, down, up.clone(), plan=plan)


def test_a_tape_knows_all_its_tensors_or_is_none():
    a, b, c = (torch.zeros(64) for _ in range(3))
    tape = Tape((a, None, b), steady=1)
    assert tape._place(b[16:]) == (2, 64)
    assert tape._place(a) == (0, 0)
    tape._place(c)
    assert not tape.finish()
    assert not Tape((a, a[8:]), steady=0).finish()
    tapes = {}
    with recorded(tapes, "nothing launched", (a,), 0):
        pass
    assert not tapes


def test_a_layer_keeps_a_limited_number(interpreted, monkeypatch):
    monkeypatch.setattr("twell.kernels.gpu.tape._MOST", 3)
    plan = Plan(path="block", backend=interpreted)
    (x, up, down, gate), _ = operands_of(64, dtype=torch.float32)
    for count in (1, 2, 4, 8, 16):
        check(x[:count], up, down, gate, plan=plan)
        assert 1 <= len(layer_of(gate).tapes) <= 3


def test_a_workspace_is_cut_into_aligned_parts():
    shapes = (((3, 5), torch.float16), ((), torch.int32), ((2, 4), torch.int32), ((7,), torch.uint8))
    buffer, pieces = carve(torch.device("cpu"), shapes)
    for number, (piece, (shape, dtype)) in enumerate(zip(pieces, shapes, strict=True)):
        tensor = piece.tensor()
        assert (tensor.shape, tensor.dtype, tensor.data_ptr()) == (shape, dtype, piece.data_ptr())
        assert tensor.stride() == piece.stride()
        assert (tensor.data_ptr() - buffer.data_ptr()) % 256 == 0
        tensor.fill_(number)
    assert [piece.tensor().float().mean().item() for piece in pieces] == [0, 1, 2, 3]
    assert pieces[2].row(1).data_ptr() == pieces[2].tensor()[1].data_ptr()
    assert torch.equal(pieces[2].row(1).tensor(), pieces[2].tensor()[1])
    assert torch.equal(pieces[2].viewed(8).tensor(), pieces[2].tensor().view(8))


def test_a_module_that_is_freed_takes_its_tapes_along(interpreted):
    module = SparseMLP(HIDDEN, NEURONS, plan=Plan(path="block", backend=interpreted))
    with torch.no_grad():
        x = torch.randn(4, HIDDEN)
        assert torch.equal(module(x), module(x))
    tape = weakref.ref(next(iter(module._layer.tapes.values())))
    weight = weakref.ref(module.gate_proj.weight)
    del module
    gc.collect()
    assert tape() is None
    assert weight() is None


class TestSteps:
    @pytest.mark.parametrize(
        ("gated", "with_l1", "rounds"),
        [(True, True, 1), (True, False, 3), (False, True, 3), (False, False, 1)],
    )
    def test_repeated_steps_are_the_first_one(
        self, interpreted, only_repeated, monkeypatch, gated, with_l1, rounds
    ):
        monkeypatch.setattr(sizes, "ONE_ROUND_BYTES", 0 if rounds > 1 else 1 << 40)
        plan = Plan(path="block", block_rows=16, backend=interpreted)
        operands = block(18, gated=gated, bias=True, **SMALL, neuron_major=True)
        layer = operands["gate"] if gated else operands["up"]
        first = steps(operands, plan, with_l1)
        assert layer_of(layer).prepared
        only_repeated()
        for _ in range(2):
            again = steps(operands, plan, with_l1)
            for name, gradient in first.items():
                assert torch.equal(again[name], gradient), name
                assert again[name].stride() == gradient.stride(), name

    def test_the_backward_is_repeated_too(self, interpreted, monkeypatch):
        plan = Plan(path="block", block_rows=16, backend=interpreted)
        operands = block(6, **SMALL, neuron_major=True)
        want = steps(operands, plan)
        monkeypatch.setattr("twell.kernels.gpu.backward.BackwardLaunches", None)
        monkeypatch.setattr("twell.kernels.gpu.training.gpu_backward", None)
        with recorded_paths() as ran:
            found = steps(operands, plan)
        assert [(piece.path, piece.phase) for piece in ran] == [("block", "forward"), ("block", "backward")]
        for name, gradient in want.items():
            assert torch.equal(found[name], gradient), name

    def test_a_weight_that_is_laid_out_anew_before_the_backward(self, interpreted):
        plan = Plan(path="block", block_rows=16, backend=interpreted)
        operands = block(6, **SMALL)
        x, up, down, gate = (operands[name].requires_grad_() for name in NAMES[:4])
        down.data = down.data.mT.contiguous().mT
        want = None
        for _ in range(3):
            y = ffn(x, up, down, gate, plan=plan)
            if want is not None:
                down.data = down.data.contiguous()
            found = torch.autograd.grad(y.square().sum(), (x, up, down, gate))
            down.data = down.data.mT.contiguous().mT
            want = want or found
            for gradient, expected in zip(found, want, strict=True):
                torch.testing.assert_close(gradient, expected)

    def test_one_token_without_leading_dimensions(self, interpreted):
        plan = Plan(path="block", block_rows=16, backend=interpreted)
        operands = block(1, bias=True, **SMALL, neuron_major=True)
        operands["x"] = operands["x"][0].clone()
        first = steps(operands, plan)
        again = steps(operands, plan)
        for name, gradient in first.items():
            assert torch.equal(again[name], gradient), name

    def test_an_output_may_be_changed_in_place(self, interpreted, monkeypatch):
        """However the step ran: an output must be no view."""
        plan = Plan(path="block", block_rows=16, backend=interpreted)
        operands = block(6, **SMALL, neuron_major=True)
        operands["x"] = operands["x"].view(2, 3, -1)
        tensors = {name: t.requires_grad_() for name, t in operands.items() if t is not None}
        for watched in (False, False, True):
            monkeypatch.setattr("twell.kernels.gpu.tape.is_watched", lambda watched=watched: watched)
            with recorded_paths() as ran:
                y = ffn(**tensors, plan=plan)
            assert len(ran) == 1
            y.add_(1.0).sum().backward()

    def test_only_what_is_needed(self, interpreted):
        plan = Plan(path="block", block_rows=16, backend=interpreted)
        operands = block(10, bias=True, **SMALL, neuron_major=True)
        full = steps(operands, plan)
        for name in ("x", "gate_bias", "down", "x"):
            alone = steps(operands, plan, only=(name,))
            assert list(alone) == [name]
            assert torch.equal(alone[name], full[name])

    def test_leading_dimensions_and_gradients_of_any_layout(self, interpreted):
        plan = Plan(path="block", block_rows=16, backend=interpreted)
        operands = block(12, **SMALL, neuron_major=True)
        want = steps(operands, plan)
        shaped = operands | {"x": operands["x"].view(2, 6, -1)}
        for turned in (False, True):
            found = steps(shaped, plan, turned=turned)
            assert found["x"].shape == (2, 6, SMALL["hidden"])
            for name, gradient in want.items():
                assert torch.equal(found[name].view_as(gradient), gradient), name

    def test_second_derivatives_checkpoints_and_accumulation_go_their_own_way(self, interpreted):
        plan = Plan(path="block", block_rows=16, backend=interpreted)
        operands = block(10, **SMALL, neuron_major=True)
        leaves = [None if t is None else t.clone().requires_grad_() for t in operands.values()]
        leaves[2].data = leaves[2].data.mT.contiguous().mT
        x, up, down, gate, *_ = leaves

        def loss():
            return ffn(x, up, down, gate, plan=plan).square().sum()

        (want,) = torch.autograd.grad(loss(), up)
        (grad,) = torch.autograd.grad(loss(), up, create_graph=True)
        torch.testing.assert_close(grad, want)
        assert torch.autograd.grad(grad.square().sum(), up)[0].isfinite().all()
        (grad,) = torch.autograd.grad(checkpoint(loss, use_reentrant=False), up)
        assert torch.equal(grad, want)
        loss().backward()
        before = up.grad
        with accumulate_in_place():
            loss().backward()
        assert up.grad is before
        torch.testing.assert_close(up.grad, 2 * want)

    def test_hooks_that_hand_back_other_layouts(self, interpreted):
        plan = Plan(path="block", block_rows=16, backend=interpreted)
        operands = block(10, **SMALL, neuron_major=True)
        want = steps(operands, plan)
        for _ in range(2):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.contiguous()):
                found = steps(operands, plan)
            for name, gradient in want.items():
                assert torch.equal(found[name], gradient), name


def steps(operands, plan, with_l1=False, only=None, turned=False):
    """Gradients by name; turned: grad_y comes with other strides."""

    def run(**tensors):
        if with_l1:
            y, stats = ffn_with_stats(**tensors, plan=plan)
            return y, stats.l1
        y = ffn(**tensors, plan=plan)
        return y.mT.contiguous().mT if turned else y

    # The same tensors every time: a layer is known by its weights.
    for name in NAMES:
        if operands[name] is not None:
            operands[name].requires_grad_(only is None or name in only)
    wanted = {name: t for name, t in operands.items() if t is not None and t.requires_grad}
    result = run(**operands)
    y, l1 = result if with_l1 else (result, None)
    weights = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
    loss = (y * weights).sum() + (0 if l1 is None else 0.5 * l1)
    return dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True))


@pytest.mark.parametrize(("gated", "path"), [(True, "block"), (False, "block"), (True, "dense")])
def test_the_op_of_a_graph_decides_once_and_repeats(interpreted, monkeypatch, gated, path):
    plan = Plan(path=path, backend=interpreted)
    (x, up, down, gate), biases = operands_of(18, dtype=torch.float16, gated=gated, bias=True)
    up, gate = (None if t is None else torch.nn.Parameter(t) for t in (up, gate))
    down = down.mT.contiguous().mT
    graph = torch.compile(lambda x: ffn(x, up, down, gate, plan=plan, **biases), backend="aot_eager")
    with torch.no_grad():
        for _ in range(2):  # while a graph is compiled, its operands have other dispatch keys
            graph(x)
        monkeypatch.setattr(ops, "decide_inside", None)  # a call that decides fails
        for _ in range(2):
            x = other_tokens(x, 18)
            with recorded_paths() as ran:
                y = graph(x)
            assert [piece.path for piece in ran] == [{"block": "decode"}.get(path, path)]
            exact = exact_of(x, up, down, gate, **biases)
            assert_accurate(y, exact, stock_dense(x, up, down, gate, **biases))
            up.data.mul_(-0.5)
