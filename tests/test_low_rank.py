"""LoRA on sparse blocks: outputs and gradients are those of peft's own forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import twell
from twell import policy
from twell.nn import SparseMLP

from .accuracy import assert_accurate

peft = pytest.importorskip("peft")

HIDDEN, NEURONS = 48, 104
ALL = ("gate_proj", "up_proj", "down_proj")
ROW = twell.Plan.parse("row")


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.mlp = SparseMLP(HIDDEN, NEURONS, **{"plan": ROW} | options)

    def forward(self, x):
        return self.mlp(x)


def adapted(targets=ALL, gated=True, dtype=torch.float32, autocast_adapter_dtype=True, options=None, **lora):
    """A block with LoRA, whose B are not zero."""
    torch.manual_seed(0)
    model = Model(gated=gated, **options or {}).to(dtype)
    targets = [name for name in targets if gated or name != "gate_proj"]
    config = peft.LoraConfig(
        **{"r": 5, "lora_alpha": 12, "target_modules": targets, "init_lora_weights": False} | lora
    )
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=autocast_adapter_dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B.default.bias"):
            nn.init.normal_(parameter)
    return model


def mlp_of(model) -> SparseMLP:
    return model.base_model.model.mlp


def as_peft(model):
    """A copy that runs peft's own forward."""
    twin = copy.deepcopy(model)
    mlp_of(twin)._adapt = lambda x: "a test says so"
    return twin


def inputs(*leading, dtype=torch.float32, hidden=HIDDEN):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*leading, hidden, generator=generator).to(dtype)


