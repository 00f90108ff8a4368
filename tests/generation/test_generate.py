"""`generate` with static steps against transformers' own, on the CPU, where steps run without a graph."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import GenerationConfig, LlamaConfig, OPTConfig, Qwen2Config

import twell
from twell.generation import accelerate_, generate, kernel_layers
from twell.generation.decoder import is_understood
from twell.generation.step import Step
from twell.hf import SparseLlamaConfig, SparseLlamaForCausalLM, SparseQwen2Config, SparseQwen2ForCausalLM

from ..interpreter import hasten

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 300,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.fixture
def static(monkeypatch):
    """Static steps on the CPU; counts them."""
    monkeypatch.setattr(generate, "DEVICES", ("cpu",))
    ran = []
    run = Step.run
    monkeypatch.setattr(Step, "run", lambda self: (ran.append(self), run(self))[1])
    return ran


def build(kind):
    torch.manual_seed(3)
    if kind == "sparse llama":
        return SparseLlamaForCausalLM(SparseLlamaConfig(**SIZES)).eval()
    if kind == "sparse qwen2":
        return SparseQwen2ForCausalLM(SparseQwen2Config(**SIZES)).eval()
    if kind == "opt":
        sizes = {"vocab_size": 97, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2}
        more = {"num_attention_heads": 4, "word_embed_proj_dim": 32, "max_position_embeddings": 300}
        model = transformers.OPTForCausalLM(OPTConfig(**sizes, **more, eos_token_id=2, pad_token_id=0)).eval()
        twell.sparsify_(model)
        return accelerate_(model)
    config = {"llama": LlamaConfig, "qwen2": Qwen2Config}[kind](**SIZES)
    return accelerate_(transformers.AutoModelForCausalLM.from_config(config).eval())


class Turned(transformers.LlamaForCausalLM):
    """A model of one's own, with other logits."""

    def forward(self, *given, **named):
        output = super().forward(*given, **named)
        output.logits = -output.logits
        return output


KINDS = ["sparse llama", "sparse qwen2", "llama", "qwen2", "opt"]


def stock_generate(monkeypatch, model, *given, **options):
    with monkeypatch.context() as patched:
        patched.setattr(generate, "DEVICES", ())
        return model.generate(*given, **options)


def prompt(batch, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (batch, length), generator=generator)


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


def test_only_llama_and_qwen2_as_they_are_run_layer_by_layer():
    assert [is_understood(build(kind)) for kind in KINDS] == [True, True, True, True, False]
    assert not is_understood(Turned(LlamaConfig(**SIZES)))


def test_a_model_of_ones_own_keeps_its_logits(static, monkeypatch):
    torch.manual_seed(3)
    model, ids = accelerate_(Turned(LlamaConfig(**SIZES)).eval()), prompt(2, 6)
    options = {"do_sample": False, "max_new_tokens": 8}
    found = model.generate(ids, **options)
    assert static
    assert torch.equal(found, stock_generate(monkeypatch, model, ids, **options))


def test_models_of_ones_own_are_tried_with_padding_too(static, monkeypatch):
    """Wrong for padded prompts only: whoever was tried without padding would be believed."""

    class Misplaced(Turned):
        def forward(self, *given, position_ids=None, past_key_values=None, **named):
            if type(past_key_values) is transformers.cache_utils.Cache:  # a step's
                position_ids = past_key_values.layers[0]._column[None].expand_as(position_ids)
            return super().forward(
                *given, position_ids=position_ids, past_key_values=past_key_values, **named
            )

    torch.manual_seed(3)
    model, ids = accelerate_(Misplaced(LlamaConfig(**SIZES)).eval()), prompt(2, 30)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that positions matter
    options = {"do_sample": False, "max_new_tokens": 8}
    assert torch.equal(model.generate(ids, **options), stock_generate(monkeypatch, model, ids, **options))
    assert static
    mask = torch.ones_like(ids)
    mask[0, :25] = 0
    options["attention_mask"] = mask
    assert torch.equal(model.generate(ids, **options), stock_generate(monkeypatch, model, ids, **options))
    assert model._twell_steps.refused


def test_positions_of_ones_own_go_on(static, monkeypatch):
    model, ids = build("sparse llama"), prompt(2, 6)
    positions = torch.tensor([[7, 8, 9, 30, 31, 40], [0, 1, 2, 3, 4, 5]])
    options = {"do_sample": False, "max_new_tokens": 12, "position_ids": positions}
    found = model.generate(ids, **options)
    assert static
    assert torch.equal(found, stock_generate(monkeypatch, model, ids, **options))


