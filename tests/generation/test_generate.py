"""`generate` with static steps against transformers' own, on the CPU, where steps run without a graph."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import weakref

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import GenerationConfig, LlamaConfig, Qwen2Config

import twell
from twell.generation import accelerate_, generate

from .tiny_models import KINDS, SIZES, build, prompt, stock_generate


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 7), (3, 5)])
def test_greedy_tokens_are_those_of_transformers(static, monkeypatch, kind, batch, length):
    model, ids = build(kind), prompt(batch, length)
    options = {"max_new_tokens": 20, "do_sample": False}
    found = model.generate(ids, **options)
    assert static
    assert torch.equal(found, stock_generate(monkeypatch, model, ids, **options))


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_with_padding_on_their_left(static, monkeypatch, kind):
    model, ids = build(kind), prompt(3, 6)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1, :1] = 0
    ids[mask == 0] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    found = model.generate(ids, **options)
    assert static
    assert torch.equal(found, stock_generate(monkeypatch, model, ids, **options))


def test_sequences_end_at_their_stop_tokens(static, monkeypatch):
    model, ids = build("sparse llama"), prompt(4, 5)
    free = stock_generate(monkeypatch, model, ids, max_new_tokens=30, do_sample=False, eos_token_id=[])
    stops = [int(free[0, 12]), int(free[1, 9]), int(free[2, 20]), int(free[3, 15])]
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": stops, "pad_token_id": 0}
    found = model.generate(ids, **options)
    assert static
    expected = stock_generate(monkeypatch, model, ids, **options)
    assert expected.shape[1] < 35
    assert torch.equal(found, expected)


def test_requests_one_after_the_other_share_a_step(static, monkeypatch):
    model = build("sparse llama")
    options = {"do_sample": False, "max_new_tokens": 10}
    for seed, length in enumerate((5, 9, 3)):
        ids = prompt(2, length, seed)
        found = model.generate(ids, **options)
        assert torch.equal(found, stock_generate(monkeypatch, model, ids, **options))
    assert len({id(step) for step in static}) == 1


def test_changed_weights_are_used(static, monkeypatch):
    model, ids = build("sparse llama"), prompt(1, 5)
    options = {"do_sample": False, "max_new_tokens": 10}
    first = model.generate(ids, **options)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(-3)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0).clone())
    found = model.generate(ids, **options)
    assert not torch.equal(found, first)
    assert torch.equal(found, stock_generate(monkeypatch, model, ids, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.7},
        {"do_sample": True, "top_k": 1},
        {"do_sample": True, "temperature": 1e-4, "top_p": 0.9, "repetition_penalty": 1.3},
        {"do_sample": True, "min_p": 1.0},
    ],
    ids=str,
)
def test_processors_that_leave_one_choice(static, monkeypatch, options):
    model, ids = build("sparse llama"), prompt(2, 6)
    options = {"do_sample": False, "max_new_tokens": 15} | options
    found = model.generate(ids, **options)
    assert static
    assert torch.equal(found, stock_generate(monkeypatch, model, ids, **options))


def test_samples_follow_the_distribution_of_the_model(static):
    model, ids = build("sparse llama"), prompt(1, 4)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
        logits = model(ids).logits[0, -1]
    chances = torch.nn.functional.softmax(logits / 0.7, -1)
    torch.manual_seed(0)
    many = model.generate(ids.repeat(4000, 1), do_sample=True, temperature=0.7, top_k=0, max_new_tokens=1)
    found = torch.bincount(many[:, -1], minlength=97) / 4000
    assert float((found - chances).abs().sum()) < 0.12
    assert not static  # the first token comes from the prompt


def test_streamers_hear_every_token(static, monkeypatch):
    class Streamer:
        def __init__(self):
            self.heard, self.ended = [], 0

        def put(self, tokens):
            self.heard.append(tokens.flatten().tolist())

        def end(self):
            self.ended += 1

    model, ids = build("sparse llama"), prompt(1, 6)
    ours, theirs = Streamer(), Streamer()
    options = {"do_sample": False, "max_new_tokens": 9}
    model.generate(ids, streamer=ours, **options)
    assert static
    stock_generate(monkeypatch, model, ids, streamer=theirs, **options)
    assert ours.heard == theirs.heard
    assert ours.ended == theirs.ended == 1


def test_under_inference_mode_and_without_by_turns(static, monkeypatch):
    model, ids = build("sparse llama"), prompt(2, 6)
    options = {"do_sample": False, "max_new_tokens": 9}
    expected = stock_generate(monkeypatch, model, ids, **options)
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            assert torch.equal(model.generate(ids, **options), expected)
    assert static


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2}, None),
        ({"no_repeat_ngram_size": 2}, "the logits processor NoRepeatNGramLogitsProcessor"),
        ({"use_cache": False}, "use_cache=False"),
        ({"cache_implementation": "static"}, "another cache than the default one"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"max_length": 20_000, "max_new_tokens": None, "eos_token_id": list(range(97))}, "room for 16,384"),
        ({"max_time": 100.0}, "the stopping criterion MaxTimeCriteria"),
    ],
    ids=str,
)
def test_what_steps_cannot_do_is_left_to_transformers(static, monkeypatch, caplog, options, reason):
    monkeypatch.setattr("twell._log._logged", set())
    model, ids = build("sparse llama"), prompt(1, 6)
    options = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": None} | options
    with caplog.at_level(logging.WARNING, "twell"):
        found = model.generate(ids, **options)
    assert not static
    found = found if isinstance(found, torch.Tensor) else found.sequences
    assert found.shape == (1, 12 if options["max_new_tokens"] else 7)
    said = [record.getMessage() for record in caplog.records]
    assert (said == []) if reason is None else any(reason in line for line in said)


def test_a_cache_of_ones_own_is_used(static, monkeypatch):
    model, ids = build("sparse llama"), prompt(1, 6)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :4], past_key_values=cache)
    found = model.generate(ids, past_key_values=cache, do_sample=False, max_new_tokens=6)
    assert not static
    assert torch.equal(found, stock_generate(monkeypatch, model, ids, do_sample=False, max_new_tokens=6))


def test_a_model_that_a_step_does_not_compute_stays_stock(static, monkeypatch, caplog):
    """Attention with linear biases looks at the whole mask, which a step does not have."""
    monkeypatch.setattr("twell._log._logged", set())
    config = transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4, eos_token_id=2)
    model, ids = accelerate_(transformers.BloomForCausalLM(config).eval()), prompt(2, 6)
    options = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
    with caplog.at_level(logging.WARNING, "twell"):
        for _ in range(2):
            found = model.generate(ids, **options)
            assert torch.equal(found, stock_generate(monkeypatch, model, ids, **options))


def test_copies_and_pickles_begin_without_steps(static):
    model, ids = build("llama"), prompt(1, 5)
    options = {"do_sample": False, "max_new_tokens": 4}
    expected = model.generate(ids, **options)
    assert model._twell_steps
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not other._twell_steps
        assert torch.equal(other.generate(ids, **options), expected)


def test_saved_models_are_stock(static, tmp_path):
    model = build("llama")
    model.generate(prompt(1, 5), do_sample=False, max_new_tokens=4)
    model.save_pretrained(tmp_path)
    loaded, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(loaded) is transformers.LlamaForCausalLM


def test_what_cannot_generate_is_refused():
    with pytest.raises(ValueError, match="model: got Linear; accepted: a model of transformers"):
        accelerate_(torch.nn.Linear(2, 2))


def test_a_generation_config_of_ones_own(static, monkeypatch):
    model, ids = build("qwen2"), prompt(2, 5)
    config = GenerationConfig(max_length=16, do_sample=False, eos_token_id=2, pad_token_id=0)
    found = model.generate(ids, generation_config=config)
    assert static
    assert torch.equal(found, stock_generate(monkeypatch, model, ids, generation_config=config))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_weights_keep_their_places_and_new_values_count(static, monkeypatch, tmp_path, kind):
    model, ids = build(kind), prompt(2, 5)
    before = {name: (tensor.clone(), tensor.data_ptr()) for name, tensor in model.state_dict().items()}
    options = {"do_sample": False, "max_new_tokens": 8}
    model.generate(ids, **options)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name][0])
        assert tensor.data_ptr() == before[name][1]
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    model.model.layers[0].self_attn.k_proj.weight.data.mul_(-2)  # which no version counter tells
    assert torch.equal(model.generate(ids, **options), stock_generate(monkeypatch, model, ids, **options))
    assert len({id(step) for step in static}) == 1


def test_a_freed_model_is_gone_at_once(static):
    for kind in ("llama", "opt"):
        model = build(kind)
        model.generate(prompt(1, 5), do_sample=False, max_new_tokens=4)
        gone = weakref.ref(model)
        gc.collect()
        gc.disable()
        try:
            del model
            assert gone() is None
        finally:
            gc.enable()


def test_a_batch_that_does_not_fit_is_told_what_does(static, monkeypatch, caplog):
    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = build("llama")
    of_one = 2 * 2 * 2 * 8 * 4 * 256  # layers, keys and values, heads, size, bytes, columns
    monkeypatch.setattr(generate, "Step", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * of_one + 7, 10 * of_one))
    monkeypatch.setattr("twell._log._logged", set())
    with caplog.at_level(logging.WARNING, "twell"):
        found = model.generate(prompt(9, 4), max_new_tokens=9, do_sample=False)
    assert found.shape == (9, 13)
    said = "of 9 sequences with room for 256 tokens each do not fit the 0.0 GiB that are free; those of 5 do"
    assert said in caplog.text


@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config])
def test_prompts_of_sparsified_models_are_padded(static, monkeypatch, config):
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config(**SIZES, hidden_act="relu")).eval()
    twell.sparsify_(model)
    model, ids = accelerate_(model), prompt(2, 5)
    options = {"do_sample": False, "max_new_tokens": 8}
    found = model.generate(ids, **options)
    assert model._twell_steps.prompts
    assert torch.equal(found, stock_generate(monkeypatch, model, ids, **options))