def step(model, x, backward=True):
    """y, and the gradients of x and of every trained parameter, by name."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = model(x)
    found = {"y": y.detach()}
    if backward:
        y.backward(torch.linspace(-1, 2, y.numel()).view_as(y).to(y.dtype))
        found["x"] = x.grad
        found |= {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    return found


def assert_same(results, expected):
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            results[name], value, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def paths_of(model, x) -> list[str]:
    with twell.recorded_paths() as paths, torch.no_grad():
        model(x)
    return [ran.path for ran in paths]


def is_sparse(model) -> bool:
    return paths_of(model, inputs(6)) == ["row"]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("targets", [ALL, ("up_proj",), ("gate_proj", "down_proj"), ("down_proj",)])
@pytest.mark.parametrize("leading", [(2, 9), (1,)])
def test_as_peft(gated, targets, leading):
    model = adapted(targets, gated, options={"bias": True})
    with twell.recorded_paths() as paths:
        found = step(model, inputs(*leading))
    assert paths[0].path == "row"
    assert_same(found, step(as_peft(model), inputs(*leading)))


@pytest.mark.parametrize(
    "lora",
    [
        {"use_rslora": True},
        {"bias": "all"},
        {"bias": "lora_only"},
        {"lora_bias": True},
        {"r": 1},
        {"rank_pattern": {"up_proj": 40}},
        {"lora_dropout": 0.5},  # in evaluation
    ],
    ids=str,
)
@pytest.mark.parametrize("activation", ["relu", "relu2", "fatrelu(0.1)", "drelu"])
def test_kinds_of_lora(lora, activation):
    model = adapted(options={"bias": True, "activation": activation}, **lora).eval()
    assert is_sparse(model)
    assert_same(step(model, inputs(7)), step(as_peft(model), inputs(7)))


def test_sparse_backward(monkeypatch):
    """On active pairs, with few of them."""
    monkeypatch.setattr(policy.cpu, "_WORTH_LOOKING_SECONDS", 0.0)
    monkeypatch.setattr(policy.cpu, "_MIN_HIDDEN", 1)
    model = adapted(options={"bias": True})
    mlp_of(model).gate_proj.base_layer.bias.data -= 2.5
    with twell.recorded_paths() as paths:
        found = step(model, inputs(64))
    assert [(ran.phase, ran.path) for ran in paths] == [("forward", "row"), ("backward", "row")]
    assert_same(found, step(as_peft(model), inputs(64)))


@pytest.mark.parametrize("adapters", ["float32", "bfloat16"])
@pytest.mark.parametrize("gated", [True, False])
def test_bfloat16(adapters, gated):
    model = adapted(gated=gated, dtype=torch.bfloat16, autocast_adapter_dtype=adapters == "float32")
    assert mlp_of(model).up_proj.lora_A["default"].weight.dtype == getattr(torch, adapters)
    x = inputs(64, dtype=torch.bfloat16)
    found, stock = step(model, x), step(as_peft(model), x)
    exact = step(as_peft(model).double(), x.double())
    assert paths_of(model, x) == ["row"]
    for name, value in found.items():
        assert_accurate(value, exact[name], stock[name], name)


def test_autocast():
    model = adapted()
    x = inputs(64)
    with torch.autocast("cpu", torch.bfloat16):
        found, stock = step(model, x), step(as_peft(model), x)
    exact = step(as_peft(model).double(), x.double())
    for name, value in found.items():
        assert_accurate(value, exact[name], stock[name], name)


def test_statistics():
    model = adapted(options={"record": True})
    twin = as_peft(model)
    model(inputs(9)), twin(inputs(9))
    stats, expected = mlp_of(model).last_stats, mlp_of(twin).last_stats
    torch.testing.assert_close(stats.l1, expected.l1)
    assert stats.firing.tolist() == expected.firing.tolist()


def test_weights_are_stored_once():
    model = adapted()
    weights = [getattr(mlp_of(model), name).base_layer.weight for name in ALL]
    before = [weight.detach().clone() for weight in weights]
    model(inputs(3))
    adapted_block = mlp_of(model)._adapt(inputs(3))
    _x, up, down, gate, *_ = adapted_block.tensors
    for weight, old, operand in zip(weights, before, (gate, up, down), strict=True):
        assert torch.equal(weight, old)
        assert operand.data_ptr() == weight.data_ptr()
        assert operand.is_contiguous() or operand.mT.is_contiguous()
        assert operand.shape[0] % 8 == 0
        assert operand.shape[1] % 8 == 0


def test_state_dict_is_stock():
    model = adapted()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(inputs(3))
    state = model.state_dict()
    assert state.keys() == before.keys()
    for name, value in state.items():
        assert torch.equal(value, before[name])
        assert value.is_contiguous()
        assert value.untyped_storage().nbytes() == value.nbytes
    twin = adapted(use_rslora=False)
    for parameter in twin.parameters():
        nn.init.zeros_(parameter)
    twin(inputs(3))
    twin.load_state_dict(state)
    assert_same(step(twin, inputs(3)), step(model, inputs(3)))
    twin.load_state_dict(state, assign=True)
    assert_same(step(twin, inputs(3)), step(model, inputs(3)))


def test_adapters_are_saved(tmp_path):
    model = adapted()
    model(inputs(3))
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    again = peft.PeftModel.from_pretrained(Model(), tmp_path)
    assert is_sparse(again)
    torch.testing.assert_close(again(inputs(4)), model(inputs(4)))


def two_adapters():
    model = adapted(lora_alpha=7)
    config = peft.LoraConfig(r=11, target_modules=["up_proj", "down_proj"], init_lora_weights=False)
    model.add_adapter("other", config)
    return model


def test_several_adapters():
    model = two_adapters()
    twin = as_peft(model)
    for name in ("default", "other", "default"):
        model.set_adapter(name), twin.set_adapter(name)
        assert is_sparse(model)
        assert_same(step(model, inputs(5)), step(twin, inputs(5)))
    for both in (model, twin):
        both.base_model.set_adapter(["default", "other"])
    assert is_sparse(model)
    assert_same(step(model, inputs(5)), step(twin, inputs(5)))
    for both in (model, twin):
        both.delete_adapter("default")
    assert is_sparse(model)
    assert_same(step(model, inputs(5)), step(twin, inputs(5)))


def test_disabled_adapters():
    model = adapted()
    torch.manual_seed(0)
    bare = Model()
    for first in (True, False):  # before there is room, and after
        with model.disable_adapter():
            assert is_sparse(model)
            torch.testing.assert_close(model(inputs(5)), bare(inputs(5)))
        if first:
            step(model, inputs(5))
    mlp_of(model).up_proj.lora_B["default"].weight.data.fill_(float("nan"))
    assert model(inputs(5)).isnan().any()
    with model.disable_adapter(), torch.no_grad():
        assert not model(inputs(5)).isnan().any()


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_merged_adapters(safe, before):
    model = adapted()
    expected = as_peft(model)(inputs(5))
    if before:
        model(inputs(5))
    model.merge_adapter(safe_merge=safe)
    assert is_sparse(model)
    torch.testing.assert_close(model(inputs(5)), expected, rtol=1e-4, atol=1e-4)
    with model.disable_adapter():  # peft unmerges
        torch.manual_seed(0)
        torch.testing.assert_close(model(inputs(5)), Model()(inputs(5)), rtol=1e-4, atol=1e-4)
    assert is_sparse(model)
    torch.testing.assert_close(model(inputs(5)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("merge", [True, False])
def test_unloaded_adapters(merge):
    model = adapted()
    torch.manual_seed(0)
    expected = (as_peft(model) if merge else Model())(inputs(5))
    model(inputs(5))
    plain = model.merge_and_unload() if merge else model.unload()
    torch.testing.assert_close(plain(inputs(5)), expected, rtol=1e-4, atol=1e-4)
    assert is_sparse(plain)
    weights = plain.mlp.gate_proj.weight, plain.mlp.up_proj.weight, plain.mlp.down_proj.weight.mT
    assert all(weight.is_contiguous() for weight in weights)
    assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in weights)


@pytest.mark.parametrize("lora", [{"lora_dropout": 0.5}, {"use_dora": True}], ids=str)
def test_left_to_peft(lora):
    model = adapted(**lora).train()
    assert paths_of(model, inputs(5)) == []
    assert "lora" in mlp_of(model)._layer.ran["forward"].reason.lower()
    twin = as_peft(model)
    torch.manual_seed(1)
    found = step(model, inputs(5))
    torch.manual_seed(1)
    assert_same(found, step(twin, inputs(5)))


def test_dense_steps_are_left_to_peft():
    """They compute the gradients of adapters alone."""
    model = adapted(options={"plan": None, "bias": True})
    with twell.recorded_paths() as paths:
        found = step(model, inputs(5))
    assert not paths
    assert_same(found, step(as_peft(model), inputs(5)))
    assert mlp_of(model)._layer.ran["forward"].path == "dense"


@pytest.mark.parametrize("kind", ["shifted", "phi3", "opt", "gpt2"])
def test_dense_steps_of_sparsified_blocks(kind):
    expected = loss_and_gradients(with_adapters(stock_model(kind), kind), kind)
    model = stock_model(kind)
    twell.sparsify_(model, plan=twell.Plan.parse("dense"))
    model = with_adapters(model, kind)
    for _ in range(2):
        assert_same(loss_and_gradients(model, kind), expected)


def test_trained_base_is_left_to_peft():
    model = adapted()
    mlp_of(model).down_proj.base_layer.weight.requires_grad_()
    assert not is_sparse(model)
    assert_same(step(model, inputs(5)), step(as_peft(model), inputs(5)))


@pytest.mark.parametrize("place", ["up_proj", "up_proj.base_layer", "up_proj.lora_A.default"])
def test_hooks_are_called(place):
    model, called = adapted(), []
    mlp_of(model).get_submodule(place).register_forward_hook(lambda *_: called.append(1))
    step(model, inputs(5))
    assert called == [1]


def test_adapters_by_row_of_the_batch():
    model = two_adapters().eval()
    names = ["default", "other", "__base__"]
    with torch.no_grad():
        y = model(inputs(3, 4), adapter_names=names)
        torch.testing.assert_close(y, as_peft(model)(inputs(3, 4), adapter_names=names))
    assert is_sparse(model)


def test_other_adapters_before_the_backward():
    """As preference training calls a model: policy, then reference, then the policy's backward."""
    model = two_adapters()
    twin = as_peft(model)

    def both_ways(model):
        model.zero_grad()
        model.set_adapter("default")
        y = model(inputs(5))
        with torch.no_grad(), model.disable_adapter():
            base = model(inputs(5))
        model.set_adapter("other")
        with torch.no_grad():
            other = model(inputs(5))
        model.set_adapter("default")
        (y * other * base).sum().backward()
        return {"other": other, "base": base} | {n: p.grad for n, p in model.named_parameters()}

    for _ in range(2):
        assert_same(both_ways(model), both_ways(twin))
    assert is_sparse(model)


