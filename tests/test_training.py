"""Training through the registered ops, on the CPU: autograd, compilers, checkpoints, autocast, DDP, FSDP."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from twell import Plan, SparseMLP, ffn, ffn_with_stats, policy, recorded_paths

from .accuracy import assert_accurate, every_activation, stock_dense
from .training import NAMES, assert_gradients_accurate, assert_l1_alone, block, gradients

ROW = Plan(path="row")
HIDDEN, NEURONS, TOKENS = 128, 512, 64


@pytest.fixture(params=["row", "block"])
def plan(request):
    return Plan(path=request.param)


@pytest.fixture
def always_sparse(monkeypatch):
    """Small blocks on the active set too, however active they are."""
    monkeypatch.setattr(policy.cpu, "_STOCK_TOKENS", 0)
    monkeypatch.setattr(policy.cpu, "_backward_can_pay", lambda args, site: True)
    monkeypatch.setattr(policy.cpu, "_is_sparse", lambda args: True)


def large_block(nnz=12, **options):
    return block(TOKENS, nnz=nnz, hidden=HIDDEN, neurons=NEURONS, **options)


def module(plan=None, seed=0, **options):
    """A sparse block: 5 of 512 neurons fire."""
    torch.manual_seed(seed)
    mlp = SparseMLP(HIDDEN, NEURONS, plan=plan, **options)
    with torch.no_grad():
        mlp.gate_proj.weight[:, 0] = -0.3
    return mlp


def inputs(seed=0, tokens=TOKENS):
    x = torch.randn(4, tokens // 4, HIDDEN, generator=torch.Generator().manual_seed(seed))
    x[..., 0] = 4.5
    return x


def module_grads(mlp, x, run=None):
    mlp.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_()
    (mlp if run is None else run)(x).square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in mlp.parameters())]


def assert_same(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@every_activation(0.1)
def test_gradients_of_the_active_set(always_sparse, plan, gated, activation):
    operands = large_block(gated=gated, bias=True)
    assert_gradients_accurate(operands, activation, lambda **t: ffn_with_stats(**t, plan=plan))


@pytest.mark.parametrize(
    ("gated", "activation"),
    [(True, "relu"), (False, "relu"), (True, "drelu")],
    ids=["gated", "plain", "drelu"],
)
def test_gradcheck(always_sparse, plan, gated, activation):
    operands = block(5, nnz=6, dtype=torch.float64, gated=gated, bias=True, hidden=8, neurons=24)
    names = [name for name in NAMES if operands[name] is not None]
    leaves = [operands[name].requires_grad_() for name in names]

    def run(*tensors):
        named = dict(zip(names, tensors, strict=True))
        y, stats = ffn_with_stats(**named, activation=activation, plan=plan)
        return y, stats.l1

    assert torch.autograd.gradcheck(run, leaves, eps=1e-7, atol=1e-5)


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("activation", ["relu", "drelu"])
def test_higher_derivatives(plan, order, activation):
    operands = block(5, nnz=6, dtype=torch.float64, hidden=8, neurons=24)

    def derivative(run):
        leaves = {name: None if t is None else t.clone().requires_grad_() for name, t in operands.items()}
        value = run(**leaves, activation=activation).square().sum()
        for _ in range(order - 1):
            (first,) = torch.autograd.grad(value, leaves["x"], create_graph=True)
            value = first.square().sum()
        return torch.autograd.grad(value, [leaves["x"], leaves["up"], leaves["down"]])

    for found, wanted in zip(
        derivative(lambda **t: ffn(**t, plan=plan)), derivative(stock_dense), strict=True
    ):
        torch.testing.assert_close(found, wanted)


SUBSETS = [{name} for name in NAMES] + [{"down", "down_bias"}, {"x", "down"}, {"up", "gate_bias"}, set(NAMES)]


any_subset = pytest.mark.parametrize(
    ("gated", "trained"),
    [
        (gated, names)
        for gated in (True, False)
        for names in SUBSETS
        if gated or not names <= {"gate", "gate_bias"}
    ],
    ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else "gated" if value else "plain",
)


def small_block(gated, trained):
    """Operands, the names of those that are trained, and these, as leaves."""
    operands = block(3, nnz=4, dtype=torch.float64, gated=gated, bias=True, hidden=4, neurons=12)
    names = [name for name in NAMES if name in trained and operands[name] is not None]
    return operands, names, [operands[name].requires_grad_() for name in names]


@pytest.mark.parametrize("l1", [False, True], ids=["y", "y-and-l1"])
@any_subset
def test_second_derivatives_of_any_subset(plan, gated, l1, trained):
    operands, names, leaves = small_block(gated, trained)

    def run(*tensors):
        y, stats = ffn_with_stats(**operands | dict(zip(names, tensors, strict=True)), plan=plan)
        return (y, stats.l1) if l1 and stats.l1.requires_grad else y

    assert torch.autograd.gradgradcheck(run, leaves, eps=1e-7, atol=1e-5)


@any_subset
def test_penalties_on_gradients_of_any_subset(plan, gated, trained):
    """The gradient of y is a constant: that of `down` alone then leaves nothing to differentiate."""
    operands, _names, leaves = small_block(gated, trained)

    def penalised(run):
        y = run(**operands)
        loss = y.square().sum()
        for gradient in torch.autograd.grad(y.sum(), leaves, create_graph=True):
            loss = loss + gradient.square().sum()
        return torch.autograd.grad(loss, leaves)

    for mine, stock in zip(penalised(lambda **t: ffn(**t, plan=plan)), penalised(stock_dense), strict=True):
        torch.testing.assert_close(mine, stock)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_a_loss_of_l1_alone(always_sparse, plan, gated):
    def penalty(**tensors):
        return ffn_with_stats(**tensors, plan=plan)[1].l1

    assert_l1_alone(large_block(gated=gated, bias=True), penalty)


def test_a_loss_of_l1_alone_through_the_op_that_saves_nothing():
    def penalty(**tensors):
        return torch.ops.twell.ffn(*tensors.values(), "relu", "row", 0, "cpu", True)[1]

    assert_l1_alone(large_block(bias=True), penalty)


def test_a_loss_without_the_l1_that_was_recorded(always_sparse, plan):
    """A gradient of zero is none: times the sign of a NaN it would be NaN."""
    operands = large_block(bias=True)
    operands["up_bias"][3] = torch.nan
    found = gradients(operands, lambda **tensors: ffn_with_stats(**tensors, plan=plan)[0])
    wanted = gradients(operands, lambda **tensors: ffn(**tensors, plan=plan))
    for name, gradient in wanted.items():
        assert torch.equal(found[name].nan_to_num(7.0), gradient.nan_to_num(7.0)), name


def test_a_batch_that_starts_with_inactive_tokens():
    """Sums over chunks of tokens, of which the first has no active pair."""
    operands = block(4100, nnz=8, bias=True, hidden=256, neurons=1024)
    operands["gate_bias"] -= 1
    operands["x"][:2048] = 0
    assert_gradients_accurate(operands, "relu", lambda **t: ffn_with_stats(**t, plan=ROW))


@pytest.mark.parametrize("record", [True, False])
def test_opcheck(plan, record):
    tensors = [None if t is None else t.requires_grad_() for t in large_block(bias=True).values()]
    arguments = (*tensors, "relu", plan.path, 0, "cpu", record)
    torch.library.opcheck(torch.ops.twell.ffn_train, arguments)


@pytest.mark.parametrize("needed", [[True] * 7, [False] * 7, [True, False] * 3 + [True]], ids=str)
@pytest.mark.parametrize("neuron_major", [True, False])
def test_opcheck_of_the_backward(needed, neuron_major):
    operands = [None if t is None else t for t in large_block(bias=True).values()]
    if neuron_major:
        operands[2] = operands[2].mT.contiguous().mT
    grad_y, empty = torch.randn(TOKENS, HIDDEN), torch.empty(0, dtype=torch.int32)
    arguments = (grad_y, torch.tensor(0.5), *operands, empty, empty.clone(), "relu", 0, "cpu", needed)
    torch.library.opcheck(torch.ops.twell.ffn_backward, arguments)


def test_frozen_weights_get_no_gradients():
    mlp, x = module(ROW), inputs().requires_grad_()
    mlp.up_proj.requires_grad_(False)
    mlp(x).sum().backward()
    assert mlp.up_proj.weight.grad is None
    assert x.grad is not None
    assert mlp.gate_proj.weight.grad is not None


def test_the_gradient_of_down_has_the_strides_of_down():
    for neuron_major in (True, False):
        mlp = module(ROW, neuron_major=neuron_major)
        module_grads(mlp, inputs())
        assert mlp.down_proj.weight.grad.stride() == mlp.down_proj.weight.stride()


@pytest.mark.parametrize("neuron_major", [True, False])
def test_the_gradient_of_down_comes_with_the_strides_of_down(neuron_major):
    """From the op itself: what accumulates gradients would lay out any of them like the parameter."""
    mlp = module(ROW, neuron_major=neuron_major)
    weight = mlp.down_proj.weight
    (grad,) = torch.autograd.grad(mlp(inputs()).sum(), weight)
    assert grad.stride() == weight.stride()


def test_automatic_plans_take_the_active_set_where_it_pays_and_dense_where_not():
    torch.manual_seed(0)
    mlp = SparseMLP(512, 2048)
    x = torch.randn(512, 512)
    x[:, 0] = 8.0
    for weight, path in ((-1.0, {"row", "block"}), (1.0, {"dense"})):
        with torch.no_grad():
            mlp.gate_proj.weight[:, 0] = weight / 2
        with recorded_paths() as ran:
            found = module_grads(mlp, x)
        assert ran
        assert {piece.path for piece in ran} <= path
        wanted = module_grads(mlp, x, lambda x: mlp.down_proj(mlp.gate_proj(x).relu() * mlp.up_proj(x)))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("wanted_plan", [ROW, None], ids=["row", "auto"])
def test_a_compiled_step(fresh_compiler, wanted_plan):
    mlp, x = module(wanted_plan), inputs()
    wanted = module_grads(mlp, x)
    assert_same(module_grads(mlp, x, torch.compile(mlp, fullgraph=True, backend="aot_eager")), wanted)


def test_a_step_compiled_by_inductor(fresh_compiler):
    mlp, x = module(ROW), inputs()
    wanted = module_grads(mlp, x)
    assert_same(module_grads(mlp, x, torch.compile(mlp, fullgraph=True)), wanted)


class Surrounded(torch.nn.Module):
    """A block with something to compile before and after it, and no loop, which would not be compiled."""

    def __init__(self, mlp):
        super().__init__()
        self.before, self.mlp = torch.nn.Linear(mlp.hidden_size, mlp.hidden_size), mlp

    def forward(self, x):
        return self.mlp(self.before(x)).sigmoid() + x


@pytest.fixture
def wide_layer():
    """A layer with an eager block; how active it is depends on the sign of its gate weights."""
    torch.manual_seed(0)
    mlp = SparseMLP(512, 2048, record=True, eager=True)
    torch.nn.init.normal_(mlp.gate_proj.weight, std=0.05)
    layer = Surrounded(mlp)
    x = torch.randn(512, 512)

    def set_gate(sign):
        with torch.no_grad():
            mlp.gate_proj.weight.copy_(mlp.gate_proj.weight.abs() * sign)
            layer.before.bias.fill_(1.0)

    return layer, x, set_gate


def test_an_eager_block_decides_between_compiled_graphs(fresh_compiler, wide_layer):
    layer, x, set_gate = wide_layer
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, backend=backend)
    for sign, paths in ((1.0, {"dense"}), (-1.0, {"row", "block"}), (1.0, {"dense"})):
        set_gate(sign)
        wanted = module_grads(layer, x)
        with recorded_paths() as ran:
            found = module_grads(layer, x, compiled)
        assert {piece.path for piece in ran if piece.phase == "forward"} <= paths
        assert ran
        assert layer.mlp.last_stats.l1.requires_grad
        assert_same(found, wanted)
    assert len(graphs) == 2  # before and after the block, once


def test_an_eager_block_belongs_to_the_graph_where_no_gradients_are_wanted(fresh_compiler, wide_layer):
    layer, x, _ = wide_layer
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))
    with pytest.raises(Exception, match=r"SparseMLP\.eager is on; with fullgraph=True turn it off"):
        compiled(x)


class Doubled(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 2


@pytest.mark.parametrize("why", ["evaluation", "plan", "wrapped"])
def test_an_eager_block_belongs_to_the_graph_where_nothing_is_to_decide(fresh_compiler, wide_layer, why):
    layer, x, _ = wide_layer
    if why == "evaluation":
        layer.eval()
    elif why == "plan":
        layer.mlp.plan = ROW
    else:
        layer.mlp.up_proj = Doubled(layer.mlp.up_proj)
    wanted = module_grads(layer, x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same(module_grads(layer, x, compiled), wanted)


def test_eager_blocks_are_copied_as_such():
    mlp = SparseMLP(16, 32, eager=True)
    assert copy.deepcopy(mlp).eager
    assert pickle.loads(pickle.dumps(mlp)).eager
    assert not SparseMLP(16, 32).eager


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("wanted_plan", [ROW, None], ids=["row", "auto"])
def test_checkpointing(reentrant, wanted_plan):
    mlp, x = module(wanted_plan), inputs()
    wanted = module_grads(mlp, x)
    assert_same(module_grads(mlp, x, lambda x: checkpoint(mlp, x, use_reentrant=reentrant)), wanted)


def test_statistics_under_checkpointing_carry_their_gradient():
    mlp, x = module(ROW, record=True), inputs()

    def penalty(x):
        mlp(x)
        return mlp.last_stats.l1

    def grads(run):
        mlp.zero_grad(set_to_none=True)
        run(x).backward()
        return [mlp.gate_proj.weight.grad, mlp.up_proj.weight.grad]

    assert_same(grads(lambda x: checkpoint(penalty, x, use_reentrant=False)), grads(penalty))


def test_a_penalty_without_gradient_is_said(caplog, monkeypatch):
    monkeypatch.setattr("twell._log._logged", set())
    mlp, x = module(ROW, record=True), inputs()
    checkpoint(mlp, x.requires_grad_(), use_reentrant=True)
    assert ["reentrant" in record.message for record in caplog.records] == [True]


def test_dense_compiled_steps_are_said(caplog, monkeypatch, fresh_compiler):
    monkeypatch.setattr("twell._log._logged", set())
    policy.resolve_cached.cache_clear()  # said when it was decided, which other tests may have done
    torch.compile(module(), fullgraph=True, backend="aot_eager")(inputs())
    said = [record.message for record in caplog.records if record.name == "twell"]
    assert ["compiled training steps" in message for message in said] == [True]


def test_offloaded_tensors():
    mlp, x = module(ROW), inputs()
    wanted = module_grads(mlp, x)

    def run(x):
        with torch.autograd.graph.save_on_cpu():
            return mlp(x)

    assert_same(module_grads(mlp, x, run), wanted)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_autocast_with_float32_weights(native, seed, cpu_choices):
    """Gradients as far from float64's as stock autocast's are."""
    cpu_choices.native = native
    mlp, x = module(ROW, seed), inputs(seed)

    def stock(x):
        return stock_dense(x, mlp.up_proj.weight, mlp.down_proj.weight, mlp.gate_proj.weight)

    def cast(run):
        def inside(x):
            with torch.autocast("cpu", torch.bfloat16):
                return run(x).float()

        return inside

    found, theirs = (module_grads(mlp, x, cast(run)) for run in (mlp, stock))
    exact = module_grads(copy.deepcopy(mlp).double(), x.double())
    for ours, dense, true in zip(found, theirs, exact, strict=True):
        assert_accurate(ours, true, dense, "gradient")


def test_gradient_accumulation():
    mlp, (first, second) = module(ROW), (inputs(1), inputs(2))
    wanted = module_grads(mlp, torch.cat([first, second]))[1:]
    mlp.zero_grad(set_to_none=True)
    for x in (first, second):
        mlp(x).square().sum().backward()
    assert_same([parameter.grad for parameter in mlp.parameters()], wanted)


def test_loss_curves_of_sparse_and_dense_training_agree():
    """200 steps from the same seed, in float32: rounding is all that differs."""

    def train(plan):
        torch.manual_seed(0)
        layers = torch.nn.Sequential(*(SparseMLP(64, 256, plan=plan, record=True) for _ in range(2)))
        head = torch.nn.Linear(64, 16)
        optimizer = torch.optim.SGD([*layers.parameters(), *head.parameters()], lr=0.05)
        generator = torch.Generator().manual_seed(1)
        target = torch.randn(64, 16, generator=generator)
        losses = []
        for _ in range(200):
            x = torch.randn(64, 64, generator=generator)
            loss = torch.nn.functional.cross_entropy(head(x + layers(x)), (x @ target).argmax(-1))
            penalty = sum(layer.last_stats.l1 for layer in layers)
            optimizer.zero_grad()
            (loss + 1e-3 * penalty).backward()
            optimizer.step()
            losses.append(loss.item())
        return torch.tensor(losses)

    dense, sparse = train(Plan(path="dense")), train(ROW)
    assert dense[-20:].mean() < 0.8 * dense[:20].mean()
    torch.testing.assert_close(sparse, dense, rtol=1e-3, atol=1e-3)


@pytest.fixture
def one_process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_ddp(one_process_group):
    mlp, x = module(ROW), inputs()
    wanted = module_grads(mlp, x)
    assert_same(module_grads(mlp, x, torch.nn.parallel.DistributedDataParallel(mlp)), wanted)


def test_fsdp2(one_process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mlp, x = module(ROW, neuron_major=False), inputs()
    wanted = module_grads(mlp, x)
    sharded = module(ROW, neuron_major=False)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an output that is a view would lose hooks to in-place operations
        found = module_grads(sharded, x)
    assert_same([found[0], *(grad.full_tensor() for grad in found[1:])], wanted)
