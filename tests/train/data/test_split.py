"""The held-out set: decided by text and seed, never trained on."""

from __future__ import annotations

import random

import numpy as np
import pytest

from twell.train.data import prepare
from twell.train.data.split import HeldOut, divided, is_held_out, rank

from .corpora import small, stored, stored_documents, text, write_corpus


def test_the_share_is_met_and_the_seed_matters():
    ranks = {seed: [rank(text(i, words=3), seed) for i in range(4000)] for seed in (0, 1)}
    held_out = {seed: [is_held_out(r, 0.1) for r in ranks[seed]] for seed in ranks}
    assert 330 < sum(held_out[0]) < 470
    assert held_out[0] != held_out[1]
    assert not any(is_held_out(r, 0) for r in ranks[0])


@pytest.mark.parametrize("limit", [1, 37, 100, 10_000])
def test_the_lowest_ranks_are_kept_whatever_the_order(limit):
    documents = [(i * 31 % 101, np.full(1 + i % 9, i)) for i in range(101)]
    expected = np.concatenate([tokens for _, tokens in sorted(documents, key=lambda d: d[0])])[:limit]
    for shuffle in range(5):
        random.Random(shuffle).shuffle(documents)
        held_out = HeldOut(limit)
        for document_rank, tokens in documents:
            if held_out.wants(document_rank):
                held_out.add(document_rank, tokens)
        assert np.array_equal(np.concatenate(held_out.documents()), expected)


def test_equal_documents_are_no_trouble():
    held_out = HeldOut(5)
    for _ in range(4):
        held_out.add(3, np.arange(2))
    assert np.concatenate(held_out.documents()).tolist() == [0, 1, 0, 1, 0]


def test_disjoint_complete_and_independent_of_order(tmp_path):
    texts = write_corpus(tmp_path / "text")
    names = [str(tmp_path / "text" / f"part-{i}.txt") for i in range(4)]
    tokenizer = str(tmp_path / "tokenizer")
    first = prepare(small(tuple(names), tmp_path / "cache"), quiet=True)
    first.tokenizer.save_pretrained(tokenizer)
    other = prepare(small(tuple(names[::-1]), tmp_path / "cache", tokenizer=tokenizer), quiet=True)

    train, held_out = stored_documents(first, "train"), stored_documents(first, "held_out")
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == sorted(texts)
    assert (first.train_documents, first.held_out_documents) == (len(train), len(held_out))
    assert train == [t for t in texts if t in set(train)]
    assert np.array_equal(stored(first, "held_out"), stored(other, "held_out"))
    assert sorted(stored_documents(other, "train")) == sorted(train)


def test_the_held_out_set_is_limited_and_the_rest_unused(tmp_path):
    write_corpus(tmp_path / "text")
    whole = prepare(small(tmp_path / "text", tmp_path / "cache", held_out=0.5), quiet=True)
    cut = prepare(small(tmp_path / "text", tmp_path / "cache", held_out=0.5, held_out_tokens=200), quiet=True)
    assert cut.held_out_tokens == 200
    assert np.array_equal(stored(cut, "held_out"), stored(whole, "held_out")[:200])
    assert np.array_equal(stored(cut, "train"), stored(whole, "train"))


def test_no_held_out_set(tmp_path, caplog):
    (tmp_path / "one.txt").write_text(text(2, words=500))
    none = prepare(small(tmp_path / "one.txt", tmp_path / "cache", held_out=0), quiet=True)
    assert none.held_out is None
    assert "evaluation" not in caplog.text
    too_little = prepare(small(tmp_path / "one.txt", tmp_path / "cache", held_out=1e-9), quiet=True)
    assert too_little.held_out is None
    assert "no evaluation set" in caplog.text


def test_the_end_of_a_single_document_is_held_out(tmp_path):
    whole = "".join(f"line {i} of the only document\n" for i in range(400))
    (tmp_path / "one.txt").write_text(whole)
    for changes in ({}, {"max_tokens": 2000}):  # enough to train on is no reason to hold nothing out
        data = prepare(small(tmp_path / "one.txt", tmp_path / "cache", held_out=0.1, **changes), quiet=True)
        assert data.held_out is not None
        assert (data.train_documents, data.held_out_documents) == (1, 1)
        (held_out,) = stored_documents(data, "held_out")
        assert held_out == whole[-len(whole) // 10 :][-int(len(whole) * 0.1) :]
        if not changes:
            assert stored_documents(data, "train") == [whole[: -len(held_out)]]


def test_documents_are_cut_only_where_there_is_one():
    assert [part[::2] for part in divided(["abcdefghij"], 0.2, 0)] == [("ij", True), ("abcdefgh", False)]
    assert [part[::2] for part in divided(["abcdefghij"], 0.0, 0)] == [("abcdefghij", False)]
    assert [part[::2] for part in divided(["a"], 0.99, 0)] == [("a", False)]
    assert list(divided([], 0.5, 0)) == []
    texts = [text(i) for i in range(40)]
    for count in (2, 3, 40):
        found = list(divided(iter(texts[:count]), 0.5, 0))
        assert [part.text for part in found] == texts[:count]
        assert [part.held_out for part in found] == [is_held_out(rank(t, 0), 0.5) for t in texts[:count]]