def test_changed_between_two_backwards():
    model = adapted()
    y = model(inputs(5)).sum()
    y.backward(retain_graph=True)
    with torch.no_grad():
        mlp_of(model).up_proj.lora_B["default"].weight.mul_(2)
    model(inputs(5))
    with pytest.raises(RuntimeError, match="changed"):
        y.backward()


def test_changed_without_a_version():
    """As optimisers do that write through pointers."""
    model = adapted()
    model(inputs(5))
    for name in ALL:
        mlp_of(model).get_submodule(name).lora_B["default"].weight.data.mul_(-3)
        mlp_of(model).get_submodule(name).lora_A["default"].weight.data.mul_(0.5)
    assert_same(step(model, inputs(5)), step(as_peft(model), inputs(5)))


def test_training():
    model = adapted()
    twin = as_peft(model)
    for one in (model, twin):
        optimizer = torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=1e-2)
        for seed in range(6):
            torch.manual_seed(seed)
            loss = one(torch.randn(9, HIDDEN)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.model, x, use_reentrant=reentrant)

    model = adapted()
    assert_same(step(Checkpointed(model), inputs(5)), step(Checkpointed(as_peft(model)), inputs(5)))


def test_frozen_adapters():
    model = adapted().requires_grad_(False)
    assert_same(step(model, inputs(5)), step(as_peft(model), inputs(5)))
    y = model(inputs(5).requires_grad_())
    with torch.no_grad():
        mlp_of(model).up_proj.lora_B["default"].weight.mul_(2)
    assert not is_sparse(model)  # the graph of y still reads what was there
    y.sum().backward()
    assert is_sparse(model)


