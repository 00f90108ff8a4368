"""A corpus as token files: written once, checked, opened by memory map.

train-00000.bin ...  token ids, little-endian uint16 or uint32, documents joined, an end token after each
held_out.bin         the same for the held-out documents, if there are any
index.json           sizes and digests of the above
.verified.json       sizes and times of the files whose digests were checked
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..._errors import reject
from ..._files import DamagedError, digest_of_file, new_digest, read_json_object, write_json
from ..._log import log_once
from ..config import DataConfig
from .sources import documents, text_bytes
from .split import HeldOut, Part, divided
from .tokenizer import Encoder, parallel_encoding, progress

FORMAT = 2
"""Part of the cache's key: raise it when the same settings give different files."""

SHARD_TOKENS = 1 << 27
BATCH_DOCUMENTS = 1024
BATCH_CHARACTERS = 1 << 22

_INDEX, _VERIFIED = "index.json", ".verified.json"


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """One .bin file, as it was written."""

    name: str
    tokens: int
    bytes: int
    blake2b: str


@dataclass(frozen=True, kw_only=True)
class Index:
    """The contents of a folder of token files.

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
        """Append `tokens` [n], to as many files as it takes."""
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
        """Finish the last file; returns all files, in order."""
        if self._file is not None:
            self._finish()
        return tuple(self._files)

    def _start(self) -> None:
        number = f"-{len(self._files):05d}" if self._limit is not None else ""
        self._file = (self._folder / f"{self._name}{number}.bin").open("wb")
        self._digest = new_digest()
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


def write_token_files(folder: Path, config: DataConfig, encoder: Encoder, *, quiet: bool) -> None:
    """Tokenise the corpus of `config` into `folder`; the index comes last."""
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
    write_json(folder / _INDEX, {"format": FORMAT, **dataclasses.asdict(index)})


def open_token_files(folder: Path, *, verify: bool = False) -> Index:
    """Read the index of `folder` and check its files: sizes always, contents unless checked before.

    A missing or truncated file raises a `DamagedError` that names it. Changed contents raise a plain
    ValueError: building the file again would hide that something has changed it.
    verify:  check all contents.
    """
    path = folder / _INDEX
    try:
        entries = json.loads(path.read_bytes())
        stored_format = entries.pop("format")
        files = {
            name: tuple(TokenFile(**file) for file in entries.pop(name)) for name in ("train", "held_out")
        }
        index = Index(**entries, **files)
        width = np.dtype(index.dtype).itemsize
        if any(file.bytes != file.tokens * width for file in (*index.train, *index.held_out)):
            raise ValueError("sizes contradict each other")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged ({error})") from error
    if stored_format != FORMAT:
        raise DamagedError(f"{path} has format {stored_format}, expected {FORMAT}")
    for file in (*index.train, *index.held_out):
        _check_size(folder / file.name, file)
    check_contents(folder, {f.name: f.blake2b for f in (*index.train, *index.held_out)}, always=verify)
    return index


def batches(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """`parts` in batches, large enough to encode in parallel and small enough for memory."""
    batch: list[Part] = []
    characters = 0
    for part in parts:
        batch.append(part)
        characters += len(part.text)
        if len(batch) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _tokenise(
    config: DataConfig, encoder: Encoder, train: TokenWriter, held_out: HeldOut, *, quiet: bool
) -> int:
    """Tokenise every document to its side of the split; returns the number of training documents."""
    read = train_documents = characters = 0
    began = time.monotonic()
    size = text_bytes(config)
    total = None if size is None and config.max_tokens is None else 1.0
    with parallel_encoding(), progress("tokenising", total=total, quiet=quiet) as report:
        for batch in batches(divided(documents(config), config.held_out, config.seed)):
            useful = [part for part in batch if not part.held_out or held_out.wants(part.rank)]
            for part, tokens in zip(useful, encoder.encode([p.text for p in useful]), strict=True):
                if part.held_out:
                    held_out.add(part.rank, tokens)
                    continue
                left = len(tokens) if config.max_tokens is None else config.max_tokens - train.tokens
                train.add(tokens[:left])
                train_documents += 1
                if train.tokens == config.max_tokens:
                    break
            read += len(batch)
            characters += sum(len(part.text) for part in batch)
            rate = train.tokens / max(time.monotonic() - began, 1e-9)
            done = max(characters / size if size else 0, train.tokens / (config.max_tokens or math.inf))
            report(done, f"{read:,} documents, {train.tokens:,} tokens, {rate:,.0f} tokens/s")
            if train.tokens == config.max_tokens:
                break
    return train_documents


def _check_size(path: Path, file: TokenFile) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DamagedError(f"{path} is missing ({error})") from error
    if size != file.bytes:
        raise DamagedError(f"{path} is damaged: {size:,} bytes, expected {file.bytes:,}")


def check_contents(folder: Path, digests: Mapping[str, str], *, always: bool = False) -> None:
    """Raise a ValueError unless the files of `folder` have these digests.

    digests:  name of a file -> digest.
    always:   read every file, even if it was checked before and has kept its size and time.
    """
    before = read_json_object(folder / _VERIFIED) or {}
    now = {name: _stamp(folder / name, digest) for name, digest in digests.items()}
    for name, digest in digests.items():
        if not always and before.get(name) == now[name]:
            continue
        if digest_of_file(folder / name) != digest:
            reject(
                "data",
                f"{folder / name}, whose contents have changed since it was written",
                f"unchanged tokens: remove {folder} to tokenise the text again, or bring an undamaged copy",
            )
    if before != now:
        try:
            write_json(folder / _VERIFIED, now)
        except OSError as error:
            log_once(f"{folder / _VERIFIED} cannot be written ({error}): every run reads all token files")


def _stamp(path: Path, digest: str) -> dict[str, Any]:
    status = path.stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "blake2b": digest}
