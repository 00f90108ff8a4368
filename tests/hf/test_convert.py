"""`relufy` and `to_stock`."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)
from transformers.activations import ACT2FN

from twell import densify_
from twell.hf import relufy, set_neuron_major, sparse_mlps, to_stock

from .tiny import SPARSE, STOCK, is_neuron_major, sparse_model, stock_model, tokens

families = pytest.mark.parametrize("family", ["llama", "qwen2"])


@families
@pytest.mark.parametrize("from_path", [False, True])
def test_relufy_keeps_the_weights(family, from_path, tmp_path):
    dense = stock_model(family, hidden_act="silu", tie_word_embeddings=True)
    dense.save_pretrained(tmp_path)
    sparse = relufy(tmp_path if from_path else dense, activation="relu2", l1_coeff=1e-5)
    assert type(sparse) is SPARSE[family][1]
    assert is_neuron_major(sparse)
    assert sparse.l1_weight == 1e-5
    ours, theirs = sparse.state_dict(), dense.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert sparse.lm_head.weight is sparse.model.embed_tokens.weight
    ids = tokens()
    for layer in dense.model.layers:
        layer.mlp.act_fn = ACT2FN["relu2"]
    torch.testing.assert_close(sparse(ids).logits, dense(ids).logits, rtol=1e-4, atol=1e-4)


def test_relufy_copies():
    dense = stock_model(hidden_act="silu")
    before = dense.model.norm.weight.clone()
    with torch.no_grad():
        for parameter in relufy(dense).parameters():
            parameter.add_(1)
    assert torch.equal(dense.model.norm.weight, before)


def test_relufy_keeps_dtype_and_mode():
    dense = stock_model(hidden_act="silu").to(torch.bfloat16).train()
    sparse = relufy(dense)
    assert sparse.dtype == torch.bfloat16
    assert sparse.training


def test_relufy_of_what_it_does_not_know():
    with pytest.raises(ValueError, match="model_or_path: got a SparseLlamaForCausalLM"):
        relufy(sparse_model())
    with pytest.raises(ValueError, match="activation: got 'gelu'"):
        relufy(stock_model(), activation="gelu")


@families
@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_to_stock(family, activation, tmp_path):
    sparse = sparse_model(family, sparsity_activation=activation, sparsity_layer_sizes=[40, 40])
    stock = to_stock(sparse)
    assert type(stock) is STOCK[family][1]
    assert all(parameter.is_contiguous() for parameter in stock.parameters())
    assert not [field for field in stock.config.to_dict() if field.startswith("sparsity_")]
    ids = tokens()
    expected = sparse(ids).logits
    torch.testing.assert_close(stock(ids).logits, expected, rtol=1e-4, atol=1e-4)
    stock.save_pretrained(tmp_path)
    reloaded = STOCK[family][1].from_pretrained(tmp_path)
    assert reloaded.config.model_type == family
    assert torch.equal(reloaded(ids).logits, stock(ids).logits)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"sparsity_gated_mlp": False}, "non-gated"),
        ({"sparsity_layer_sizes": [24, 48]}, r"\[24, 48\] neurons"),
        ({"sparsity_activation": "fatrelu(0.1)"}, "fatrelu"),
        ({"sparsity_activation": "drelu"}, r"model: got activation drelu; accepted: 'relu' \| 'relu2'"),
    ],
)
def test_to_stock_of_what_stock_classes_cannot_be(fields, why):
    with pytest.raises(ValueError, match=why):
        to_stock(sparse_model(**fields))


def test_to_stock_of_a_contiguous_model():
    sparse = sparse_model()
    set_neuron_major(sparse, False)
    assert torch.equal(to_stock(sparse).state_dict()["lm_head.weight"], sparse.lm_head.weight)


def _save_two(folder, where):
    """A model at the root and another one of the same shapes, but with other heads, in `where`."""
    stock_model(num_key_value_heads=4).save_pretrained(folder)
    other = stock_model(seed=3, num_attention_heads=2, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-2)
    other.save_pretrained(folder / where)
    return other


SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
OTHERS = {
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=4)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES, num_key_value_heads=4)),  # gate and up in one
    "neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),  # not gated, with biases
    "opt": lambda: OPTForCausalLM(
        OPTConfig(
            vocab_size=96,
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            word_embed_proj_dim=32,
            activation_function="gelu",
            dropout=0.0,
        )
    ),
}


@pytest.mark.parametrize("from_path", [False, True])
@pytest.mark.parametrize("family", OTHERS)
def test_relufy_of_other_families(family, from_path, tmp_path):
    """A stock model with ReLU, L1 in its loss, and a stock checkpoint."""
    torch.manual_seed(0)
    dense = OTHERS[family]()
    if from_path:
        dense.save_pretrained(tmp_path / "dense")
    sparse = relufy(tmp_path / "dense" if from_path else dense, l1_coeff=0.5).train()
    assert isinstance(sparse, type(dense))
    assert len(sparse_mlps(sparse)) == 2
    ids = tokens()
    output = sparse(ids, labels=ids)
    torch.testing.assert_close(output.loss, output.ce_loss + 0.5 * output.l1.mean())
    output.l1_loss.backward()
    selector, first, step = sparse_mlps(sparse)[-1].selector_rows()
    assert selector.weight.grad[first::step].abs().sum() > 0
    assert all((0 < l0 < 64) for l0 in output.l0)
    assert [firing.shape for firing in output.firing] == [(64,)] * 2
    sparse.save_pretrained(tmp_path / "saved")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert type(stock) is type(dense)
    sparse.eval()
    torch.testing.assert_close(sparse(ids).logits, stock.eval()(ids).logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(
        sparse.generate(ids, max_new_tokens=3, do_sample=False),
        stock.generate(ids, max_new_tokens=3, do_sample=False),
    )
    assert len(sparse(ids, return_dict=False)) < len(output)
    with pytest.raises(ValueError, match="with sparse blocks"):
        relufy(sparse)


def test_relufy_to_drelu():
    dense, ids = stock_model(), tokens()
    sparse = relufy(dense, activation="drelu")
    assert [mlp.activation.spec for mlp in sparse_mlps(sparse)] == ["drelu"] * 2

    def forward(mlp):
        return lambda x: mlp.down_proj(torch.relu(mlp.gate_proj(x)) * torch.relu(mlp.up_proj(x)))

    for layer in dense.model.layers:
        layer.mlp.forward = forward(layer.mlp)
    torch.testing.assert_close(sparse(ids).logits, dense(ids).logits, rtol=1e-4, atol=1e-4)


def test_relufy_of_other_families_refuses():
    with pytest.raises(ValueError, match=r"activation: got fatrelu\(0.1\); accepted: relu or relu2"):
        relufy(OTHERS["mistral"](), activation="fatrelu(0.1)")
    with pytest.raises(ValueError, match=r"activation: got drelu; accepted: relu or relu2: .* has no drelu"):
        relufy(OTHERS["mistral"](), activation="drelu")
    encoder = BertModel(BertConfig(**SIZES))
    with pytest.raises(ValueError, match="got a BertModel; accepted: a causal language model"):
        relufy(encoder)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=96, hidden_size=32, n_layer=1, n_head=4))
    with pytest.raises(ValueError, match="names no activation"):
        relufy(bloom)


def test_blocks_that_run_stock_cannot_be_recorded():
    sparse = relufy(OTHERS["mistral"](), l1_coeff=0.1).train()
    handle = sparse.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="1 of 2 blocks that ran their stock forward"):
        sparse(tokens(), labels=tokens())
    assert sparse.eval()(tokens(), labels=tokens()).l1 is None
    handle.remove()
    assert sparse.train()(tokens(), labels=tokens()).l1.shape == (2,)
    densify_(sparse)
    sparse.l1_weight = 0.0
    assert sparse(tokens(), labels=tokens()).l1 is None


def test_a_dropout_inside_the_blocks_is_named(caplog, monkeypatch):
    monkeypatch.setattr("twell._log._logged", set())
    config = GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.1)
    with caplog.at_level("INFO", logger="twell"):
        sparse = relufy(GPT2LMHeadModel(config), l1_coeff=0.1).train()
    assert "transformer.h.0.mlp.dropout.p = 0.1" in caplog.text
    message = r"dropout transformer\.h\.0\.mlp\.dropout\.p = 0\.1 and 1 more; accepted: dropouts of 0"
    with pytest.raises(ValueError, match=message):
        sparse(tokens(), labels=tokens())
    for layer in sparse.transformer.h:
        layer.mlp.dropout.p = 0.0
    assert sparse(tokens(), labels=tokens()).l1.shape == (2,)
    densify_(sparse)
    with pytest.raises(ValueError, match=r"no sparse block.*accepted: one after twell\.sparsify_"):
        sparse(tokens(), labels=tokens())


def test_relufied_models_are_copied_and_pickled():
    sparse = relufy(OTHERS["opt"](), l1_coeff=0.1).eval()
    wanted = sparse(tokens(), labels=tokens())
    for other in (copy.deepcopy(sparse), pickle.loads(pickle.dumps(sparse))):
        found = other(tokens(), labels=tokens())
        assert other.l1_weight == 0.1
        torch.testing.assert_close(found.l1, wanted.l1)


def test_relufy_finds_the_config_in_a_subfolder(tmp_path):
    wanted = _save_two(tmp_path, "inner")
    sparse = relufy(tmp_path, subfolder="inner")
    assert sparse.config.rms_norm_eps == 1e-2
    torch.testing.assert_close(sparse(tokens()).logits, wanted(tokens()).logits, rtol=1e-4, atol=1e-4)


@pytest.fixture
def hub_cache(tmp_path):
    """The Hub's cache with two revisions of some/model, and the models they are."""
    repository = tmp_path / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    models = {}
    for name, commit, eps in (("main", "a" * 40, 1e-6), ("next", "b" * 40, 1e-2)):
        (repository / "refs" / name).write_text(commit)
        models[name] = stock_model(hidden_act="relu2", rms_norm_eps=eps, seed=len(models))
        models[name].save_pretrained(repository / "snapshots" / commit)
    return tmp_path, models


