"""Captured steps on a GPU."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

import twell
from twell import Plan
from twell.generation import accelerate_, generate
from twell.hf import SparseLlamaConfig, SparseLlamaForCausalLM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def build(dtype, plan=None):
    torch.manual_seed(1)
    model = SparseLlamaForCausalLM(SparseLlamaConfig(**SIZES)).to("cuda", dtype).eval()
    for layer in model.model.layers:
        layer.mlp.plan = plan
    return model


def stock_generate(monkeypatch, model, *given, **options):
    with monkeypatch.context() as patched:
        patched.setattr(generate, "DEVICES", ())
        return model.generate(*given, **options)


def prompt(batch, length):
    generator = torch.Generator().manual_seed(batch + length)
    return torch.randint(3, 512, (batch, length), generator=generator).cuda()


def captured(model):
    return [step for step in model._twell_steps.values() if step.is_captured]


@pytest.mark.parametrize("plan", [Plan(path="block"), Plan(path="dense")], ids=str)
@pytest.mark.parametrize(("batch", "length"), [(1, 7), (5, 30)])
def test_greedy_tokens_are_those_of_transformers(monkeypatch, plan, batch, length):
    model = build(torch.float32, plan)
    ids, mask = prompt(batch, length), torch.ones(batch, length, dtype=torch.int64, device="cuda")
    mask[0, : length // 2] = 0
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 60}
    for _ in range(2):
        found = model.generate(ids, **options)
        assert captured(model)
        expected = stock_generate(monkeypatch, model, ids, **options)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "OPT, sparsified"])
def test_logits_of_16_bits_are_as_good_as_those_of_transformers(monkeypatch, stock):
    """Teacher-forced: the tokens of one run, through both kinds of steps and in float32."""
    if stock:
        sizes = {"vocab_size": 512, "hidden_size": 256, "ffn_dim": 1024, "num_hidden_layers": 3}
        more = {"num_attention_heads": 4, "word_embed_proj_dim": 256, "eos_token_id": 2, "pad_token_id": 0}
        torch.manual_seed(1)
        model = transformers.OPTForCausalLM(transformers.OPTConfig(**sizes, **more)).cuda().bfloat16().eval()
        twell.sparsify_(model)
        accelerate_(model)
    else:
        model = build(torch.bfloat16)
    ids, seen = prompt(2, 9), []
    choose = generate.Step.choose
    monkeypatch.setattr(
        generate.Step, "choose", lambda self, logits: (seen.append(logits), choose(self, logits))[1]
    )
    tokens = model.generate(ids, do_sample=False, max_new_tokens=4, eos_token_id=[])
    assert len(seen) == 4
    with torch.no_grad():
        theirs = model(tokens[:, :-1]).logits[:, 8:].double()
        exact = model.float()(tokens[:, :-1]).logits[:, 8:].double()
    ours = torch.stack([logits.double() for logits in seen], 1)
    assert (ours - exact).norm() <= 2 * (theirs - exact).norm()


def test_sequences_end_at_their_stop_tokens(monkeypatch):
    model, ids = build(torch.float32), prompt(3, 12)
    free = stock_generate(monkeypatch, model, ids, max_new_tokens=90, do_sample=False, eos_token_id=[])
    stops = sorted({int(free[row, 40 + 9 * row]) for row in range(3)})
    options = {"max_new_tokens": 90, "do_sample": False, "eos_token_id": stops, "pad_token_id": 0}
    for _ in range(2):
        found = model.generate(ids, **options)
        assert torch.equal(found, stock_generate(monkeypatch, model, ids, **options))


def test_samples_differ_and_follow_the_seed():
    model, ids = build(torch.bfloat16), prompt(4, 10)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 40, "eos_token_id": []}
    model.generate(ids, **options)  # captures
    found = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        found.append(model.generate(ids, **options))
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    assert len({tuple(row) for row in found[0][:, 10:].tolist()}) == 4


def test_weights_in_other_places_are_captured_again(monkeypatch):
    model, ids = build(torch.float32), prompt(1, 10)
    options = {"do_sample": False, "max_new_tokens": 30, "eos_token_id": []}
    model.generate(ids, **options)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.mul_(-2)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0).clone())
    assert torch.equal(model.generate(ids, **options), stock_generate(monkeypatch, model, ids, **options))


def test_layers_are_looked_at_again(monkeypatch):
    monkeypatch.setattr(generate, "_LOOK_AGAIN", 8)
    model, ids = build(torch.float32), prompt(2, 10)
    looks = []
    look = generate.Step.look_again
    monkeypatch.setattr(generate.Step, "look_again", lambda self: (looks.append(1), look(self))[1])
    options = {"do_sample": False, "max_new_tokens": 60, "eos_token_id": []}
    found = model.generate(ids, **options)
    assert looks
    assert torch.equal(found, stock_generate(monkeypatch, model, ids, **options))


@pytest.mark.parametrize("plan", [Plan(path="block"), Plan(path="dense")], ids=str)
def test_prompts_of_similar_lengths_share_a_graph(monkeypatch, plan):
    model = build(torch.float32, plan)
    for length in (33, 40, 48, 37, 45):
        ids = prompt(2, length)
        options = {"do_sample": False, "max_new_tokens": 12, "repetition_penalty": 1.2}
        found = model.generate(ids, **options)
        assert torch.equal(found, stock_generate(monkeypatch, model, ids, **options))
    (kept,) = model._twell_steps.prompts.values()
    assert kept.is_captured
    with torch.no_grad():
        model.lm_head.weight.copy_(-model.lm_head.weight)
        model.model.layers[0].self_attn.q_proj.weight.mul_(0.5)  # what a graph reads in its place
    found = model.generate(ids, **options)
    assert torch.equal(found, stock_generate(monkeypatch, model, ids, **options))


def test_prompts_look_at_their_layers_again(monkeypatch):
    """Weights change so that a layer runs otherwise: the graph is captured again."""
    monkeypatch.setattr("twell.generation.prompt._LOOK_AGAIN", 4)
    model = build(torch.bfloat16)
    ids = prompt(1, 30)
    options = {"do_sample": False, "max_new_tokens": 2}
    for _ in range(8):
        model.generate(ids, **options)
    (kept,) = model._twell_steps.prompts.values()
    assert kept.is_captured
    before = kept._captured
    for layer in model.model.layers:
        layer.mlp.plan = Plan(path="block")
    for _ in range(8):
        model.generate(ids, **options)
    assert before != next(iter(model._twell_steps.prompts.values()))._captured