def test_settings_that_change_are_noticed(static, monkeypatch):
    model, ids = build("llama"), prompt(1, 5)
    options = {"do_sample": False, "max_new_tokens": 8}
    model.generate(ids, **options)
    for attention in (layer.self_attn for layer in model.model.layers):
        attention.scaling = 3.0
    assert torch.equal(model.generate(ids, **options), stock_generate(monkeypatch, model, ids, **options))
    assert len({id(step) for step in static}) == 2


class Steered(torch.nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block, self.function, self.vector = block, torch.nn.functional.relu, torch.ones(32)

    def forward(self, x):
        return self.function(self.block(x)) + self.vector


@pytest.mark.parametrize(("name", "value"), [("function", torch.sin), ("vector", torch.arange(32.0))])
def test_functions_and_tensors_that_change_are_noticed(static, monkeypatch, name, value):
    model, ids = build("llama"), prompt(1, 5)
    for layer in model.model.layers:
        layer.mlp = Steered(layer.mlp)
    options = {"do_sample": False, "max_new_tokens": 8}
    for _ in range(2):
        model.generate(ids, **options)
    assert len({id(step) for step in static}) == 1
    setattr(model.model.layers[0].mlp, name, value)
    assert torch.equal(model.generate(ids, **options), stock_generate(monkeypatch, model, ids, **options))
    assert len({id(step) for step in static}) == 2


def test_layers_that_are_left_out_are_noticed(static, monkeypatch):
    model, ids = build("llama"), prompt(1, 5)
    options = {"do_sample": False, "max_new_tokens": 8}
    model.generate(ids, **options)
    model.config.num_hidden_layers = 1
    assert torch.equal(model.generate(ids, **options), stock_generate(monkeypatch, model, ids, **options))
    assert len({id(step) for step in static}) == 2


def test_layers_of_a_wider_type_than_the_embedding(static, monkeypatch):
    model, ids = build("llama"), prompt(2, 5)
    model.model.embed_tokens.bfloat16()
    options = {"do_sample": False, "max_new_tokens": 8}
    assert torch.equal(model.generate(ids, **options), stock_generate(monkeypatch, model, ids, **options))


def test_rotary_embeddings_that_depend_on_the_length_stay_stock(static):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = accelerate_(transformers.LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope)).eval())
    model.generate(prompt(1, 5), do_sample=False, max_new_tokens=4)
    assert not static


@pytest.mark.parametrize("where", ["model", "layer", "block", "everywhere"])
def test_hooks_are_called(static, where):
    model, called = build("llama"), []

    def hook(*given):
        called.append(given)

    if where == "everywhere":
        handle = torch.nn.modules.module.register_module_forward_hook(hook)
    else:
        layer = model.model.layers[0]
        handle = {"model": model, "layer": layer, "block": layer.mlp}[where].register_forward_hook(hook)
    model.generate(prompt(1, 5), do_sample=False, max_new_tokens=6)
    handle.remove()
    assert not static
    assert len(called) >= 6
    model(prompt(1, 5), output_hidden_states=True)  # leaves hooks of transformers' own
    model.generate(prompt(1, 5), do_sample=False, max_new_tokens=6)
    assert static


@pytest.mark.parametrize("kind", ["lora", "prompt"])
def test_adapters_are_left_to_transformers(static, monkeypatch, kind):
    peft = pytest.importorskip("peft")
    config = {
        "lora": lambda: peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False),
        "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"),
    }[kind]()
    model, ids = peft.get_peft_model(build("llama"), config), prompt(1, 5)
    options = {"input_ids": ids, "do_sample": False, "max_new_tokens": 8}
    found = model.generate(**options)
    assert not static
    assert torch.equal(found, stock_generate(monkeypatch, model, **options))


def test_autocast_doubles_and_layers_of_ones_own(static, monkeypatch):
    ids, options = prompt(1, 5), {"do_sample": False, "max_new_tokens": 6}
    model = build("llama")
    with torch.autocast("cpu", torch.bfloat16):
        model.generate(ids, **options)
    assert not static
    model = build("llama").double()
    assert torch.equal(model.generate(ids, **options), stock_generate(monkeypatch, model, ids, **options))
    assert static
    attention = model.model.layers[0].self_attn
    attention.q_proj = torch.nn.Sequential(attention.q_proj, torch.nn.Tanh())
    assert torch.equal(model.generate(ids, **options), stock_generate(monkeypatch, model, ids, **options))


