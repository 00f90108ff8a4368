"""The portable training kernels on small shapes that cross every tile border, in Triton's interpreter."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import twell.flops  # noqa: F401 - FlopCounterMode counts our ops
from twell import (
    Plan,
    accumulate_in_place,
    ffn,
    ffn_with_stats,
    overflowed_steps,
    policy,
    recorded_paths,
    reference,
    training_step,
)
from twell.kernels.gpu import sizes
from twell.layer_state import layer_of
from twell.problem import Decision

from ...accuracy import assert_accurate, every_activation, stock_dense
from ...training import SMALL, assert_gradients_accurate, assert_l1_alone, block, expect_overflow, gradients
from .test_interpreted import NEURONS


@pytest.fixture
def rounds(monkeypatch):
    """A pool for a third of the neurons, as with many tokens; one for all is the simpler case."""
    monkeypatch.setattr(sizes, "ONE_ROUND_BYTES", 0)


def check(operands, activation, backend, rows=16):
    plan = Plan(path="block", block_rows=rows, backend=backend)
    assert_gradients_accurate(operands, activation, lambda **tensors: ffn_with_stats(**tensors, plan=plan))


@pytest.mark.usefixtures("rounds")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("tokens", [1, 33])
def test_matches_the_oracle(interpreted, dtype, gated, tokens):
    check(block(tokens, dtype=dtype, gated=gated), "relu", interpreted)


@pytest.mark.usefixtures("rounds")
@every_activation()
def test_activations_and_biases(interpreted, activation, gated):
    check(block(21, dtype=torch.float32, gated=gated, bias=True), activation, interpreted)


@pytest.mark.usefixtures("rounds")
@pytest.mark.parametrize(
    ("nnz", "overflows"), [(0, 0), (1, 0), (40, 1), (NEURONS, 1)], ids=["none", "one", "rounds", "all"]
)
def test_from_none_to_all_active(interpreted, nnz, overflows):
    """The pool holds a third of all neurons: more go in rounds, with the same result, and are counted."""
    before = overflowed_steps()
    check(block(19, nnz=nnz, dtype=torch.float32), "relu", interpreted)
    assert overflowed_steps() - before == overflows


@pytest.mark.parametrize(("nnz", "gated"), [(1, True), (40, False), (NEURONS, True), (NEURONS, False)])
def test_with_room_for_all_neurons_there_is_one_round(interpreted, monkeypatch, nnz, gated):
    monkeypatch.setattr(sizes, "ONE_ROUND_BYTES", 1 << 30)
    before = overflowed_steps()
    check(block(20, nnz=nnz, dtype=torch.float32, gated=gated, bias=True), "relu", interpreted)
    assert overflowed_steps() == before


@pytest.mark.usefixtures("rounds")
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("value", [None, float("inf"), float("nan")])
def test_rounds_do_not_round(interpreted, gated, value):
    """Sums of 16-bit rounds that cancel each other: what a round loses to rounding is not lost."""
    operands = block(19, nnz=NEURONS, dtype=torch.float16, gated=gated, bias=True)
    for name in ("gate", "up") if gated else ("up",):
        bias, weight = operands[f"{name}_bias"], operands[name]
        bias.fill_(8.0)  # every neuron fires for every token
        weight.mul_(0.1)
        weight[: NEURONS // 3] += 1.0
        weight[-(NEURONS // 3) :] -= 1.0
    operands["x"].mul_(0.1)
    operands["down"].fill_(0.25)
    if value is None:
        before = overflowed_steps()
        ours, stock = (gradients(operands, run)["x"] for run in (run_block(interpreted), stock_dense))
        exact = gradients(operands, lambda **tensors: reference.ffn(**tensors).y, dtype=torch.float64)["x"]
        assert_accurate(ours, exact, stock)
        assert overflowed_steps() > before
        return
    operands["down"][0, 0] = value  # reaches the gradients of x, of every token
    for gradient in (gradients(operands, run_block(interpreted))["x"], gradients(operands, stock_dense)["x"]):
        assert not gradient.isfinite().any()


def test_frequent_and_rare_neurons(interpreted):
    """Enough tokens that some neurons are rare (one token in 256) and others are not."""
    check(block(600, nnz=4, dtype=torch.float32), "relu", interpreted, rows=64)


def run_block(backend):
    plan = Plan(path="block", block_rows=16, backend=backend)
    return lambda **tensors: ffn(**tensors, plan=plan)


def test_only_what_is_needed(interpreted):
    operands = block(20, bias=True, **SMALL)
    full = gradients(operands, run_block(interpreted))
    for name in ("x", "down", "gate_bias"):
        alone = gradients(operands, run_block(interpreted), only=(name,))
        assert list(alone) == [name]
        assert torch.equal(alone[name], full[name])


@pytest.mark.usefixtures("rounds")
@pytest.mark.parametrize("outputs", [8, 72, 6])
def test_other_numbers_of_outputs(interpreted, outputs):
    """6 float32 are no multiple of 16 bytes: dense."""
    check(block(20, outputs=outputs, bias=True), "relu", interpreted)


@pytest.mark.usefixtures("rounds")
def test_an_expected_overflow_goes_one_round(interpreted, monkeypatch):
    expect_overflow(monkeypatch)
    before = overflowed_steps()
    check(block(40, nnz=60), "relu", interpreted)
    assert overflowed_steps() == before


def test_several_slabs(interpreted, monkeypatch):
    from twell.kernels.gpu import block as blocks

    monkeypatch.setattr(blocks, "WORKSPACE_BYTES", 64 << 10)
    check(block(150, dtype=torch.float32), "relu", interpreted)


def test_the_gradient_of_down_is_laid_out_like_down(interpreted):
    operands = block(20, **SMALL)
    for down in (operands["down"].contiguous(), operands["down"].mT.contiguous().mT):
        found = gradients(operands | {"down": down}, run_block(interpreted))
        assert found["down"].stride() == down.stride()


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_a_loss_of_l1_alone(interpreted, gated):
    plan = Plan(path="block", block_rows=16, backend=interpreted)
    operands = block(20, dtype=torch.float32, gated=gated, bias=True)
    assert_l1_alone(operands, lambda **tensors: ffn_with_stats(**tensors, plan=plan)[1].l1)


def test_second_derivatives(interpreted):
    operands = block(5, **SMALL)

    def second(run):
        leaves = {name: None if t is None else t.clone().requires_grad_() for name, t in operands.items()}
        (first,) = torch.autograd.grad(run(**leaves).square().sum(), leaves["x"], create_graph=True)
        return torch.autograd.grad(first.square().sum(), [leaves["x"], leaves["up"], leaves["down"]])

    for found, wanted in zip(second(run_block(interpreted)), second(stock_dense), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_opcheck(interpreted):
    operands = block(20, **SMALL)
    leaves = [None if t is None else t.clone().requires_grad_() for t in operands.values()]
    arguments = (*leaves, "relu", "block", 16, interpreted, True)
    torch.library.opcheck(torch.ops.twell.ffn_train, arguments)


def leaves(operands):
    return {name: None if t is None else t.detach().requires_grad_() for name, t in operands.items()}


WEIGHTS = ("up", "down", "gate")


def watch_existing(monkeypatch):
    """A list of what backwards are told to add to."""
    seen, real = [], training_step.existing

    def watched(*arguments):
        seen.append(real(*arguments))
        return seen[-1]

    monkeypatch.setattr(training_step, "existing", watched)
    return seen


@pytest.mark.usefixtures("rounds")
@pytest.mark.parametrize(
    ("dtype", "sum_dtype", "gated"),
    [
        (torch.float32, torch.float32, True),
        (torch.float16, torch.float16, False),
        (torch.float16, torch.float32, True),
    ],
    ids=["float32", "float16-plain", "float16-in-float32"],
)
def test_gradients_are_added_in_place(interpreted, monkeypatch, dtype, sum_dtype, gated):
    """Two steps: in place to the bit what autograd adds up, in a sum of that dtype; rare and frequent."""
    run = run_block(interpreted)
    operands = block(20, nnz=3, dtype=dtype, gated=gated, neuron_major=True)
    other = block(3, dtype=dtype, gated=gated)
    first = gradients(operands, run, only=WEIGHTS)
    second = gradients(operands | {"x": other["x"]}, run, only=WEIGHTS)
    tensors = leaves(operands)
    for name in WEIGHTS:
        if tensors[name] is not None:
            tensors[name].grad_dtype = sum_dtype
    weighting = torch.Generator().manual_seed(1)
    seen = watch_existing(monkeypatch)
    for x in (operands["x"], other["x"]):
        y = run(**(tensors | {"x": x}))
        with accumulate_in_place():
            (y * torch.randn(y.shape, generator=weighting.manual_seed(1)).to(y)).sum().backward()
    assert [found is None for found in seen] == [True, False]  # the first has nothing to add to
    for name in first:
        wanted, found = first[name].to(sum_dtype) + second[name].to(sum_dtype), tensors[name].grad
        assert found.dtype == sum_dtype
        if sum_dtype == dtype == torch.float32:
            assert torch.equal(found, wanted)
        else:  # autograd's second gradient was rounded before it was added, ours is not
            unit = torch.finfo(dtype).eps
            bound = unit * (first[name].abs() + 2 * second[name].abs()).float() + 1e-6
            assert ((found.float() - wanted.float()).abs() <= bound).all()
    assert not torch.equal(tensors["up"].grad, first["up"].to(sum_dtype))


def test_gradients_that_cannot_be_added_in_place_go_through_autograd(interpreted, monkeypatch):
    run, operands = run_block(interpreted), block(2, neuron_major=True, **SMALL)
    wanted = gradients(operands, run, only=WEIGHTS)

    def twice(prepare):
        tensors = leaves(operands)
        prepare(tensors)
        for _ in range(2):
            y = run(**tensors)
            with accumulate_in_place():
                (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
        for name, gradient in wanted.items():
            torch.testing.assert_close(tensors[name].grad, 2 * gradient)

    seen, calls = watch_existing(monkeypatch), []
    twice(lambda tensors: tensors["up"].register_post_accumulate_grad_hook(calls.append))
    twice(lambda tensors: tensors["gate"].register_hook(lambda gradient: None))
    twice(lambda tensors: setattr(tensors["down"], "grad", torch.zeros_like(operands["down"].contiguous())))
    assert len(calls) == 2
    assert seen == [None] * 6


def test_only_weights_that_were_named_are_added_to(interpreted, monkeypatch):
    """With `inputs=`, and with `torch.autograd.grad`, which names what it returns."""
    run, operands = run_block(interpreted), block(2, neuron_major=True, **SMALL)
    wanted = gradients(operands, lambda **tensors: run(**tensors), only=WEIGHTS)
    tensors = leaves(operands)
    weighting = torch.Generator()

    def loss():
        y = run(**tensors)
        return (y * torch.randn(y.shape, generator=weighting.manual_seed(1))).sum()

    loss().backward()
    seen = watch_existing(monkeypatch)
    with accumulate_in_place():
        loss().backward(inputs=[tensors["up"], tensors["x"]])
        (returned,) = torch.autograd.grad(loss(), tensors["gate"])
    assert [found is None for found in seen] == [False, True]
    torch.testing.assert_close(tensors["up"].grad, 2 * wanted["up"])
    for name in ("down", "gate"):
        torch.testing.assert_close(tensors[name].grad, wanted[name])
    torch.testing.assert_close(returned, wanted["gate"])


def test_nothing_is_added_in_place_unless_asked(interpreted):
    run, operands = run_block(interpreted), block(2, neuron_major=True, **SMALL)
    tensors = leaves(operands)
    run(**tensors).sum().backward()
    before = tensors["up"].grad.clone()
    with accumulate_in_place():
        pass
    (gradient,) = torch.autograd.grad(run(**tensors).sum(), tensors["up"])
    assert torch.equal(gradient, before)
    assert torch.equal(tensors["up"].grad, before)


def test_checkpoints_with_gradients_to_be_added_in_place(interpreted):
    """A checkpoint hands out what was saved once only, and detached: autograd adds."""
    run, tensors = run_block(interpreted), leaves(block(2, neuron_major=True, **SMALL))
    sums = []
    for _ in range(2):
        y = checkpoint(lambda: run(**tensors), use_reentrant=False)
        with accumulate_in_place():
            y.sum().backward()
        sums.append(tensors["up"].grad.clone())
    torch.testing.assert_close(sums[1], 2 * sums[0])


class Decisions:
    """What a GPU's rules say: `hooked` steps decide when they run, which is in turn as the test has it."""

    def __init__(self, *paths):
        self.paths = list(paths)

    def __call__(self, args, block_rows, layer, hooked):
        path = "auto" if hooked else self.paths.pop(0)
        return Decision(path, block_rows, "interpreted", "as the test has it", layer=layer)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("again", ["dense", "block"])
