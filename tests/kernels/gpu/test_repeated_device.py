"""Repeated launches on a GPU: streams, threads, graphs, weights that move, steps inside checkpoints."""

from __future__ import annotations

import copy
import gc
import threading
from contextlib import contextmanager

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from twell import Plan, SparseMLP, explain, recorded_paths
from twell.kernels.gpu.dense import FusedHidden

from .test_device import assert_exact, fire, tokens_of, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BLOCK = Plan(path="block")
HIDDEN, NEURONS = 1024, 4096


def module_of(nnz=24, plan=BLOCK, **options):
    up, down, gate = weights(HIDDEN, NEURONS)
    fire(gate, nnz)
    module = SparseMLP(HIDDEN, NEURONS, plan=plan, device="cuda", dtype=torch.bfloat16, **options)
    names = ("up_proj.weight", "down_proj.weight", "gate_proj.weight")
    module.load_state_dict(dict(zip(names, (up, down.contiguous(), gate), strict=True)))
    return module


def assert_exact_module(y, x, module):
    assert_exact(y, x, module.up_proj.weight, module.down_proj.weight, module.gate_proj.weight)


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@contextmanager
def only_repeated(monkeypatch):
    """A call inside that is not repeated fails."""
    with monkeypatch.context() as patched:
        patched.setattr("twell.functional._run", None)
        yield


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize(
    "numbers", [(1,), (7, 5, 8), (40, 33, 48), (100, 65, 128), (1000, 961, 1024), (5000, 4993)]
)
def test_numbers_of_tokens_of_one_bucket(monkeypatch, numbers):
    module = module_of()
    module(tokens_of(numbers[0], HIDDEN))
    for count in numbers * 2:
        x = tokens_of(count, HIDDEN)
        with only_repeated(monkeypatch):
            y = module(x)
        assert_exact_module(y, x, module)


@pytest.mark.usefixtures("no_grad")
def test_several_streams():
    module = module_of()
    xs = [tokens_of(count, HIDDEN) for count in (1, 8, 1000, 3000) for _ in range(3)]
    expected = [module(x) for x in xs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    for turn in range(20):
        found = []
        for number, x in enumerate(xs):
            with torch.cuda.stream(streams[(number + turn) % 3]):
                found.append(module(x))
        torch.cuda.synchronize()
        for y, want in zip(found, expected, strict=True):
            assert torch.equal(y, want)


@pytest.mark.parametrize("own_stream", [True, False])
def test_several_threads(own_stream):
    """On one stream launches of several threads interleave: no call may find another's workspace."""
    module = module_of()
    xs = [tokens_of(count, HIDDEN) for count in (1, 8, 500, 1000)]
    with torch.no_grad():
        expected = [module(x) for x in xs]
    torch.cuda.synchronize()
    wrong = []

    def work(first):
        stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
        try:
            with torch.no_grad(), torch.cuda.stream(stream):
                for turn in range(100):
                    number = (first + turn) % len(xs)
                    y = module(xs[number])
                    stream.synchronize()
                    if not torch.equal(y, expected[number]):
                        wrong.append((first, turn))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("count", [1, 1000])
def test_a_graph_owns_its_workspace_and_may_be_dropped(count):
    module = module_of()
    x, other = tokens_of(count, HIDDEN), tokens_of(count, HIDDEN)
    expected = [module(t) for t in (x, other)]
    module(x)  # prepared
    graph, static = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph):
        y = module(static)
    side = torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(side):
            graph.replay()
        eager = module(other)
        torch.cuda.synchronize()
        assert torch.equal(y, expected[0])
        assert torch.equal(eager, expected[1])
    del graph, y
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.equal(module(other), expected[1])


