"""Sparsified models under torch's tools: tracers, exporters, replicas, shared memory, sharding."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn

from twell import densify_, recorded_paths, sparsify_

from .stock_blocks import ROW, D, Gated, H, Layer, Pair, Plain, model_of, multiply, paths


class Alone(nn.Module):
    """As `Layer`, without optional arguments: a tracer cannot ask whether they are None."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2, self.act = nn.LayerNorm(D), nn.Linear(D, H), nn.Linear(H, D), nn.ReLU()

    def forward(self, x):
        return x + self.fc2(self.act(self.fc1(self.norm(x))))


MODELS = {
    "own": lambda: Gated(multiply),
    "carried": Alone,
    "pair": Pair,
    "nested": lambda: model_of(Gated(multiply), Alone(), Pair()),
}


@pytest.fixture(params=MODELS)
def models(request):
    """(sparsified, stock)"""
    torch.manual_seed(0)
    stock = MODELS[request.param]().eval().requires_grad_(False)
    model = copy.deepcopy(stock)
    assert sparsify_(model, plan=ROW).blocks
    return model, stock


def assert_as_stock(graph, stock):
    """On other sizes and other numbers than it was made with."""
    for seed, tokens in enumerate([3, 5, 2]):
        torch.manual_seed(seed)
        x = 3 * torch.randn(tokens, 4, D)
        torch.testing.assert_close(graph(x), stock(x))


def test_jit_trace(models):
    model, stock = models
    traced = torch.jit.trace(model, (torch.randn(3, 4, D),))
    assert_as_stock(traced, stock)
    assert paths(model, torch.randn(3, 4, D))[1]  # the model itself goes on


def test_jit_script_says_what_to_do(models):
    model, stock = models
    with pytest.raises(RuntimeError, match=r"twell\.densify_"):
        torch.jit.script(model)
    assert_as_stock(model, stock)
    assert paths(model, torch.randn(3, 4, D))[1]


def test_fx(models):
    model, stock = models
    assert_as_stock(torch.fx.symbolic_trace(model), stock)


@pytest.mark.parametrize("strict", [False, True])
def test_export(models, strict, fresh_compiler):
    model, stock = models
    sizes = {0: torch.export.Dim("rows", min=2, max=99)}
    exported = torch.export.export(model, (torch.randn(3, 4, D),), dynamic_shapes=(sizes,), strict=strict)
    assert any("twell" in str(node.target) for node in exported.graph.nodes if node.op == "call_function")
    assert_as_stock(exported.module(), stock)


def test_signatures_are_stocks(models):
    model, stock = models
    for one, other in zip(model.modules(), stock.modules(), strict=True):
        assert inspect.signature(one.forward) == inspect.signature(other.forward)


def replica_of(model: nn.Module) -> nn.Module:
    """As `torch.nn.parallel.replicate` makes one, which wants GPUs: other weights, as plain tensors."""
    copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in copies.items():
        for name, child in module._modules.items():
            if child is not None:
                setattr(replica, name, copies[child])
        for name, parameter in module._parameters.items():
            if parameter is None:
                replica._parameters[name] = None
            else:
                setattr(replica, name, parameter.detach().clone())
    return copies[model]


def test_replicas(models):
    model, stock = models
    replica = replica_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_as_stock(replica, stock)


@pytest.mark.parametrize("around", ["plain", "lora"])
def test_weights_in_shared_memory_stay_there(models, around):
    model, stock = models
    densify_(model)
    model.share_memory()
    places = [parameter.data_ptr() for parameter in model.parameters()]
    sparsify_(model, plan=ROW)
    if around == "lora":
        peft = pytest.importorskip("peft")
        names = {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        config = peft.LoraConfig(r=2, target_modules=sorted(names))
        model = peft.get_peft_model(nn.Sequential(model), config).eval()
    assert_as_stock(model, stock)
    shared = [p for name, p in model.named_parameters() if "lora" not in name]
    assert all(parameter.is_shared() for parameter in shared)
    assert [parameter.data_ptr() for parameter in shared] == places


@pytest.mark.parametrize("kind", [Plain, Layer])
def test_a_class_that_is_patched_later(kind, monkeypatch):
    model, x = model_of(Plain(nn.ReLU()) if kind is Plain else Layer()).eval(), torch.randn(2, 3, D)
    stock = copy.deepcopy(model)
    sparsify_(model, plan=ROW)
    assert paths(model, x)[1] == ["row"]

    def patched(self, x):
        first, last = (self.one, self.two) if kind is Plain else (self.fc1, self.fc2)
        hidden = first(x)
        return last(torch.relu(hidden)) + hidden.mean()

    monkeypatch.setattr(kind, "forward", patched)
    with recorded_paths() as ran:
        torch.testing.assert_close(model(x), stock(x))
    assert not ran


def test_a_dropout_inside_the_last_module():
    """On while the model is in evaluation mode, as Monte Carlo dropout has it."""
    model, x = Pair(Drops()).eval(), torch.randn(2, 3, D)
    stock = copy.deepcopy(model)
    assert len(sparsify_(model, plan=ROW).blocks) == 1
    assert paths(model, x)[1] == ["row"]
    for one in (model, stock):
        one.last.drop.train()
    torch.manual_seed(1)
    wanted = stock(x)
    torch.manual_seed(1)
    torch.testing.assert_close(model(x), wanted)


class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.dense, self.norm = nn.Dropout(0.5), nn.Linear(H, D), nn.LayerNorm(D)

    def forward(self, hidden, residual):
        hidden = self.drop(hidden)
        hidden = self.dense(hidden)
        return self.norm(hidden + residual)


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard(model: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    for child in model:
        fully_shard(child)
    fully_shard(model)


def test_fsdp2(one_process):
    """It wants contiguous parameters; sharded, they come together in every call."""
    hf = pytest.importorskip("twell.hf")
    stock, x = model_of().double(), torch.randn(2, 3, D, dtype=torch.float64)
    model = copy.deepcopy(stock)
    sparsify_(model, plan=ROW)
    with pytest.raises(NotImplementedError, match="contiguous"):
        shard(copy.deepcopy(model))
    hf.set_neuron_major(model, False)
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    shard(model)
    found, ran = paths(model, x)
    assert ran == ["row"] * 4
    wanted = stock(x)
    torch.testing.assert_close(found, wanted)
    found.square().sum().backward()
    wanted.square().sum().backward()
    for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_sharded_first(one_process):
    model, x = model_of(), torch.randn(2, 3, D)
    wanted = model(x)
    shard(model)
    report = sparsify_(model)
    assert not report.blocks
    assert all("sharded" in skipped.reason for skipped in report.skipped)
    torch.testing.assert_close(model(x), wanted)


def test_the_layout_goes_both_ways():
    hf = pytest.importorskip("twell.hf")
    model, x = model_of().eval(), torch.randn(2, 3, D)
    wanted = model(x)
    sparsify_(model, plan=ROW)
    by_neuron = [parameter.stride() for parameter in model.parameters()]
    hf.set_neuron_major(model, False)
    torch.testing.assert_close(model(x), wanted)
    hf.set_neuron_major(model, True)
    assert [parameter.stride() for parameter in model.parameters()] == by_neuron
    torch.testing.assert_close(model(x), wanted)
