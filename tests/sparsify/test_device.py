"""Stock models on a GPU: sparsified, pruned, with LoRA, compiled."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    OPTConfig,
    OPTModel,
    Phi3Config,
    Phi3Model,
)

import twell
from twell import Plan, recorded_paths, sparsify_

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = {"vocab_size": 128, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES = {
    "llama": lambda: LlamaModel(LlamaConfig(**SIZES, intermediate_size=768, hidden_act="relu")),
    "phi3": lambda: Phi3Model(
        Phi3Config(**SIZES, intermediate_size=768, hidden_act="relu", num_key_value_heads=4, pad_token_id=0)
    ),
    "opt": lambda: OPTModel(OPTConfig(**SIZES, ffn_dim=1024, word_embed_proj_dim=256, dropout=0.0)),
    "bert": lambda: BertModel(BertConfig(**SIZES, intermediate_size=1024, hidden_act="relu")),
    "gpt2": lambda: GPT2Model(
        GPT2Config(vocab_size=128, n_embd=256, n_layer=2, n_head=4, activation_function="relu")
    ),
}


@pytest.fixture(params=FAMILIES)
def stock(request):
    torch.manual_seed(0)
    model = FAMILIES[request.param]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.cuda()


def run(model, ids):
    return model(input_ids=ids).last_hidden_state


def check_as_good_as_stock(found, half, exact):
    """Within twice stock's error in 16 bits."""
    error, theirs = (found.double() - exact).norm(), (half.double() - exact).norm()
    assert error <= 2 * theirs + 1e-6 * exact.norm()


@pytest.mark.parametrize("shape", [(2, 300), (1, 1), (1, 20)])
@pytest.mark.parametrize("compiled", [False, True])
@torch.no_grad()
def test_outputs(stock, shape, compiled, fresh_compiler):
    ids = torch.randint(3, 128, shape, device="cuda")
    half = copy.deepcopy(stock).bfloat16()
    exact = run(copy.deepcopy(half).double(), ids)
    wanted = run(half, ids)
    report = sparsify_(half, plan=Plan(path="block"))
    assert len(report.blocks) == 2
    called = torch.compile(half, backend="aot_eager") if compiled else half
    with recorded_paths() as ran:
        for _ in range(3):  # the later ones repeat recorded launches
            found = run(called, ids)
    assert {piece.path for piece in ran} <= {"block", "decode"}
    assert len(ran) == 6
    check_as_good_as_stock(found, wanted, exact)


def test_gradients(stock):
    ids = torch.randint(3, 128, (2, 300), device="cuda")
    half = copy.deepcopy(stock).bfloat16()
    exact = copy.deepcopy(half).double()
    sparse = copy.deepcopy(half)
    sparsify_(sparse, plan=Plan(path="block"))
    for model in (half, exact, sparse):
        run(model, ids).square().mean().backward()
    for ours, theirs, right in zip(*(m.parameters() for m in (sparse, half, exact)), strict=True):
        if right.grad is not None:
            error = (ours.grad.double() - right.grad).norm()
            bound = 3 * (theirs.grad.double() - right.grad).norm() + 1e-3 * right.grad.norm() + 1e-9
            assert error <= bound


@torch.no_grad()
def test_pruned(stock):
    ids = torch.randint(3, 128, (4, 64), device="cuda")
    sparsify_(stock, plan=Plan(path="block"))
    wanted = run(stock, ids)
    report = twell.prune_(stock, data=[{"input_ids": ids}])
    assert report.parameters_after <= report.parameters_before
    torch.testing.assert_close(run(stock, ids), wanted, rtol=1e-2, atol=1e-2)


def test_lora():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = FAMILIES["llama"]().cuda().bfloat16()
    config = peft.LoraConfig(
        r=8, target_modules=["gate_proj", "up_proj", "down_proj"], init_lora_weights=False
    )
    model = peft.get_peft_model(model, config).eval()
    ids = torch.randint(3, 128, (2, 300), device="cuda")
    wanted = run(model, ids)
    exact = run(copy.deepcopy(model).double(), ids)
    sparsify_(model, plan=Plan(path="block"))
    with recorded_paths() as ran:
        found = run(model, ids)
    assert "block" in {piece.path for piece in ran}
    check_as_good_as_stock(found, wanted, exact)
