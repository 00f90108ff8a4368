"""The `--text` of commands: how many tokens it is expected to have."""

from __future__ import annotations

import gzip

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from twell.cli.text import expected_tokens, text_source
from twell.train.data.tokenizer import train_tokenizer, wrapped

SENTENCE = "the quick brown fox jumps over the lazy dog, naïvely. "


@pytest.fixture(scope="module")
def tokenizer():
    return wrapped(train_tokenizer([SENTENCE], vocab_size=300))


def test_tokens_are_expected_from_the_beginning_of_the_text(tmp_path, tokenizer):
    (tmp_path / "text.txt").write_text(SENTENCE * 5000)  # more than is looked at
    source = text_source([str(tmp_path / "text.txt")])
    true = len(tokenizer(SENTENCE * 5000, add_special_tokens=False).input_ids)
    assert expected_tokens(source, tokenizer) == pytest.approx(true, rel=0.01)
    assert expected_tokens(source, tokenizer, most=100) == 100


def test_nothing_is_expected_of_packed_text(tmp_path, tokenizer):
    with gzip.open(tmp_path / "text.txt.gz", "wt") as file:
        file.write(SENTENCE)
    source = text_source([str(tmp_path / "text.txt.gz")])
    assert expected_tokens(source, tokenizer) is None
    assert expected_tokens(source, tokenizer, most=100) == 100