@pytest.mark.usefixtures("no_grad")
def test_dense_calls_are_captured_as_they_are_repeated(monkeypatch):
    """With their hidden values in one kernel, if an earlier call has loaded it."""
    module = module_of(plan=Plan(path="dense"))
    x = tokens_of(100, HIDDEN)
    for _ in range(3):
        module(x)
    fused, run = [], FusedHidden.__call__
    monkeypatch.setattr(
        FusedHidden, "__call__", lambda self, *given: fused.append(given) or run(self, *given)
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(x)
    assert len(fused) == 1
    for _ in range(3):
        x.copy_(tokens_of(100, HIDDEN))
        graph.replay()
        assert_exact_module(y, x, module)


@pytest.mark.usefixtures("no_grad")
def test_a_capture_inside_of_what_was_captured_before():
    """A graph is captured while another stream captures, too, and between calls that are repeated."""
    module = module_of()
    xs = [tokens_of(count, HIDDEN) for count in (1, 1000)]
    expected = [module(x) for x in xs]
    graphs, found = [torch.cuda.CUDAGraph() for _ in xs], []
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    for stream, graph in zip(streams, graphs, strict=True):
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="relaxed")
    for stream, x in zip(streams, xs, strict=True):
        with torch.cuda.stream(stream):
            found.append(module(x))
    for stream, graph in zip(streams, graphs, strict=True):
        with torch.cuda.stream(stream):
            graph.capture_end()
    for _ in range(3):
        for graph in graphs:
            graph.replay()
        assert torch.equal(module(xs[0]), expected[0])
        torch.cuda.synchronize()
        for y, want in zip(found, expected, strict=True):
            assert torch.equal(y, want)


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("count", [3, 1000])
def test_weights_that_move(count):
    module = module_of()
    x = tokens_of(count, HIDDEN)

    def check(module):
        for _ in range(3):
            assert_exact_module(module(x), x, module)

    check(module)
    kept = [p.data for p in module.parameters()]  # so that the new ones lie elsewhere
    for parameter in module.parameters():
        parameter.data = parameter.data.clone(memory_format=torch.preserve_format)
    check(module)
    module.load_state_dict({name: 2 * t for name, t in module.state_dict().items()}, assign=True)
    check(module)
    module.cpu().cuda()
    check(module)
    module.float().bfloat16()
    check(module)
    check(copy.deepcopy(module))
    module.down_proj.weight.data = module.down_proj.weight.data.contiguous()
    check(module)
    for parameter in module.parameters():
        parameter.mul_(-1)
    check(module)
    del kept


@pytest.mark.usefixtures("no_grad")
def test_a_profiler_hears_of_repeated_launches():
    knobs = pytest.importorskip("triton.knobs")
    if not hasattr(knobs.runtime.launch_enter_hook, "add"):
        pytest.skip("this Triton has no chains of hooks")
    module, x, heard = module_of(), tokens_of(2, HIDDEN), []
    for _ in range(3):
        module(x)

    def hook(metadata):
        heard.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        module(x)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert len(heard) == 2
    module(x)
    assert len(heard) == 2


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("nnz", [24, NEURONS])
@pytest.mark.parametrize("count", [1, 4000])
def test_an_automatic_plan_reads_on_the_way(nnz, count):
    """Whichever way it runs, a call finds the layer as active as it is."""
    module = module_of(nnz, plan=None)
    x = tokens_of(count, HIDDEN)
    shares = []
    with recorded_paths() as ran:
        for _ in range(20):
            module(x)
            torch.cuda.synchronize()
            (reading,) = module._layer.readings().values()
            shares.append(reading.share)
    rows = 128 if count > 64 else count
    active = (x.float() @ module.gate_proj.weight.float().mT > 0).split(rows)
    union = sum(part.any(0).float().mean().item() for part in active) / len(active)
    assert shares[0] == pytest.approx(union, abs=0.02)
    assert shares[-1] == pytest.approx(union, abs=0.02)
    paths = [piece.path for piece in ran]
    sparse = "decode" if count <= 64 else "block"
    assert paths[0] == sparse
    assert paths[1:] == [sparse if nnz == 24 else "dense"] * 19
    assert ("dense" in str(explain(module))) == (nnz != 24)


def test_steps_repeat_on_any_thread_and_stream():
    module = module_of(record=True)
    x = tokens_of(2000, HIDDEN).requires_grad_()
    weighting = torch.randn(2000, HIDDEN, device="cuda")

    def step():
        y = module(x)
        loss = (y.float() * weighting).sum() + module.last_stats.l1
        return torch.autograd.grad(loss, (x, *module.parameters()))

    expected = step()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for turn in range(6):
        here = stream if turn % 2 else torch.cuda.current_stream()
        with torch.cuda.stream(here), torch.autograd.set_multithreading_enabled(turn < 4):
            found = step()
        torch.cuda.synchronize()
        for gradient, want in zip(found, expected, strict=True):
            assert torch.equal(gradient, want)


