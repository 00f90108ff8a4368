"""Tokenizers: trained ones are exact and repeatable, loaded ones are checked."""

from __future__ import annotations

import os

import numpy as np
import pytest

pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

import transformers

from twell.train.data import tokenizer as module
from twell.train.data.split import is_held_out, rank
from twell.train.data.tokenizer import END, Encoder, obtain_tokenizer, train_tokenizer, wrapped

from .corpora import small, text, write_corpus

TRICKY = [
    "plain",
    "  leading and trailing  ",
    "emoji 🙂👩‍👩‍👧 and 漢字",
    "CRLF\r\nand\ttab\r\n\r\n",
    "a , b . c 's n't",
    f"spells {END} inside",
    "\x01\x7f\u2028\ufffd",
]


@pytest.fixture(scope="module")
def trained():
    return wrapped(train_tokenizer([text(i) for i in range(30)], vocab_size=300))


def decoded(tokenizer, ids) -> str:
    return tokenizer.decode(np.asarray(ids, dtype=int).tolist())


@pytest.mark.parametrize("given", TRICKY)
def test_round_trip(trained, given):
    (ids,) = Encoder(trained).encode([given])
    assert ids[-1] == trained.eos_token_id
    assert trained.eos_token_id not in ids[:-1]
    assert decoded(trained, ids[:-1]) == given


def test_round_trip_in_pieces(trained, monkeypatch):
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 7)
    texts = [*TRICKY, text(1), "\n" * 30, "", "x"]
    encoded = Encoder(trained).encode(texts)
    assert [decoded(trained, ids[:-1]) for ids in encoded] == texts


def test_training_is_repeatable():
    texts = [text(i) for i in range(30)]
    first = train_tokenizer(texts, vocab_size=400)
    assert first.to_str() == train_tokenizer(texts, vocab_size=400).to_str()
    assert first.get_vocab_size() <= 400


def test_bar_is_shown_unless_quiet(capfd):
    train_tokenizer([text(1)], vocab_size=300, quiet=True)
    assert capfd.readouterr().err == ""
    train_tokenizer([text(1)], vocab_size=300, quiet=False)
    assert "training the tokenizer" in capfd.readouterr().err


def test_a_trained_tokenizer_is_kept(tmp_path, monkeypatch):
    write_corpus(tmp_path / "text")
    config = small(tmp_path / "text", tmp_path / "cache")
    first = obtain_tokenizer(config, quiet=True)
    with monkeypatch.context() as patch:
        patch.setattr(module, "train_tokenizer", None)
        assert Encoder(obtain_tokenizer(config)).fingerprint == Encoder(first).fingerprint
    (kept,) = (tmp_path / "cache" / "tokenizers").glob("*/tokenizer.json")
    kept.write_text(kept.read_text()[:100])
    assert Encoder(obtain_tokenizer(config, quiet=True)).fingerprint == Encoder(first).fingerprint


def test_training_text_is_limited_and_not_held_out(tmp_path):
    write_corpus(tmp_path / "text")
    config = small(tmp_path / "text", tmp_path / "cache", tokenizer_bytes=1000, held_out=0.5)
    texts = list(module._training_texts(config))
    assert sum(len(part.encode()) for part in texts) == 1000
    assert not any(is_held_out(rank(part, 0), 0.5) for part in texts[:-1])


def test_saved_with_a_model_and_loaded_by_name(trained, tmp_path):
    trained.save_pretrained(tmp_path)
    config = small("unused", tmp_path, tokenizer=str(tmp_path))
    loaded = obtain_tokenizer(config)
    assert loaded.eos_token == loaded.bos_token == END
    assert len(loaded) == len(trained)
    assert [ids.tolist() for ids in Encoder(loaded).encode(TRICKY)] == [
        ids.tolist() for ids in Encoder(trained).encode(TRICKY)
    ]


def test_the_caller_s_tokenizer_is_left_alone(trained):
    Encoder(trained).encode([END])
    assert trained(END)["input_ids"] == [trained.eos_token_id]


def test_ids_take_four_bytes_when_they_must():
    vocabulary = {str(i): i for i in range(70_000)} | {"</s>": 70_000}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="0"))
    encoder = Encoder(transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))
    assert (encoder.dtype, encoder.vocab_size) == ("<u4", 70_001)
    assert encoder.encode(["69999"])[0].tolist() == [69_999, 70_000]


def test_without_an_end_token(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"without an end-of-sequence token; accepted: .*add_special_tokens"):
        module.load_tokenizer(str(tmp_path))


def test_an_unknown_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"data\.tokenizer: got .*missing.*cannot be loaded"):
        module.load_tokenizer(str(tmp_path / "missing"))


def test_threads(monkeypatch):
    variable = "TOKENIZERS_PARALLELISM"
    monkeypatch.setattr(module, "_set_by_process", None)
    monkeypatch.setenv(variable, "true")
    with module.parallel_encoding():
        assert os.environ[variable] == "true"
    assert os.environ[variable] == "true", "the user's choice stands"

    monkeypatch.delenv(variable)
    for _ in range(2):
        with module.parallel_encoding():
            assert variable not in os.environ
        assert os.environ[variable] == "false"

    monkeypatch.setattr(module, "_set_by_process", os.getpid() + 1)
    with module.parallel_encoding():
        assert os.environ[variable] == "false", "a forked process has no threads"