@pytest.mark.parametrize("first", ["dense", "block"])
def test_a_checkpoint_may_decide_otherwise_when_it_computes_again(
    interpreted, monkeypatch, first, again, gated
):
    monkeypatch.setattr(policy.gpu, "decide_training", decisions := Decisions(first, again))
    operands = block(20, nnz=6, gated=gated, bias=True, **SMALL)
    ours = partial(ffn_with_stats, plan=Plan(backend=interpreted))

    def run(**leaves):
        y, stats = checkpoint(lambda: ours(**leaves), use_reentrant=False)
        return y, stats.l1

    with recorded_paths() as ran:
        assert_gradients_accurate(operands, "relu", run)
    assert not decisions.paths
    assert [piece.path for piece in ran if piece.phase == "backward"] == [again]


def test_a_dense_step_in_a_checkpoint_computes_nothing_a_third_time(interpreted, monkeypatch):
    monkeypatch.setattr(policy.gpu, "decide_training", Decisions("dense", "dense"))
    operands = leaves(block(20))
    ours = partial(ffn, plan=Plan(backend=interpreted))
    with FlopCounterMode(display=False) as counter:
        checkpoint(lambda: ours(**operands), use_reentrant=False).sum().backward()
    stock = leaves(block(20))
    with FlopCounterMode(display=False) as stock_counter:
        checkpoint(lambda: stock_dense(**stock), use_reentrant=False).sum().backward()
    assert 0 < counter.get_total_flops() <= stock_counter.get_total_flops()


