"""`prune_` on transformers models: their configs follow, and what is saved loads back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import twell
from twell import hf

from ..hf.tiny import SIZES, sparse_model, stock_model, tokens
from .neurons import assert_same_state, kill, state_of

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}


def stock_llama():
    return stock_model(intermediate_size=64, mlp_bias=True)


def opt():
    return OPTForCausalLM(OPTConfig(**SMALL, ffn_dim=64, max_position_embeddings=64, word_embed_proj_dim=32))


def gpt2():
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=97, activation_function="relu", **sizes, **special))


def bert():
    return BertForMaskedLM(BertConfig(**SMALL, intermediate_size=64, hidden_act="relu"))


def t5():
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=97, decoder_start_token_id=0, **sizes))


def bart():
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {"layers": 1, "attention_heads": 2, "ffn_dim": 64}.items()
    }
    return BartForConditionalGeneration(
        BartConfig(vocab_size=97, d_model=32, activation_function="relu", **sides)
    )


def phi3():
    return Phi3ForCausalLM(Phi3Config(**SMALL, intermediate_size=64, hidden_act="relu", pad_token_id=0))


# family: (model, the fields of its config and what they become)
STOCK = {
    "llama": (stock_llama, {"intermediate_size": 40}),
    "opt": (opt, {"ffn_dim": 40}),
    "gpt2": (gpt2, {"n_inner": 40}),
    "bert": (bert, {"intermediate_size": 40}),
    "t5": (t5, {"d_ff": 40}),
    "bart": (bart, {"encoder_ffn_dim": 40, "decoder_ffn_dim": 24}),
    "phi3": (phi3, {"intermediate_size": 40}),  # gate and up in one projection
}


def batch_for(model) -> dict[str, torch.Tensor]:
    ids = tokens(2, 17)
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(**batch_for(model)).logits


def made(family: str):
    torch.manual_seed(0)
    model = STOCK[family][0]().eval()
    assert twell.sparsify_(model).blocks
    return model


class TestStockClasses:
    @pytest.mark.parametrize("family", STOCK)
    def test_load_back_in_the_stock_class(self, family, tmp_path):
        model = made(family)
        kill(model, 37, 24)
        expected = logits(model)
        report = twell.prune_(model, data=[batch_for(model)])
        fields = STOCK[family][1]
        assert {row.after for row in report.blocks} == set(fields.values())
        pruned = logits(model)
        torch.testing.assert_close(pruned, expected, rtol=1e-6, atol=1e-6)
        configs = [module.config for module in model.modules() if hasattr(module, "config")]
        for field, size in fields.items():
            assert {getattr(config, field) for config in configs} == {size}
        model.save_pretrained(tmp_path)
        loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
        assert not any(info.values())
        assert not dict(twell.sparsify.blocks.named_blocks(loaded))
        assert sum(p.numel() for p in loaded.parameters()) == report.parameters_after
        twell.densify_(model)
        assert torch.equal(logits(loaded), logits(model))
        twell.sparsify_(loaded)
        torch.testing.assert_close(logits(loaded), pruned, rtol=1e-6, atol=1e-6)

    def test_a_model_inside_a_module(self, tmp_path):
        class Scorer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.base = made("llama").model
                self.head = twell.SparseMLP(32, 40)

            def forward(self, input_ids):
                return self.head(self.base(input_ids).last_hidden_state)

        model = Scorer()
        kill(model, 37, 24, 16)
        expected = model(tokens())
        report = twell.prune_(model, data=[tokens()])
        sizes = {row.block: row.after for row in report.blocks}
        assert sizes["head"] == 16
        assert sizes["base.layers.0.mlp"] == sizes["base.layers.1.mlp"] == model.base.config.intermediate_size
        torch.testing.assert_close(model(tokens()), expected, rtol=1e-6, atol=1e-6)

    def refused(self, model, match, fired=(0, 0)):
        blocks = twell.sparsify.blocks.named_blocks(model)
        sizes = [block.intermediate_size for _, block in blocks]
        firing = [torch.full((n,), times) for n, times in zip(sizes, fired, strict=False)]
        before, config = state_of(model), model.config.to_dict()
        with pytest.raises(ValueError, match=match):
            twell.prune_(model, firing)
        assert_same_state(model, before)
        assert model.config.to_dict() == config

    def test_a_class_without_a_field_for_the_size(self):
        model = BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=2))
        for block in model.transformer.h:
            block.mlp = twell.SparseMLP(32, 128, gated=False)
        self.refused(model, "a BloomConfig with no field for the 128 neurons of block 'transformer.h.0.mlp'")

    def test_a_field_that_sizes_more_than_sparse_blocks(self):
        model = stock_model()
        twell.sparsify_(model, filter_fn=lambda name, _: "layers.0" in name)
        self.refused(model, "intermediate_size sizes 'model.layers.1.mlp.gate_proj.weight' as well")

    def test_a_class_that_its_config_does_not_build(self):
        class Odd(LlamaForCausalLM):
            def __init__(self, config, more):
                super().__init__(config)

        model = Odd(LlamaConfig(**SIZES, hidden_act="relu"), 1)
        twell.sparsify_(model)
        self.refused(model, "model: got a Odd that cannot be built: .*'more'")

    def test_a_model_that_is_not_as_its_config_says(self):
        model = stock_model()
        model.model.layers[1].mlp = twell.SparseMLP(32, 40)
        twell.sparsify_(model)
        self.refused(model, r"config makes 'model.layers.1.mlp.gate_proj.weight' \(48, 32\)", fired=(1, 0))

    def test_equal_sizes_do_not_confuse(self):
        """48 in every field that may hold a size: D, H, positions, words."""
        sizes = dict.fromkeys(("vocab_size", "hidden_size", "max_position_embeddings"), 48)
        model = stock_model(**sizes, intermediate_size=48)
        twell.sparsify_(model)
        twell.prune_(model, [torch.arange(48)] * 2, min_fires=30)
        config = model.config
        assert (config.intermediate_size, config.hidden_size, config.vocab_size) == (24, 48, 48)


class TestOurClasses:
    @pytest.mark.parametrize("family", ["llama", "qwen2"])
    @pytest.mark.parametrize("gated", [True, False])
    def test_every_layer_has_its_size_and_loads_back(self, family, gated, tmp_path):
        model = sparse_model(family, sparsity_gated_mlp=gated, sparsity_new_intermediate_size=64)
        kill(model, 37, 24)
        expected = logits(model)
        report = twell.prune_(model, data=[batch_for(model)])
        assert [row.after for row in report.blocks] == model.config.neurons_per_layer()
        assert len(set(model.config.neurons_per_layer())) == 2
        pruned = logits(model)
        torch.testing.assert_close(pruned, expected, rtol=1e-6, atol=1e-6)
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert type(loaded) is type(model)
        assert torch.equal(logits(loaded), pruned)
        again = twell.prune_(loaded, [torch.ones(n, dtype=torch.int64) for n in (40, 24)], min_fires=2)
        assert loaded.config.neurons_per_layer() == [row.after for row in again.blocks] == [8, 8]

    def test_firing_that_the_model_returns(self):
        model = sparse_model()
        output = model(tokens(), record_sparsity=True)
        twell.prune_(model, output.firing)
        torch.testing.assert_close(model(tokens()).logits, output.logits, rtol=1e-6, atol=1e-6)

    def test_layers_of_one_size_load_in_the_stock_class(self, tmp_path):
        model = sparse_model(sparsity_layer_sizes=[64, 56])
        living = kill(model, 24)
        sizes = {name: block.intermediate_size for name, block in twell.sparsify.blocks.named_blocks(model)}
        firing = {
            name: torch.zeros(sizes[name], dtype=torch.int64).index_fill(0, kept, 1)
            for name, kept in living.items()
        }
        twell.prune_(model, firing)
        assert model.config.sparsity_layer_sizes is None
        model.save_pretrained(tmp_path)
        stock = LlamaForCausalLM.from_pretrained(tmp_path)
        torch.testing.assert_close(logits(stock), logits(model), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(logits(hf.to_stock(model)), logits(model), rtol=1e-6, atol=1e-6)

    def test_the_backbone_alone(self, tmp_path):
        model = copy.deepcopy(sparse_model().model)
        twell.prune_(model, [torch.arange(48), torch.arange(48)], min_fires=20)
        model.save_pretrained(tmp_path)
        loaded = hf.SparseLlamaModel.from_pretrained(tmp_path)
        with torch.no_grad():
            assert torch.equal(loaded(tokens())[0], model(tokens())[0])

    def test_trains_afterwards(self):
        model = sparse_model(sparsity_l1_coeff=1e-3).train()
        twell.prune_(model, data=[{"input_ids": tokens(), "labels": tokens()}])
        assert model.training
        output = model(tokens(), labels=tokens())
        output.loss.backward()
        assert [len(firing) for firing in output.firing] == model.config.neurons_per_layer()
        assert all(p.grad is not None for p in model.parameters())
