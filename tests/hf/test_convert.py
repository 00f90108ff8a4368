"""`relufy` and `to_stock`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from transformers.activations import ACT2FN

from twell.hf import relufy, set_neuron_major, to_stock

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
    ],
)
def test_to_stock_of_what_stock_classes_cannot_be(fields, why):
    with pytest.raises(ValueError, match=why):
        to_stock(sparse_model(**fields))


def test_to_stock_of_a_contiguous_model():
    sparse = sparse_model()
    set_neuron_major(sparse, False)
    assert torch.equal(to_stock(sparse).state_dict()["lm_head.weight"], sparse.lm_head.weight)