def test_second_derivatives_of_a_dense_step_in_a_checkpoint(interpreted, monkeypatch):
    monkeypatch.setattr(policy.gpu, "decide_training", Decisions("dense", "dense", "dense"))
    operands = {name: None if t is None else t.double() for name, t in leaves(block(5)).items()}
    operands = leaves(operands)

    def second(run):
        (first,) = torch.autograd.grad(run(**operands).square().sum(), operands["x"], create_graph=True)
        return torch.autograd.grad(first.square().sum(), operands["up"])[0]

    ours = partial(ffn, plan=Plan(backend=interpreted))
    found = second(lambda **tensors: checkpoint(lambda: ours(**tensors), use_reentrant=False))
    torch.testing.assert_close(found, second(stock_dense))


def test_hooks_that_nobody_knows_may_compute_again(interpreted, monkeypatch):
    """What they save is exact whatever they hand back: every neuron is listed where a step ran dense."""
    monkeypatch.setattr(policy.gpu, "decide_training", Decisions("dense"))
    operands = block(20, nnz=6, **SMALL)
    ours = partial(ffn_with_stats, plan=Plan(backend=interpreted))

    def run(**leaves):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
            y, stats = ours(**leaves)
        return y, stats.l1

    with recorded_paths() as ran:
        assert_gradients_accurate(operands, "relu", run)
    assert [(piece.path, piece.phase) for piece in ran] == [("dense", "forward"), ("block", "backward")]


