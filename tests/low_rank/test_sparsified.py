"""LoRA on stock models, with `sparsify_` called before or after."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import twell

from .adapted import ROW, assert_same, inputs, peft


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


@pytest.mark.parametrize("kind", ["shifted", "phi3", "opt", "gpt2"])
def test_dense_steps_of_sparsified_blocks(kind):
    expected = loss_and_gradients(with_adapters(stock_model(kind), kind), kind)
    model = stock_model(kind)
    twell.sparsify_(model, plan=twell.Plan.parse("dense"))
    model = with_adapters(model, kind)
    for _ in range(2):
        assert_same(loss_and_gradients(model, kind), expected)


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
    assert len(twell.explain(model)) == 2
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
    with twell.recorded_paths() as paths:
        assert_same(loss_and_gradients(model, kind), expected)
    assert [ran.path for ran in paths if ran.phase == "forward"] == ["row", "row"]


@pytest.mark.parametrize("kind", TARGETS)
def test_densified_with_adapters(kind):
    expected = loss_and_gradients(with_adapters(stock_model(kind), kind), kind)
    model = stock_model(kind)
    twell.sparsify_(model, plan=ROW)
    model = with_adapters(model, kind)
    loss_of(model, kind)
    assert twell.densify_(model) == 2
    with twell.recorded_paths() as paths:
        assert_same(loss_and_gradients(model, kind), expected)
    assert not paths
    assert all(p.is_contiguous() for n, p in model.named_parameters() if "base_layer" in n)
