"""Stock models with dReLU, relu(gate) * relu(up), as TurboSparse's: recognised, exact, stock when saved."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from twell import Plan, densify_, recorded_paths, sparsify_

from ..accuracy import assert_accurate

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}


class DreluMLP(LlamaMLP):
    """As the code of TurboSparse models has it."""

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.act_fn(self.up_proj(x)))


class DreluLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = DreluMLP(config)
        self.post_init()


class HandWritten(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(64, 160), nn.Linear(64, 160), nn.Linear(160, 64)

    def forward(self, x):
        return self.w2(torch.relu(self.w1(x)) * torch.relu(self.w3(x)))


def model_of(dtype=torch.float32, hidden_act="relu"):
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_hidden_layers=2, hidden_act=hidden_act, initializer_range=0.2)
    return DreluLlama(config).to(dtype).eval()


def step(model, x, dtype=None):
    """The output, and gradients of x and all parameters, of a copy in `dtype`."""
    model = copy.deepcopy(model).to(dtype or x.dtype)
    x = x.detach().to(dtype or x.dtype).requires_grad_()
    y = model(x)
    names = ["x", *(name for name, _ in model.named_parameters())]
    found = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
    return {"y": y.detach(), **dict(zip(names, found, strict=True))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("path", ["row", "block", None])
@pytest.mark.parametrize("block", [HandWritten, lambda: model_of().model.layers[0].mlp])
def test_values_and_gradients(block, path, dtype):
    torch.manual_seed(1)
    stock = block().to(dtype)
    x = torch.randn(2, 9, 64).to(dtype)
    exact, wanted = step(stock, x, torch.float64), step(stock, x)
    sparse = copy.deepcopy(stock)
    (found,) = sparsify_(sparse, plan=None if path is None else Plan(path=path)).blocks
    assert found.activation == "drelu"
    with recorded_paths() as ran:
        ours = step(sparse, x)
    assert path is None or {piece.path for piece in ran if piece.phase == "forward"} == {path}
    for name, value in ours.items():
        assert_accurate(value, exact[name], wanted[name], name)
    sparse(x)
    densify_(sparse)
    assert torch.equal(sparse(x), stock(x))


def test_a_language_model(tmp_path):
    model, ids = model_of(), torch.arange(14).view(2, 7)
    wanted = model(ids).logits
    report = sparsify_(model, plan=Plan(path="row"))
    assert [row.activation for row in report.blocks] == ["drelu"] * 2
    assert report.blocks[0].projections == ("gate_proj", "up_proj", "down_proj")
    with recorded_paths() as ran:
        torch.testing.assert_close(model(ids).logits, wanted)
    assert [piece.path for piece in ran] == ["row"] * 2
    torch.testing.assert_close(model.generate(ids, max_new_tokens=3)[:, :7], ids)
    model.save_pretrained(tmp_path)
    loaded = DreluLlama.from_pretrained(tmp_path).eval()
    assert type(loaded.model.layers[0].mlp) is DreluMLP
    assert torch.equal(loaded(ids).logits, wanted)
    assert all(tensor.is_contiguous() for tensor in loaded.state_dict().values())


def test_lora():
    """The up projection is clamped with its adapter in it."""
    peft = pytest.importorskip("peft")
    model, ids = model_of(), torch.arange(14).view(2, 7)
    targets = ["gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    names = [name for name, p in adapted.named_parameters() if p.requires_grad]

    def step(model):
        model.zero_grad()
        logits = model(ids).logits
        logits.square().mean().backward()
        return {"logits": logits.detach()} | {name: model.get_parameter(name).grad.clone() for name in names}

    exact, wanted = step(copy.deepcopy(adapted).double()), step(adapted)
    assert len(sparsify_(adapted, plan=Plan(path="row")).blocks) == 2
    with recorded_paths() as ran:
        found = step(adapted)
    assert [piece.path for piece in ran if piece.phase == "forward"] == ["row"] * 2
    for name, value in found.items():
        assert_accurate(value, exact[name], wanted[name], name)


@pytest.mark.parametrize("hidden_act", ["silu", "relu2"])
def test_others_stay_stock(hidden_act):
    model = model_of(hidden_act=hidden_act)
    report = sparsify_(model)
    assert not report.blocks
    reason = "no exact zeros" if hidden_act == "silu" else "applied to more than the gate"
    assert all(reason in skipped.reason for skipped in report.skipped)