def test_batched_gradients_and_those_of_other_types(interpreted):
    """Of an eager step: through the op, which knows what to do with them."""
    operands = leaves(block(5, **SMALL))
    y = run_block(interpreted)(**operands)
    seeds = torch.randn(2, *y.shape)
    (batched,) = torch.autograd.grad(y, operands["up"], seeds, is_grads_batched=True, retain_graph=True)
    for seed, found in zip(seeds, batched, strict=True):
        (one,) = torch.autograd.grad(y, operands["up"], seed, retain_graph=True)
        torch.testing.assert_close(found, one)


def test_who_watches_a_backward_sees_the_op(interpreted):
    operands = leaves(block(5, **SMALL))
    y = run_block(interpreted)(**operands)
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            seen.append(str(function))
            return function(*arguments, **options or {})

    with Watch():
        y.sum().backward()
    assert "twell.ffn_backward.default" in seen


def test_compiled_steps_tell_their_backward(interpreted, fresh_compiler):
    """Through the tensor that the graph carries from one to the other."""
    operands = leaves(block(5, **SMALL))
    compiled = torch.compile(run_block(interpreted), backend="aot_eager", fullgraph=True)
    y = compiled(**operands)
    state = layer_of(operands["gate"])
    assert state.ran["forward"].path == "block"
    assert "backward" not in state.ran
    y.sum().backward()
    assert state.ran["backward"].path == "block"  # found by what the forward had decided, layer included
