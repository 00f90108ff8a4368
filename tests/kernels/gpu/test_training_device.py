"""Training kernels on a GPU: gradients against float32, bounded by twice the error of dense bf16."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from twell import (
    Plan,
    SparseMLP,
    accumulate_in_place,
    ffn,
    ffn_with_stats,
    overflowed_steps,
    recorded_paths,
    training_states,
)
from twell.activations import Activation
from twell.kernels.gpu import sizes

from ...accuracy import every_activation
from ...training import expect_overflow
from .test_device import fire, tokens_of, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BLOCK = Plan(path="block")
SHAPES = [(256, 1024), (768, 3072), (1024, 5632), (2048, 5632), (2560, 8192), (4096, 11008), (1000, 1032)]
L1_WEIGHT = 0.5


@pytest.fixture(autouse=True)
def exact_matmuls(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def leaves_of(*tensors, dtype=None):
    return [None if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]


def loss_of(result, weighting):
    """A fixed weighting of y, and L1 if there are statistics."""
    y, stats = result if isinstance(result, tuple) else (result, None)
    loss = (y.float() * weighting).sum() / 16
    return loss if stats is None else loss + L1_WEIGHT * stats


def grads(run, tensors, weighting, dtype=None):
    leaves = leaves_of(*tensors, dtype=dtype)
    wanted = [t for t in leaves if t is not None]
    return torch.autograd.grad(loss_of(run(*leaves), weighting), wanted)


def stock(activation="relu"):
    def run(x, up, down, gate=None, up_bias=None, down_bias=None, gate_bias=None):
        # As a model does it: one hidden tensor, to which the gradients of y and of L1 flow back.
        linear, act = torch.nn.functional.linear, Activation.parse(activation)
        hidden = linear(x, up, up_bias)
        hidden = torch.relu(hidden) if activation == "drelu" else hidden
        hidden = act(hidden) if gate is None else act(linear(x, gate, gate_bias)) * hidden
        return linear(hidden, down, down_bias), hidden.abs().sum(dtype=torch.float32) / x.shape[0]

    return run


def ours(activation="relu", plan=BLOCK):
    def run(x, up, down, gate=None, up_bias=None, down_bias=None, gate_bias=None):
        biases = {"up_bias": up_bias, "down_bias": down_bias, "gate_bias": gate_bias}
        y, stats = ffn_with_stats(x, up, down, gate, activation=activation, plan=plan, **biases)
        return y, stats.l1

    return run


def ambiguous(activation, x, up, down, gate=None, up_bias=None, down_bias=None, gate_bias=None):
    """bool [M]: tokens with a pre-activation within a rounding of the threshold, or of drelu's up of 0."""
    selector, bias = (up, up_bias) if gate is None else (gate, gate_bias)
    pre = x.float() @ selector.float().mT - Activation.parse(activation).threshold
    pre = pre if bias is None else pre + bias.float()
    near = (pre.abs() < 2e-5).any(1)
    if activation == "drelu":
        lifted = x.float() @ up.float().mT
        near |= ((lifted if up_bias is None else lifted + up_bias.float()).abs() < 2e-5).any(1)
    return near


def assert_accurate(tensors, activation="relu", plan=BLOCK):
    weighting = torch.randn(tensors[0].shape[0], tensors[2].shape[0], device="cuda")
    # The gradient jumps where a pre-activation crosses 0: tokens so close to it say nothing about errors.
    weighting[ambiguous(activation, *tensors)] = 0
    found = grads(ours(activation, plan), tensors, weighting)
    dense = grads(stock(activation), tensors, weighting)
    exact = grads(stock(activation), tensors, weighting, dtype=torch.float32)
    for place, (f, d, e) in enumerate(zip(found, dense, exact, strict=True)):
        scale = e.norm().item()
        error, bound = ((f.float() - e).norm().item(), (d.float() - e).norm().item())
        assert f.isfinite().all()
        assert error <= 2 * bound + 1e-6 * scale + 1e-12, f"gradient {place}: {error} over 2 x {bound}"


