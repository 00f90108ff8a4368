"""`profile_model` on models that hand their tokens to a block in other ways, and on a GPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
from twell import SparseMLP
from twell.profiling import profile_model, read_profile
from twell.profiling.schema import FEWEST_LAYERS
from twell.profiling.speed import correlation_of, pearson
from twell.train.data.tokenizer import train_tokenizer, wrapped

TEXTS = ["the quick brown fox jumps over the lazy dog. " * 30, "numbers: 1 2 3 5 8 13 21 34 55 89\n" * 30]
LENGTH = 24
EARLY = Path(__file__).parents[2] / "benchmarks" / "results" / "profile_small.json"  # of 4 layers


@pytest.fixture(scope="module")
def tokenizer():
    return wrapped(train_tokenizer(TEXTS, vocab_size=300))


class Toy(nn.Module):
    """Embeddings and two blocks, which get their tokens [B, S, D], flat, with sequences last, or in part."""

    def __init__(self, order: str, *, gated: bool = True, hidden: int = 16, neurons: int = 40) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order = order
        self.config = SimpleNamespace(max_position_embeddings=64)
        self.embeddings = nn.Embedding(300, hidden)
        self.blocks = nn.ModuleList(SparseMLP(hidden, neurons, gated=gated) for _ in range(2))

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings

    def forward(self, input_ids, use_cache=False):
        x = self.embeddings(input_ids)
        for block in self.blocks:
            if self.order == "flat":
                x = x + block(x.flatten(0, 1)).view_as(x)
            elif self.order == "sequences last":
                x = x + block(x.transpose(0, 1)).transpose(0, 1)
            elif self.order == "in part":
                x = x.clone()
                x[:, ::3] += block(x[:, ::3].flatten(0, 1)).view_as(x[:, ::3])
            else:
                x = x + block(x)
        return x


def profiled(model, tokenizer, **options):
    options = {"sequence_length": LENGTH, "batch": 5, "repetitions": 0} | options
    return profile_model(model, tokenizer, TEXTS, **options)


@pytest.mark.parametrize("order", ["flat", "sequences last"])
@pytest.mark.parametrize("gated", [True, False])
def test_the_way_tokens_are_handed_over_does_not_matter(tokenizer, order, gated):
    expected = profiled(Toy("as usual", gated=gated), tokenizer)
    found = profiled(Toy(order, gated=gated), tokenizer)
    assert found.layers == expected.layers
    assert found.sample == expected.sample
    assert (found.most, found.fewest) == (expected.most, expected.fewest)
    assert len(found.layers[0].nnz_by_position) == len(found.position_starts)


def test_a_block_that_gets_some_of_the_tokens(tokenizer):
    found = profiled(Toy("in part"), tokenizer)
    assert {layer.tokens for layer in found.layers} == {found.tokens // 3}
    for layer in found.layers:
        assert layer.nnz.mean > 0
        assert layer.nnz_by_position is None
        assert (layer.overlap, layer.most, set(layer.union)) == (None, [], {None})
    assert (found.sample, found.most) == (None, [])


def test_blocks_that_do_not_run_are_named(tokenizer):
    model = Toy("as usual")
    model.blocks[1].down_proj.register_forward_hook(lambda *_: None)  # its own forward must run: not plain
    found = profiled(model, tokenizer)
    assert [layer.name for layer in found.layers] == ["blocks.0"]
    assert list(found.skipped) == ["blocks.1"]
    assert "hooked" in found.skipped["blocks.1"]


def test_equal_batches_of_any_size_count_the_same(tokenizer):
    one, all_at_once = (profiled(Toy("as usual"), tokenizer, batch=batch) for batch in (1, 1000))
    assert one.tokens == all_at_once.tokens
    assert [layer.nnz for layer in one.layers] == [layer.nnz for layer in all_at_once.layers]
    assert [layer.firing for layer in one.layers] == [layer.firing for layer in all_at_once.layers]
    assert [layer.most for layer in one.layers] == [layer.most for layer in all_at_once.layers]
    assert [layer.fewest for layer in one.layers] == [layer.fewest for layer in all_at_once.layers]


def test_correlation():
    nnz = [1.0, 2.0, 4.0, 3.0, 6.0, 5.0]
    assert pearson(nnz, [-count for count in nnz]) == pytest.approx(-1)
    assert pearson(nnz, [2 * count for count in nnz]) == pytest.approx(1)
    assert pearson(nnz[:5], nnz[:5]) is None  # of so few layers chance makes one
    assert pearson([1.0] * 6, nnz) is None


def test_a_correlation_that_was_kept_for_few_layers_is_not_read(tmp_path):
    stored = json.loads(EARLY.read_text())["correlation"]
    assert stored["sparse"] == pytest.approx(-0.987, abs=1e-3)
    profile = read_profile(EARLY)
    assert (profile.correlation.sparse, profile.correlation.auto) == (None, None)
    assert profile.correlation.paper == stored["paper"]
    known = dataclasses.replace(profile.correlation, sparse=-0.9)
    for count in (FEWEST_LAYERS - 1, FEWEST_LAYERS):
        layers = (profile.layers * 2)[:count]
        dataclasses.replace(profile, layers=layers, correlation=known).save(tmp_path / "profile.json")
        found = read_profile(tmp_path / "profile.json").correlation
        assert found.sparse == (-0.9 if count == FEWEST_LAYERS else None)


@pytest.mark.parametrize(("most", "expected"), [(33.0, None), (34.0, -1.0)])
def test_layers_alike_have_no_correlation(most, expected):
    """By less than a tenth, nnz tells layers apart no more than noise does."""
    layers = [timed_layer(nnz, 100 / nnz) for nnz in (30.1, 30.2, 30.3, 30.4, 30.5, most)]
    found = correlation_of(layers)
    assert found.paper == -0.996
    assert found.sparse == (expected and pytest.approx(expected, abs=0.01))
    assert found.auto == found.sparse


def timed_layer(nnz: float, gain: float) -> SimpleNamespace:
    return SimpleNamespace(speed=SimpleNamespace(nnz=nnz, sparse_speedup=gain, auto_speedup=gain))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("gated", [True, False])
def test_on_a_gpu(tokenizer, gated):
    """The same counts as on the CPU, but for rounding, and every layer is timed."""
    model = Toy("as usual", gated=gated, hidden=256, neurons=1024).bfloat16()
    options = {"sequence_length": 64, "batch": 16}
    on_cpu = profile_model(model, tokenizer, TEXTS * 8, repetitions=0, **options)
    found = profile_model(model.cuda(), tokenizer, TEXTS * 8, repetitions=3, **options)
    assert found.hardware["gpu"] == torch.cuda.get_device_name()
    for ours, theirs in zip(found.layers, on_cpu.layers, strict=True):
        assert ours.nnz.mean == pytest.approx(theirs.nnz.mean, rel=0.02)
        assert ours.union == pytest.approx(theirs.union, rel=0.02)
        assert ours.overlap.kept == pytest.approx(theirs.overlap.kept, abs=0.02)
        assert ours.speed.sparse_path == "block"
        assert ours.speed.tokens == 1024
        assert min(ours.speed.dense_ms, ours.speed.sparse_ms, ours.speed.auto_ms) > 0


def test_timed_blocks_are_counted_before_tokens(tokenizer):
    told = []
    profiled(
        Toy("in order"),
        tokenizer,
        repetitions=2,
        timing=lambda done, blocks: told.append((done, blocks)),
        progress=lambda tokens: told.append(tokens),
    )
    assert told[:2] == [(1, 2), (2, 2)]
    assert all(isinstance(tokens, int) for tokens in told[2:])
    assert len(told) > 2