def test_only_what_is_trained_has_gradients():
    model = adapted()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("up_proj.lora_B" in name)
    found = step(model, inputs(5))
    assert sum("lora" in name for name in found) == 1
    assert_same(found, step(as_peft(model), inputs(5)))
    y = model(inputs(5))  # x needs none
    y.sum().backward()


def test_second_derivatives():
    model = adapted(options={"activation": "relu2"}).double()
    twin = as_peft(model)

    def second(model):
        x = inputs(3, dtype=torch.float64).requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        trained = [p for p in model.parameters() if p.requires_grad]
        return dict(enumerate(torch.autograd.grad(grad.square().sum(), trained)))

    assert_same(second(model), second(twin))


def test_inference_mode_first():
    model = adapted()
    with torch.inference_mode():
        model(inputs(5))
    assert_same(step(model, inputs(5)), step(as_peft(model), inputs(5)))
    with torch.inference_mode():
        torch.testing.assert_close(model(inputs(5)), as_peft(model)(inputs(5)))


def test_copies_and_casts():
    model = adapted()
    model(inputs(5))
    twin = copy.deepcopy(model)
    expected = step(as_peft(model), inputs(5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert is_sparse(twin)
    assert_same(step(twin, inputs(5)), expected)
    twin = twin.double()
    assert_same(step(twin, inputs(5).double()), step(as_peft(twin), inputs(5).double()))


def test_weights_that_move_before_the_backward():
    model = adapted()
    y = model(inputs(5))
    weights = [getattr(mlp_of(model), name).base_layer.weight for name in ALL]
    for weight in weights:
        weight.data = weight.data.clone(memory_format=torch.contiguous_format)
    assert is_sparse(model)
    assert_same(step(model, inputs(5)), step(as_peft(model), inputs(5)))
    del y


def test_weights_of_two_blocks():
    """Another block's adapters must not write where a backward is to read."""
    one, two = adapted(), adapted(r=3)
    for name in ALL:
        mlp_of(two).get_submodule(name).base_layer.weight = mlp_of(one).get_submodule(name).base_layer.weight
    twins = as_peft(one), as_peft(two)

    def both(one, two):
        one.zero_grad(), two.zero_grad()
        (one(inputs(5)).sum() + two(inputs(5)).sum()).backward()
        return dict(enumerate(p.grad for m in (one, two) for p in m.parameters() if p.requires_grad))

    assert_same(both(one, two), both(*twins))


def test_compiled(fresh_compiler):
    model = adapted()
    model(inputs(5))
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    torch.testing.assert_close(compiled(inputs(5)), as_peft(model)(inputs(5)))


def test_stock_layout_is_left_alone():
    model = adapted(options={"neuron_major": False})
    assert not is_sparse(model)
    assert all(parameter.is_contiguous() for parameter in model.parameters())


class Shifted(nn.Module):
    """relu(x - 0.25), and no names to go by."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(48, 96), nn.Linear(48, 96, bias=False), nn.Linear(96, 48)

    def forward(self, x):
        return self.c(self.a(x) * torch.relu(self.b(x) - 0.25))


def stock_model(kind):
    torch.manual_seed(1)
    if kind == "shifted":
        return nn.Sequential(Shifted(), Shifted())
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if kind == "llama":
        config = transformers.LlamaConfig(**sizes, intermediate_size=96, hidden_act="relu")
    elif kind == "phi3":  # gate and up in one projection
        config = transformers.Phi3Config(**sizes, intermediate_size=96, hidden_act="relu")
    elif kind == "opt":  # called by a layer's code
        config = transformers.OPTConfig(**sizes, ffn_dim=96, word_embed_proj_dim=48, dropout=0.0)
    else:  # Conv1D
        config = transformers.GPT2Config(**sizes, activation_function="relu", resid_pdrop=0.0, attn_pdrop=0.0)
        config.embd_pdrop = 0.0
    return transformers.AutoModelForCausalLM.from_config(config)


TARGETS = {
    "shifted": ["a", "b", "c"],
    "llama": ["gate_proj", "up_proj", "down_proj", "q_proj"],
    "phi3": ["gate_up_proj", "down_proj"],
    "opt": ["fc1", "fc2"],
    "gpt2": ["c_fc", "c_proj"],
}


def loss_of(model, kind):
    if kind == "shifted":
        return model(inputs(3, 5)).square().sum()
    ids = torch.arange(22).view(2, 11)
    return model(input_ids=ids, labels=ids).loss


def loss_and_gradients(model, kind):
    model.zero_grad()
    loss = loss_of(model, kind)
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def with_adapters(model, kind, targets=None):
    torch.manual_seed(2)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=9,
        target_modules=targets or TARGETS[kind],
        init_lora_weights=False,
        fan_in_fan_out=kind == "gpt2",
    )
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("kind", TARGETS)
def test_sparsified(kind, order):
    expected = loss_and_gradients(with_adapters(stock_model(kind), kind), kind)
    model = stock_model(kind)
    plain = loss_of(model, kind).detach()
    if order == "before":
        assert len(twell.sparsify_(model, plan=ROW).blocks) == 2
    model = with_adapters(model, kind)
    if order == "after":
        assert len(twell.sparsify_(model, plan=ROW).blocks) == 2
    assert not twell.sparsify_(model).blocks  # they are sparse already
    loss_of(model, kind)  # the first call notices adapters
    with twell.recorded_paths() as paths:
        found = loss_and_gradients(model, kind)
    assert [ran.path for ran in paths if ran.phase == "forward"] == ["row", "row"]
    assert_same(found, expected)
    assert all(value.is_contiguous() for value in model.state_dict().values())

    with model.disable_adapter(), twell.recorded_paths() as paths:
        torch.testing.assert_close(loss_of(model, kind).detach(), plain)
    assert [ran.path for ran in paths] == ["row", "row"]
    model = model.unload()
    with twell.recorded_paths() as paths:
        torch.testing.assert_close(loss_of(model, kind).detach(), plain)
    assert [ran.path for ran in paths] == ["row", "row"]
    assert twell.densify_(model) == 2
    assert {type(module).__name__ for module in model.modules()} == {
        type(module).__name__ for module in stock_model(kind).modules()
    }
    torch.testing.assert_close(loss_of(model, kind).detach(), plain)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(("kind", "targets"), [("opt", ["fc1"]), ("opt", ["fc2"]), ("phi3", ["down_proj"])])
def test_some_projections(kind, targets, order):
    expected = loss_and_gradients(with_adapters(stock_model(kind), kind, targets), kind)
    model = stock_model(kind)
    if order == "before":
        twell.sparsify_(model, plan=ROW)
    model = with_adapters(model, kind, targets)
    if order == "after":
        twell.sparsify_(model, plan=ROW)
    loss_of(model, kind)
    with twell.recorded_paths() as paths:
        assert_same(loss_and_gradients(model, kind), expected)
    assert [ran.path for ran in paths if ran.phase == "forward"] == ["row", "row"]


@pytest.mark.parametrize("kind", TARGETS)
def test_densified_with_adapters(kind):
    expected = loss_and_gradients(with_adapters(stock_model(kind), kind), kind)
    model = stock_model(kind)
    twell.sparsify_(model, plan=ROW)
    model = with_adapters(model, kind)
    loss_of(model, kind), loss_of(model, kind)
    assert twell.densify_(model) == 2
    with twell.recorded_paths() as paths:
        assert_same(loss_and_gradients(model, kind), expected)
    assert not paths
    assert all(p.is_contiguous() for n, p in model.named_parameters() if "base_layer" in n)


def test_other_wrappers_run_themselves():
    model = adapted()
    mlp = mlp_of(model)
    mlp.up_proj = nn.Sequential(mlp.up_proj)
    assert not is_sparse(model)