@pytest.mark.parametrize(("hidden", "neurons"), SHAPES)
def test_gradients_over_tokens_and_sparsity(monkeypatch, hidden, neurons):
    up, down, gate = weights(hidden, neurons)
    for nnz in (0, 24, neurons // 8, neurons):
        fire(gate, nnz)
        for count, one_round in (
            (1, True),
            (7, False),
            (128, False),
            (129, True),
            (1000, False),
            (4096, True),
        ):
            monkeypatch.setattr(sizes, "ONE_ROUND_BYTES", 1 << 40 if one_round else 0)
            assert_accurate((tokens_of(count, hidden), up, down, gate))


@pytest.mark.parametrize("outputs", [64, 512, 1000])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("rows", [64, 128])
def test_other_numbers_of_outputs(outputs, gated, rows):
    up, _, gate = weights(256, 1024)
    _, down, _ = weights(outputs, 1024)
    gate = gate if gated else None
    for nnz in (20, 1024):
        fire(gate if gated else up, nnz)
        plan = Plan(path="block", block_rows=rows)
        assert_accurate((tokens_of(1000, 256), up, down, gate), plan=plan)


def test_an_expected_overflow_goes_one_round(monkeypatch):
    monkeypatch.setattr(sizes, "ONE_ROUND_BYTES", 0)
    expect_overflow(monkeypatch)
    up, down, gate = weights(512, 2048)
    before = overflowed_steps()
    for nnz in (24, 900, 2048):
        fire(gate, nnz)
        assert_accurate((tokens_of(3000, 512), up, down, gate))
    up, down, gate = weights(256, 5632)
    fire(gate, 3000)
    assert_accurate((tokens_of(65536, 256), up, down, gate))  # the largest room: 2.2 GB
    assert overflowed_steps() == before


@pytest.mark.parametrize("needed", range(4), ids=["x", "up", "down", "gate"])
def test_one_gradient_alone(needed):
    up, down, gate = weights(512, 2048)
    fire(gate, 50)
    tensors, weighting = (tokens_of(2000, 512), up, down, gate), torch.randn(2000, 512, device="cuda")
    wanted = grads(ours(), tensors, weighting)[needed]
    leaves = [t.detach() for t in tensors]
    leaves[needed].requires_grad_()
    (found,) = torch.autograd.grad(loss_of(ours()(*leaves), weighting), [leaves[needed]])
    assert torch.equal(found, wanted)


def test_many_tokens():
    up, down, gate = weights(2048, 5632)
    for nnz in (24, 600):
        fire(gate, nnz)
        assert_accurate((tokens_of(16384, 2048), up, down, gate))


@every_activation(0.1)
def test_activations_and_biases(activation, gated):
    up, down, gate = weights(1024, 4096)
    fire(gate if gated else up, 100)
    biases = [torch.randn(n, device="cuda").bfloat16() / 16 for n in (4096, 1024, 4096)]
    if not gated:
        gate, biases[2] = None, None
    for count in (130, 2000):
        assert_accurate((tokens_of(count, 1024), up, down, gate, *biases), activation)


@pytest.mark.parametrize("rows", [64, 128])
def test_rows_of_a_block(rows):
    up, down, gate = weights(512, 2048)
    fire(gate, 50)
    assert_accurate((tokens_of(3000, 512), up, down, gate), plan=Plan(path="block", block_rows=rows))


def test_the_portable_kernels(monkeypatch):
    from twell.kernels.gpu.backward_launches import BackwardLaunches

    monkeypatch.setattr(BackwardLaunches, "_hopper_fits", lambda self: False)
    up, down, gate = weights(512, 2048)
    for nnz in (20, 2048):
        fire(gate, nnz)
        for count in (5, 1000):
            assert_accurate((tokens_of(count, 512), up, down, gate))


def test_same_bits_every_time():
    up, down, gate = weights(1024, 4096)
    fire(gate, 64)
    tensors, weighting = (tokens_of(5000, 1024), up, down, gate), torch.randn(5000, 1024, device="cuda")
    first, second = (grads(ours(), tensors, weighting) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_no_synchronisation():
    up, down, gate = weights(1024, 4096)
    fire(gate, 64)
    tensors, weighting = (tokens_of(5000, 1024), up, down, gate), torch.randn(5000, 1024, device="cuda")
    grads(ours(), tensors, weighting)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            grads(ours(), tensors, weighting)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_in_a_cuda_graph():
    up, down, gate = weights(1024, 4096)
    fire(gate, 64)
    x, weighting = tokens_of(3000, 1024), torch.randn(3000, 1024, device="cuda")
    leaves = leaves_of(x, up, down, gate)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            torch.autograd.grad(loss_of(ours()(*leaves), weighting), leaves)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = torch.autograd.grad(loss_of(ours()(*leaves), weighting), leaves)
    with torch.no_grad():
        leaves[0].copy_(tokens_of(3000, 1024))
    graph.replay()
    torch.cuda.synchronize()
    wanted = torch.autograd.grad(loss_of(ours()(*leaves), weighting), leaves)
    assert all(torch.equal(a, b) for a, b in zip(captured, wanted, strict=True))


def module(hidden=1024, neurons=4096, nnz=48, **options):
    up, down, gate = weights(hidden, neurons)
    fire(gate, nnz)
    mlp = SparseMLP(hidden, neurons, device="cuda", dtype=torch.bfloat16, **options)
    state = {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": down.contiguous()}
    mlp.load_state_dict(state)
    return mlp


def module_grads(mlp, x, run=None):
    mlp.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    y = (mlp if run is None else run)(x)
    y.float().square().sum().backward()
    return [x.grad, *(p.grad for p in mlp.parameters())]


def test_a_compiled_step():
    mlp, x = module(plan=BLOCK), tokens_of(4096, 1024)
    wanted = module_grads(mlp, x)
    found = module_grads(mlp, x, torch.compile(mlp, fullgraph=True))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    mlp, x = module(plan=BLOCK), tokens_of(4096, 1024)
    wanted = module_grads(mlp, x)
    found = module_grads(mlp, x, lambda x: checkpoint(mlp, x, use_reentrant=reentrant))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_autocast_with_float32_weights():
    mlp, x = module(plan=BLOCK), tokens_of(4096, 1024)
    wanted = module_grads(mlp, x)
    master = SparseMLP(1024, 4096, device="cuda", plan=BLOCK)
    master.load_state_dict({name: value.float() for name, value in mlp.state_dict().items()})

    def run(x):
        with torch.autocast("cuda", torch.bfloat16):
            return master(x)

    found = module_grads(master, x, run)
    for f, w in zip(found, wanted, strict=True):
        assert (f.float() - w.float()).norm() <= 0.01 * w.float().norm()
    assert all(p.grad.dtype == torch.float32 for p in master.parameters())


@pytest.mark.parametrize(("nnz", "sparse"), [(24, True), (5632, False)])
def test_layers_switch_by_how_active_they_are(nnz, sparse):
    mlp, x, known = module(2048, 5632, nnz), tokens_of(8192, 2048), len(training_states())
    for _ in range(6):
        module_grads(mlp, x)
        torch.cuda.synchronize()
    with recorded_paths() as ran:
        module_grads(mlp, x)
    ours = [("block", "forward"), ("block", "backward")]
    assert [(piece.path, piece.phase) for piece in ran] == (ours if sparse else [("dense", "forward")])
    (state,) = training_states()[known:]
    assert state.sparse is sparse
    assert state.switches == int(sparse)


@pytest.mark.parametrize(("nnz", "sparse"), [(24, True), (5632, False)])
def test_layers_switch_between_compiled_graphs(nnz, sparse):
    mlp, x = module(2048, 5632, nnz, record=True), tokens_of(8192, 2048)
    known = len(training_states())
    wanted = module_grads(mlp, x)
    mlp.eager = True
    compiled = torch.compile(lambda x: mlp(x * 2) / 2)
    for _ in range(6):
        found = module_grads(mlp, x / 2, compiled)
        torch.cuda.synchronize()
    (state,) = training_states()[known:]
    assert state.sparse is sparse
    assert mlp.last_stats.l1.requires_grad
    scales = (2.0 / 2**2, *[1 / 2**2] * 3)  # of the loss, and of x
    for f, w, scale in zip(found, wanted, scales, strict=True):
        assert (f.float() / scale - w.float()).norm() <= 0.01 * w.float().norm()


def test_layers_switch_apart_under_autocast():
    """Casts of float32 weights live for one call and may follow each other at one address."""
    layers, x = [module(2048, 5632, nnz).float() for nnz in (24, 5632)], tokens_of(8192, 2048)
    known = len(training_states())
    for _ in range(12):
        for mlp in layers:
            with torch.autocast("cuda", torch.bfloat16):
                loss = mlp(x).square().mean()
            loss.backward()
        torch.cuda.synchronize()
    assert [state.sparse for state in training_states()[known:]] == [True, False]


def test_loss_curves_of_sparse_and_dense_training_agree():
    """200 steps from the same seed: the gap stays within what bf16 noise makes between two dense runs."""

    def train(plan, noise=0.0):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(SparseMLP(256, 1024, plan=plan, record=True) for _ in range(2)))
        model = model.to("cuda", torch.bfloat16)
        head = torch.nn.Linear(256, 64, device="cuda", dtype=torch.bfloat16)
        parameters = [*model.parameters(), *head.parameters()]
        with torch.no_grad():
            parameters[0].mul_(1 + noise)
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        generator = torch.Generator("cuda").manual_seed(1)
        target = torch.randn(256, 64, device="cuda", generator=generator)
        losses = []
        for _ in range(200):
            x = torch.randn(1024, 256, device="cuda", generator=generator)
            wanted = (x @ target).argmax(-1)
            logits = head(x.bfloat16() + model(x.bfloat16()))
            loss = torch.nn.functional.cross_entropy(logits.float(), wanted)
            penalty = sum(layer.last_stats.l1 for layer in model)
            optimizer.zero_grad()
            (loss + 1e-3 * penalty).backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses).float()

    dense, sparse = train(Plan(path="dense")), train(BLOCK)
    noisy = train(Plan(path="dense"), noise=2**-7)
    assert dense[-20:].mean() < 0.6 * dense[0]
    gap, noise = (dense - sparse).abs()[-100:].mean(), (dense - noisy).abs()[-100:].mean()
    assert gap <= 3 * noise + 1e-3


def test_nan_reaches_the_gradients_of_what_it_meets():
    up, down, gate = weights(512, 2048)
    fire(gate, 50)
    x = tokens_of(600, 512)
    x[3, 5] = float("nan")
    found = grads(lambda *t: ffn(*t, plan=BLOCK), (x, up, down, gate), torch.ones(600, 512, device="cuda"))
    assert found[0][3].isnan().all()
    assert not found[0][:3].isnan().any()
    assert found[1].isnan().any()


@pytest.mark.parametrize("sum_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("nnz", "one_round"), [(24, True), (700, False), (700, True), (2048, False)])
def test_gradients_are_added_in_place(monkeypatch, nnz, one_round, sum_dtype):
    """Frequent and rare neurons and rounds: added in place, within what autograd's roundings allow."""
    monkeypatch.setattr(sizes, "ONE_ROUND_BYTES", 1 << 40 if one_round else 0)
    up, down, gate = weights(512, 2048)
    fire(gate, nnz)
    parts = [tokens_of(2000, 512) for _ in range(3)]
    weighting = torch.randn(2000, 512, device="cuda")

    def accumulated(in_place):
        leaves = leaves_of(up, down, gate)
        for leaf in leaves:
            leaf.grad_dtype = sum_dtype
        for x in parts:
            loss = loss_of(ffn(x, *leaves, plan=BLOCK), weighting)
            with accumulate_in_place() if in_place else nullcontext():
                loss.backward()
        return [leaf.grad for leaf in leaves]

    exact = [
        sum(g.float() for g in each)
        for each in zip(
            *(grads(stock(), (x, up, down, gate), weighting, dtype=torch.float32)[1:] for x in parts),
            strict=True,
        )
    ]
    for ours_, autograds, e in zip(accumulated(True), accumulated(False), exact, strict=True):
        assert ours_.dtype == autograds.dtype == sum_dtype
        bound = (autograds.float() - e).norm()
        assert (ours_.float() - e).norm() <= 1.1 * bound
