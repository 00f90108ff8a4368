"""The tokenizer of a run, trained on its corpus or from Hugging Face, and its use on all cores."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ..._errors import needed, reject
from ..._files import DamagedError, digest_of, digest_of_json, make_folder, open_or_build
from ..config import DataConfig
from .sources import documents, fingerprint, text_bytes
from .split import VERSION as SPLIT
from .split import divided

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

TRAIN = "train"
END = "<|endoftext|>"
FORMAT = 1
"""Part of the cache's key: raise it when the same corpus gives a different tokenizer."""

PIECE_CHARACTERS = 1 << 20
"""Longer documents are encoded in pieces: encoding one at once takes many times its size in memory."""

DISK_FULL = "free some, or set data.cache to a folder on another disk"
_FILE = "tokenizer.json"
_PARALLEL = "TOKENIZERS_PARALLELISM"
_set_by_process: int | None = None


def obtain_tokenizer(
    config: DataConfig, *, content: Any = None, quiet: bool = False
) -> PreTrainedTokenizerFast:
    """The tokenizer that `config` asks for, with an end-of-sequence token.

    A trained one is cached. `content`: the source's fingerprint, if it is known already.
    """
    if config.tokenizer != TRAIN:
        return load_tokenizer(config.tokenizer)
    decisive = (config.text_field, config.vocab_size, config.tokenizer_bytes, config.held_out, config.seed)
    content = fingerprint(config) if content is None else content
    key = digest_of_json(["tokenizer", FORMAT, SPLIT, content, *decisive])
    make_folder(config.cache_folder, "data.cache")
    folder = config.cache_folder / "tokenizers" / key

    def build(into: Path) -> None:
        texts = _training_texts(config)
        size = text_bytes(config)
        read = None if size is None else min(int(size * (1 - config.held_out)), config.tokenizer_bytes)
        tokenizer = train_tokenizer(texts, vocab_size=config.vocab_size, quiet=quiet, characters=read)
        tokenizer.save(str(into / _FILE))

    return wrapped(open_or_build(folder, _open, build, advice=DISK_FULL))


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, quiet: bool = True, characters: int | None = None
) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` tokens; equal texts give equal tokenizers.

    characters:  about how many the texts have, if that is known: for the bar.
    """
    tokenizers = needed("tokenizers", "training a tokenizer", extra="train")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    with parallel_encoding(), progress("training the tokenizer", total=characters, quiet=quiet) as report:

        def reported() -> Iterator[str]:
            read = 0
            for text in texts:
                yield text
                read += len(text)
                report(read, f"{read / 1e6:,.1f} million characters")

        tokenizer.train_from_iterator(reported(), trainer)
    return tokenizer


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A Hugging Face tokenizer by name or folder."""
    transformers = needed("transformers", f"the tokenizer {name!r}", extra="train")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(os.path.expanduser(name))
    except (OSError, ValueError) as error:
        accepted = "'train', or the name or folder of a Hugging Face tokenizer"
        reject("data.tokenizer", f"{name!r}, which cannot be loaded ({error})", accepted)
    if not getattr(tokenizer, "is_fast", False):
        reject(
            "data.tokenizer", f"{name!r}, a {type(tokenizer).__name__}", "one with a tokenizer.json (fast)"
        )
    if tokenizer.eos_token_id is None:
        reject(
            "data.tokenizer",
            f"{name!r}, without an end-of-sequence token",
            "one with it: load yours, call tokenizer.add_special_tokens({'eos_token': '</s>'}), then "
            "tokenizer.save_pretrained(FOLDER), and name FOLDER here",
        )
    return tokenizer


def wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """A trained tokenizer for transformers; decoding gives back the exact text."""
    transformers = needed("transformers", "a trained tokenizer", extra="train")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, clean_up_tokenization_spaces=False
    )


class Encoder:
    """Turns documents into token ids, each with an end-of-sequence token after it.

    Text that spells a special token is encoded as text: a document cannot end itself.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        tokenizers = needed("tokenizers", "encoding text", extra="train")
        # A copy: the settings below must not change the caller's tokenizer.
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._end = int(tokenizer.eos_token_id)
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size: int = max(max(ids), self._end) + 1
        self.dtype: str = "<u2" if self.vocab_size <= 1 << 16 else "<u4"

    @property
    def fingerprint(self) -> str:
        """Changes whenever the ids may change."""
        return digest_of(f"{self._end}\0{self._tokenizer.to_str()}".encode())

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """One array [tokens] of `dtype` per text, with its end token."""
        pieces = [_pieces(text) for text in texts]
        flat = [piece for of_one in pieces for piece in of_one]
        encoded = iter(self._tokenizer.encode_batch_fast(flat, add_special_tokens=False))
        end = np.array([self._end], dtype=self.dtype)
        return [
            np.concatenate([*(np.array(next(encoded).ids, dtype=self.dtype) for _ in of_one), end])
            for of_one in pieces
        ]


@contextlib.contextmanager
def parallel_encoding() -> Iterator[None]:
    """Let `tokenizers` use all cores inside the block, without warnings afterwards.

    Once it has used threads, `tokenizers` warns in every forked data-loading worker unless its variable is
    set, so we set it to what workers get anyway. A user's own setting stands. A forked process has no threads
    to go back to, so only the process that set the variable removes it.
    """
    global _set_by_process
    if _set_by_process == os.getpid():
        os.environ.pop(_PARALLEL, None)
    try:
        yield
    finally:
        if _PARALLEL not in os.environ:
            os.environ[_PARALLEL] = "false"
            _set_by_process = os.getpid()


@contextlib.contextmanager
def progress(description: str, *, total: float | None, quiet: bool) -> Iterator[Callable[[float, str], None]]:
    """A progress bar on stderr; yields a function that takes how much is done, and a note.

    total:  None if it is unknown; else the bar shows the time that is left.
    quiet:  show nothing.
    """
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn() if total is None else TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=quiet,
    )
    with bar:
        task = bar.add_task(description, total=total, note="")
        yield lambda done, note: bar.update(task, completed=done, note=note)
        bar.update(task, total=1, completed=1)


def _open(folder: Path) -> Tokenizer:
    tokenizers = needed("tokenizers", "a trained tokenizer", extra="train")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / _FILE))
    except Exception as error:  # the library raises bare Exceptions
        raise DamagedError(f"{folder / _FILE} is damaged ({error})") from error
    if tokenizer.token_to_id(END) is None:
        raise DamagedError(f"{folder / _FILE} is damaged (no {END})")
    return tokenizer


def _training_texts(config: DataConfig) -> Iterator[str]:
    """Documents that are not held out, at most `tokenizer_bytes` of UTF-8; the last one may be cut."""
    left = config.tokenizer_bytes
    for text, _, held_out in divided(documents(config), config.held_out, config.seed):
        if held_out:
            continue
        data = text.encode()
        yield text if len(data) <= left else data[:left].decode(errors="ignore")
        left -= len(data)
        if left <= 0:
            return


def _pieces(text: str) -> list[str]:
    """`text`, cut after line ends if it is long."""
    pieces = []
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        line_end = text.rfind("\n", start, start + PIECE_CHARACTERS) + 1
        cut = line_end if line_end > start else start + PIECE_CHARACTERS
        pieces.append(text[start:cut])
        start = cut
    pieces.append(text[start:])
    return pieces
