"""Which documents are held out. Their text and the seed decide, not their place in the corpus.

If the corpus is a single document, its end is held out.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

VERSION = 2
"""Part of the cache's keys: raise it when the same corpus is split differently."""

_RANKS = 1 << 64


class Part(NamedTuple):
    """A document, or a part of one, and its side of the split."""

    text: str
    rank: int
    held_out: bool


def divided(texts: Iterable[str], share: float, seed: int) -> Iterator[Part]:
    """`texts` in order, each with its side; a single one is cut in two, and its end comes first."""
    texts = iter(texts)
    first = list(itertools.islice(texts, 2))
    if len(first) == 1 and share:
        text = first[0]
        # The end first: readers stop when they have enough to train on.
        place = max(len(text) - int(len(text) * share), 1)
        for part, held_out in ((text[place:], True), (text[:place], False)):
            if part:
                yield Part(part, rank(part, seed), held_out)
        return
    for text in itertools.chain(first, texts):
        document_rank = rank(text, seed)
        yield Part(text, document_rank, is_held_out(document_rank, share))


def rank(text: str, seed: int) -> int:
    """A number below 2**64, evenly distributed, that depends on text and seed alone."""
    digest = hashlib.blake2b(f"{seed}\0{text}".encode(), digest_size=8, person=b"twell split")
    return int.from_bytes(digest.digest(), "little")


def is_held_out(document_rank: int, share: float) -> bool:
    """Whether a document of this rank is in the held-out `share`."""
    return document_rank < share * _RANKS


class HeldOut:
    """The evaluation set: the held-out documents of lowest rank, `limit` tokens of them.

    Ranks make it a sample of the whole corpus, the same for any order of its files. Documents that do not fit
    are dropped, not trained on: the set may contain a copy of them.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tokens = 0
        self._arrivals = 0
        self._highest_first: list[tuple[int, int, np.ndarray]] = []

    def wants(self, document_rank: int) -> bool:
        """Whether a document of this rank would be kept now."""
        return self._tokens < self._limit or document_rank < -self._highest_first[0][0]

    def add(self, document_rank: int, tokens: np.ndarray) -> None:
        """Keep a document, and drop the ones that no longer fit."""
        self._arrivals += 1  # breaks ties between equal texts: arrays do not compare
        heapq.heappush(self._highest_first, (-document_rank, self._arrivals, tokens))
        self._tokens += len(tokens)
        while self._tokens - len(self._highest_first[0][2]) >= self._limit:
            self._tokens -= len(heapq.heappop(self._highest_first)[2])

    def documents(self) -> list[np.ndarray]:
        """The documents by rank, at most `limit` tokens together: the last one may be cut."""
        kept = [
            tokens for _, _, tokens in sorted(self._highest_first, key=lambda entry: (-entry[0], entry[1]))
        ]
        excess = self._tokens - self._limit
        if excess > 0:
            kept[-1] = kept[-1][: len(kept[-1]) - excess]
        return kept