@pytest.mark.parametrize("revision", ["main", "next"])
def test_relufy_reads_the_config_of_the_revision(hub_cache, revision):
    cache, models = hub_cache
    sparse = relufy(
        "some/model",
        revision=revision,
        cache_dir=cache,
        local_files_only=True,
        force_download=False,
        token=False,
        proxies=None,
        trust_remote_code=False,
        code_revision="main",
    )
    assert sparse.config.rms_norm_eps == models[revision].config.rms_norm_eps
    expected = models[revision](tokens()).logits
    torch.testing.assert_close(sparse(tokens()).logits, expected, rtol=1e-4, atol=1e-4)


def test_relufy_takes_a_config_as_from_pretrained_does(tmp_path):
    dense = stock_model(num_key_value_heads=4)
    dense.save_pretrained(tmp_path / "model")
    dense.config.rms_norm_eps = 1e-2
    dense.config.save_pretrained(tmp_path / "config")
    for config in (dense.config, tmp_path / "config"):
        assert relufy(tmp_path / "model", config=config).config.rms_norm_eps == 1e-2


@families
@pytest.mark.parametrize("from_path", [False, True])
def test_relufy_keeps_exact_zeros_that_are_there(family, from_path, tmp_path, caplog):
    dense = stock_model(family, hidden_act="relu2")
    dense.save_pretrained(tmp_path)
    sparse = relufy(tmp_path if from_path else dense)
    assert sparse.config.sparsity_activation == sparse.config.hidden_act == "relu2"
    torch.testing.assert_close(sparse(tokens()).logits, dense(tokens()).logits, rtol=1e-4, atol=1e-4)
    assert not [record for record in caplog.records if "relu2" in record.message]


def test_relufy_reads_another_name_of_squared_relu(tmp_path):
    stock_model(hidden_act="relu2").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"relu2"', '"relu_squared"'))
    assert relufy(tmp_path).config.sparsity_activation == "relu2"


@pytest.mark.parametrize("stock", ["silu", "gelu", "relu6"])
def test_relufy_makes_others_relu(stock):
    assert relufy(stock_model(hidden_act=stock)).config.sparsity_activation == "relu"


@pytest.mark.parametrize(
    ("stock", "asked", "lines"), [("relu2", "relu", 1), ("relu", "relu", 0), ("silu", "relu", 0)]
)
def test_relufy_logs_when_it_replaces_exact_zeros(stock, asked, lines, caplog, monkeypatch):
    monkeypatch.setattr("twell._log._logged", set())
    for _ in range(2):
        assert relufy(stock_model(hidden_act=stock), activation=asked).config.sparsity_activation == asked
    found = [record.message for record in caplog.records if "relufy" in record.message]
    assert len(found) == lines
    assert all("'relu2'" in line and "'relu'" in line for line in found)
