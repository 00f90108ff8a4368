"""A corpus as token files: written once, opened by memory map.

train-00000.bin ...  token ids, little-endian uint16 or uint32, documents joined, an end token after each
held_out.bin         the same for the held-out documents; absent without any
index.json           sizes and checksums of the above
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .cache import DamagedError
from .config import DataConfig
from .progress import progress
from .sources import documents
from .split import HeldOut, is_held_out, rank
from .tokenizer import Encoder, parallel_encoding

FORMAT = 2
"""Part of the cache's key: raise it when the same settings give other files."""

SHARD_TOKENS = 1 << 27
BATCH_DOCUMENTS = 1024
BATCH_CHARACTERS = 1 << 22

_INDEX = "index.json"
_BLOCK_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """One .bin file, as written."""

    name: str
    tokens: int
    bytes: int
    blake2b: str


@dataclass(frozen=True, kw_only=True)
class Index:
    """What a folder of token files holds.

    dtype:     numpy's name of the ids' type, "<u2" or "<u4".
    train, held_out:  the files, in order.
    """

    dtype: str
    vocab_size: int
    train: tuple[TokenFile, ...]
    held_out: tuple[TokenFile, ...]
    train_documents: int
    held_out_documents: int

    @property
    def train_tokens(self) -> int:
        return sum(file.tokens for file in self.train)

    @property
    def held_out_tokens(self) -> int:
        return sum(file.tokens for file in self.held_out)


class TokenWriter:
    """Writes a stream of ids into files of at most `limit` tokens each."""

    def __init__(self, folder: Path, name: str, dtype: str, *, limit: int | None) -> None:
        self.tokens = 0
        self._folder = folder
        self._name = name
        self._dtype = np.dtype(dtype)
        self._limit = limit
        self._files: list[TokenFile] = []
        self._file: Any = None

    def add(self, tokens: np.ndarray) -> None:
        """Append `tokens` [n], over as many files as it takes."""
        while len(tokens):
            if self._file is None:
                self._start()
            room = len(tokens) if self._limit is None else self._limit - self._in_file
            part, tokens = tokens[:room], tokens[room:]
            data = part.astype(self._dtype, copy=False).tobytes()
            self._file.write(data)
            self._digest.update(data)
            self._in_file += len(part)
            self.tokens += len(part)
            if self._in_file == self._limit:
                self._finish()

    def close(self) -> tuple[TokenFile, ...]:
        """End the last file; all of them, in order."""
        if self._file is not None:
            self._finish()
        return tuple(self._files)

    def _start(self) -> None:
        number = f"-{len(self._files):05d}" if self._limit is not None else ""
        self._file = (self._folder / f"{self._name}{number}.bin").open("wb")
        self._digest = hashlib.blake2b(digest_size=16)
        self._in_file = 0

    def _finish(self) -> None:
        file, self._file = self._file, None
        file.close()
        self._files.append(
            TokenFile(
                name=Path(file.name).name,
                tokens=self._in_file,
                bytes=self._in_file * self._dtype.itemsize,
                blake2b=self._digest.hexdigest(),
            )
        )


def write_shards(folder: Path, config: DataConfig, encoder: Encoder, *, quiet: bool) -> None:
    """Tokenise the corpus of `config` into `folder`, the index last."""
    train = TokenWriter(folder, "train", encoder.dtype, limit=SHARD_TOKENS)
    evaluation = TokenWriter(folder, "held_out", encoder.dtype, limit=None)
    held_out = HeldOut(config.held_out_tokens)
    with contextlib.closing(train), contextlib.closing(evaluation):
        train_documents = _tokenise(config, encoder, train, held_out, quiet=quiet)
        kept = held_out.documents()
        for tokens in kept:
            evaluation.add(tokens)
        index = Index(
            dtype=encoder.dtype,
            vocab_size=encoder.vocab_size,
            train=train.close(),
            held_out=evaluation.close(),
            train_documents=train_documents,
            held_out_documents=len(kept),
        )
    (folder / _INDEX).write_text(json.dumps({"format": FORMAT, **dataclasses.asdict(index)}, indent=1) + "\n")


def open_shards(folder: Path, *, verify: bool = False) -> Index:
    """The index of `folder`, its files checked: their sizes, with `verify` their checksums too.

    Raises `DamagedError`, which names the file.
    """
    path = folder / _INDEX
    try:
        entries = json.loads(path.read_text())
        stored_format = entries.pop("format")
        files = {
            name: tuple(TokenFile(**file) for file in entries.pop(name)) for name in ("train", "held_out")
        }
        index = Index(**entries, **files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path} is damaged ({error})") from error
    if stored_format != FORMAT:
        raise DamagedError(f"{path} has format {stored_format}, expected {FORMAT}")
    for file in (*index.train, *index.held_out):
        _check(folder / file.name, file, verify=verify)
    return index


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """`texts` in lists of limited size: enough to encode in parallel, little enough to hold."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _tokenise(
    config: DataConfig, encoder: Encoder, train: TokenWriter, held_out: HeldOut, *, quiet: bool
) -> int:
    """Send every document its way; how many went to `train`."""
    read = train_documents = 0
    began = time.monotonic()
    with parallel_encoding(), progress("tokenising", total=config.max_tokens, quiet=quiet) as report:
        for batch in batches(documents(config)):
            for document_rank, tokens in _encoded(batch, config, encoder, held_out):
                if is_held_out(document_rank, config.held_out):
                    held_out.add(document_rank, tokens)
                    continue
                left = len(tokens) if config.max_tokens is None else config.max_tokens - train.tokens
                train.add(tokens[:left])
                train_documents += 1
                if train.tokens == config.max_tokens:
                    break
            read += len(batch)
            rate = train.tokens / max(time.monotonic() - began, 1e-9)
            report(train.tokens, f"{read:,} documents, {train.tokens:,} tokens, {rate:,.0f} tokens/s")
            if train.tokens == config.max_tokens:
                break
    return train_documents


def _encoded(
    batch: list[str], config: DataConfig, encoder: Encoder, held_out: HeldOut
) -> Iterator[tuple[int, np.ndarray]]:
    """Rank and tokens of each document of `batch` that is of use, in order."""
    ranked = [(rank(text, config.seed), text) for text in batch]
    useful = [(r, text) for r, text in ranked if not is_held_out(r, config.held_out) or held_out.wants(r)]
    tokens = encoder.encode([text for _, text in useful])
    return zip((r for r, _ in useful), tokens, strict=True)


def _check(path: Path, file: TokenFile, *, verify: bool) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DamagedError(f"{path} is missing ({error})") from error
    if size != file.bytes:
        raise DamagedError(f"{path} is damaged: {size:,} bytes, expected {file.bytes:,}")
    if verify:
        digest = hashlib.blake2b(digest_size=16)
        with path.open("rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                digest.update(block)
        if digest.hexdigest() != file.blake2b:
            raise DamagedError(f"{path} is damaged: its checksum is not the one it was written with")
