"""The dense model that a non-gated one is timed against computes the same."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from twell.hf import SparseLlamaConfig, SparseLlamaForCausalLM
from twell.reproduction.speed import PlainBlock, model_pair

from ..train.runs import write_corpus


@pytest.mark.parametrize("gated", [True, False])
def test_both_of_a_pair_give_the_same_output(gated, tmp_path):
    from twell.train.data import DataConfig, prepare

    corpus = write_corpus(tmp_path / "corpus")
    data = DataConfig(source=str(corpus), vocab_size=384, sequence_length=16, cache=str(tmp_path / "cache"))
    torch.manual_seed(0)
    config = SparseLlamaConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=None,
        sparsity_gated_mlp=gated,
        sparsity_l1_coeff=1.0,
    )
    SparseLlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    prepare(data, quiet=True).tokenizer.save_pretrained(tmp_path / "model")
    pair = model_pair(tmp_path / "model", "float32", torch.device("cpu"))
    assert gated != any(isinstance(module, PlainBlock) for module in pair.dense.modules())
    ids = torch.randint(384, (2, 16))
    with torch.no_grad():
        dense, ours = (model(input_ids=ids, use_cache=False).logits for model in (pair.dense, pair.sparse))
    torch.testing.assert_close(dense, ours)
    pair.dense.train()
    outputs = pair.dense(input_ids=ids, labels=ids, use_cache=False)
    losses = torch.nn.functional.cross_entropy(dense[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(outputs.loss.detach(), losses)  # no L1 in it