def test_attention_of_ones_own_is_called(static):
    called = []

    def mine(module, query, key, value, mask, **options):
        called.append(module)
        return transformers.integrations.sdpa_attention.sdpa_attention_forward(
            module, query, key, value, mask, **options
        )

    transformers.AttentionInterface.register("mine", mine)
    model = build("llama")
    model.set_attn_implementation("mine")
    model.generate(prompt(1, 5), do_sample=False, max_new_tokens=6)
    assert len(called) >= 12


def test_not_a_number_is_refused_as_transformers_refuse_it(static, monkeypatch):
    model = build("llama")
    model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(RuntimeError):
        stock_generate(monkeypatch, model, prompt(1, 5), do_sample=True, max_new_tokens=6)
    with pytest.raises(RuntimeError):
        model.generate(prompt(1, 5), do_sample=True, max_new_tokens=6)


def test_two_threads_at_once(static, monkeypatch):
    model = build("sparse llama")
    options = {"do_sample": False, "max_new_tokens": 30}
    prompts = [prompt(1, 5, seed) for seed in range(6)]
    expected = [stock_generate(monkeypatch, model, ids, **options) for ids in prompts]
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda ids: model.generate(ids, **options), prompts))
    assert static
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ["sparse llama", "sparse qwen2"])
def test_kernels_of_our_own_generate_the_same_tokens(static, monkeypatch, kind):
    """As on a GPU, interpreted; left padding included."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("with a GPU the kernels themselves are tested (-m gpu)")
    hasten()
    model = build(kind)
    ids = torch.randint(3, 97, (2, 6))
    options = {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6]), "max_new_tokens": 5}
    expected = model.generate(ids, do_sample=False, **options)
    model.__dict__.pop("_twell_steps")
    monkeypatch.setattr(kernel_layers, "DEVICES", ("cpu",))
    assert torch.equal(model.generate(ids, do_sample=False, **options), expected)
    (step,) = model._twell_steps.values()
    assert isinstance(step._decoder, kernel_layers.KernelLayers)


class Recent(torch.nn.Module):
    """Looks at the axis of its tokens, and gives the same values to a whole batch."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        y = self.block(x) + x.mean(1, keepdim=True)
        return y.mean(0, keepdim=True)


@pytest.mark.parametrize("kernels", [False, True])
def test_blocks_of_ones_own_see_sequences(static, monkeypatch, kernels):
    if kernels:
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("with a GPU the kernels themselves are tested (-m gpu)")
        hasten()
        monkeypatch.setattr(kernel_layers, "DEVICES", ("cpu",))
        monkeypatch.setattr(kernel_layers, "_compiled_block", lambda: kernel_layers.feed_forward)
    model, ids = build("llama"), prompt(2, 5)  # which padding would lengthen
    for layer in model.model.layers:
        layer.mlp = Recent(layer.mlp)
    options = {"do_sample": False, "max_new_tokens": 5}
    found = model.generate(ids, **options)
    assert static
    assert torch.equal(found, stock_generate(monkeypatch, model, ids, **options))


@pytest.mark.parametrize("what", ["aligned", "unaligned", "spread", "wide end", "wide start"])
def test_kernels_of_our_own_leave_odd_parameters_to_pytorch(static, monkeypatch, what):
    """A norm's weights are read as they should lie, 16 bytes at a time; residuals have the layers' type."""
    pytest.importorskip("triton")
    monkeypatch.setattr(kernel_layers, "DEVICES", ("cpu",))
    model = build("llama")
    norm = model.model.norm
    if what == "unaligned":
        norm.weight = torch.nn.Parameter(torch.ones(33)[1:])
    elif what == "spread":
        norm.weight = torch.nn.Parameter(torch.arange(64.0)[::2])
    elif what == "wide end":
        norm.double(), model.lm_head.double()
    elif what == "wide start":
        model.model.embed_tokens.double()
    assert kernel_layers.fit_kernels(model) == (what == "aligned")


@pytest.mark.parametrize("length", [1, 15, 16, 17, 24, 25, 33])
def test_padding_to_a_common_length_changes_nothing(static, monkeypatch, length):
    """Lengths around 16, 24 and 32; a penalty on tokens that are there, which a pad token would be."""
    model = build("sparse llama")
    ids = torch.randint(3, 97, (2, length))
    mask = torch.ones_like(ids)
    mask[0, : length // 3] = 0
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 9, "repetition_penalty": 1.5}
    found = model.generate(ids, **options)
    assert static
    assert torch.equal(found, stock_generate(monkeypatch, model, ids, **options))
    ((batch, padded, _),) = model._twell_steps.prompts
    assert (batch, padded) == (2, {1: 16, 15: 16, 16: 16, 17: 24, 24: 24, 25: 32, 33: 48}[length])