@pytest.mark.parametrize("plan", [BLOCK, None], ids=["block", "auto"])
def test_steps_in_and_outside_of_checkpoints_take_turns(plan):
    hidden, neurons, count = 2048, 5632, 4096
    up, down, gate = weights(hidden, neurons)
    fire(gate, 24)
    module = SparseMLP(hidden, neurons, plan=plan, device="cuda", dtype=torch.bfloat16)
    names = ("up_proj.weight", "down_proj.weight", "gate_proj.weight")
    module.load_state_dict(dict(zip(names, (up, down.contiguous(), gate), strict=True)))
    x = tokens_of(count, hidden).requires_grad_()
    weighting = torch.randn(count, hidden, device="cuda")

    def step(run):
        loss = (run(x).float() * weighting).sum()
        return torch.autograd.grad(loss, (x, *module.parameters()))

    dense = SparseMLP(hidden, neurons, plan=Plan(path="dense"), device="cuda", dtype=torch.bfloat16)
    dense.load_state_dict(module.state_dict())
    dense_y = dense(x)
    expected = torch.autograd.grad((dense_y.float() * weighting).sum(), (x, *dense.parameters()))
    for turn in range(12):
        checkpointed = turn % 3 == 1
        run = (lambda x: checkpoint(module, x, use_reentrant=False)) if checkpointed else module
        found = step(run)
        torch.cuda.synchronize()
        for gradient, want in zip(found, expected, strict=True):
            assert (gradient.float() - want.float()).norm() <= 1e-2 * want.float().norm()
    assert module._layer.ran["backward"].path == "block" or plan is None
    assert module._layer.ran["forward"].path == "block"


def test_layers_compiled_inside_their_checkpoints_train_sparse():
    pytest.importorskip("transformers")
    from twell.hf import SparseLlamaConfig, SparseLlamaForCausalLM, compile_inside_checkpoints

    config = SparseLlamaConfig(
        hidden_size=512,
        intermediate_size=5632,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=512,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    model = SparseLlamaForCausalLM(config).cuda().bfloat16().train()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate_proj.weight[64:] = 0  # few neurons are ever active
    ids = torch.randint(512, (16, 1024), device="cuda")

    def loss_and_gradients():
        model.zero_grad(set_to_none=True)
        loss = model(ids, labels=ids).loss
        loss.backward()
        return loss.item(), [p.grad.float() for p in model.parameters()]

    plain, gradients = loss_and_gradients()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    compile_inside_checkpoints(model)
    with recorded_paths() as ran:
        for _ in range(6):
            found, compiled = loss_and_gradients()
            torch.cuda.synchronize()
    assert found == pytest.approx(plain, rel=1e-2)
    for gradient, want in zip(compiled, gradients, strict=True):
        assert (gradient - want).norm() <= 5e-2 * want.norm() + 1e-6
    assert [piece.path for piece in ran if piece.phase == "backward"][-1] == "block"


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("plan", [BLOCK, Plan(path="dense", backend="gpu"), None], ids=str)
@pytest.mark.parametrize("count", [8, 1000])
def test_the_op_of_a_graph_repeats(monkeypatch, count, plan, mode):
    torch._dynamo.reset()
    module = module_of(plan=plan)
    compiled = torch.compile(module, mode=mode)
    for _ in range(4):
        compiled(tokens_of(count, HIDDEN))
    if mode == "default" and plan is not None:
        monkeypatch.setattr("twell.ops.decide_inside", None)  # a call that decides fails
    for _ in range(4):
        x = tokens_of(count, HIDDEN)
        assert_exact_module(compiled(x), x, module)
        module.up_proj.weight.mul_(-0.5)


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize(
    ("activation", "gated"),
    [(name, gated) for name in ("relu", "relu2", "fatrelu(0.1)") for gated in (True, False)]
    + [("drelu", True)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_repeated_dense_calls_have_the_bits_of_the_first(dtype, gated, activation):
    module = SparseMLP(
        HIDDEN,
        NEURONS,
        gated=gated,
        activation=activation,
        plan=Plan(path="dense"),
        device="cuda",
        dtype=dtype,
    )
    for count in (1, 77, 1000):
        x = torch.randn(count, HIDDEN, device="cuda", dtype=dtype)
        x[0, 0] = float("inf")
        first = module(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            again = module(x)
            torch.cuda.synchronize()
        kernels = {event.name for event in profile.events()}
        assert ("hidden_values" in kernels) == (gated or activation == "relu2")
        torch.testing.assert_close(again, first, rtol=0, atol=0, equal_nan=True)
