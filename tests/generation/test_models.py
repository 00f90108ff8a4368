"""`generate` with models, layers and settings that are not as expected, against transformers' own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import LlamaConfig
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from twell.generation import accelerate_, kernel_layers
from twell.generation.decoder import decoder_of, is_understood

from ..interpreter import hasten
from .tiny_models import KINDS, SIZES, Turned, build, prompt, stock_generate


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


_LIES = "weights that are not contiguous, or begin at an address that is no multiple of 16"
_SEVERAL = "weights of several dtypes, or on several devices"


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("aligned", None),
        ("unaligned", _LIES),
        ("spread", _LIES),
        ("wide end", _SEVERAL),
        ("wide start", _SEVERAL),
        ("biased", "projections of attention that are not plain nn.Linear modules"),
        ("elsewhere", "weights in torch.float32 on 'cpu'"),
    ],
)
def test_kernels_of_our_own_leave_odd_parameters_to_pytorch(static, monkeypatch, what, reason):
    """A norm's weights are read as they should lie, 16 bytes at a time; residuals have the layers' type."""
    pytest.importorskip("triton")
    monkeypatch.setattr(kernel_layers, "DEVICES", ("cuda",) if what == "elsewhere" else ("cpu",))
    model = build("llama")
    norm, attention = model.model.norm, model.model.layers[0].self_attn
    if what == "unaligned":
        norm.weight = torch.nn.Parameter(torch.ones(33)[1:])
    elif what == "spread":
        norm.weight = torch.nn.Parameter(torch.arange(64.0)[::2])
    elif what == "wide end":
        norm.double(), model.lm_head.double()
    elif what == "wide start":
        model.model.embed_tokens.double()
    elif what == "biased":
        attention.q_proj = torch.nn.Linear(32, attention.q_proj.out_features)
    assert kernel_layers.why_no_kernels(model) == reason


@pytest.mark.parametrize("compiled", [True, False])
def test_layers_that_are_compiled_instead_are_told(static, monkeypatch, caplog, compiled):
    """Not where none is compiled: on a CPU, in tests."""
    pytest.importorskip("triton")
    monkeypatch.setattr("twell._log._logged", set())
    model = build("llama")
    model.generate(prompt(1, 4), max_new_tokens=2, do_sample=False)
    (step,) = model._twell_steps.values()
    decoder_of(model, step._cache, compiled)
    told = "twell: generation compiles layers instead of running its own kernels: weights in torch.float32 on"
    assert [told in line for line in caplog.messages] == ([True] if compiled else [])


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


def test_padding_of_another_length_needs_no_step_of_its_own(static, monkeypatch):
    """A repetition penalty knows how much padding to leave out (transformers 5.23); that is no setting."""
    model, ids = build("sparse llama"), torch.randint(3, 97, (2, 12))
    for padded in (5, 2):
        mask = torch.ones_like(ids)
        mask[0, :padded] = 0
        options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 9, "repetition_penalty": 1.5}
        found = model.generate(ids, **options)
        assert torch.equal(found, stock_generate(monkeypatch, model, ids, **options))
    assert static
    assert len(model._twell_steps) == 1


def test_penalties_that_leave_out_more_than_the_prompt_are_left_to_transformers(static, monkeypatch):
    model, ids = build("sparse llama"), prompt(2, 6)
    penalty = RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=8)
    options = {"logits_processor": [penalty], "do_sample": False, "max_new_tokens": 5}
    found = model.generate(ids, **options)
    assert not static
    assert torch.equal(found, stock_generate(monkeypatch, model, ids, **options))


def test_a_prompt_of_padding_alone_is_left_to_transformers(static, monkeypatch):
    """Where no token is attended to, transformers' mask and ours mean different things."""
    model, ids = build("sparse llama"), prompt(2, 6)
    options = {"attention_mask": torch.tensor([[0] * 6, [1] * 6]), "do_sample": False, "max_new_tokens": 5}
    found = model.generate(ids, **options)
    assert not static
    assert torch.equal(found, stock_generate(monkeypatch, model, ids, **options))
