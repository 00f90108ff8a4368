"""From settings to datasets: tokenised once, then opened from the cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..._errors import reject
from ..._files import DamagedError, digest_of_json, make_folder, open_or_build
from ..._log import log_once
from ..config import DataConfig
from . import split, token_files
from .sequences import PackedDataset
from .sources import fingerprint
from .tokenizer import DISK_FULL, Encoder, load_tokenizer, obtain_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_TOKENIZER = "tokenizer"  # a folder beside the tokens


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The data of a run.

    held_out:      None if nothing is held out, or too little for one sequence.
    folder:        the token files, with their `index.json`.
    train_tokens, held_out_tokens:  as stored; a dataset drops its last, incomplete sequence.
    vocab_size:    the smallest vocabulary that a model needs: one above the highest id.
    """

    train: PackedDataset
    held_out: PackedDataset | None
    tokenizer: PreTrainedTokenizerFast
    folder: Path
    train_tokens: int
    held_out_tokens: int
    train_documents: int
    held_out_documents: int
    vocab_size: int


def prepare(config: DataConfig, *, quiet: bool = False, verify: bool = False) -> Prepared:
    """The datasets and the tokenizer of `config`, from the cache if they are there.

    Every process of a job may call it: one works, the others on its machine wait, and all get the same.
    Missing and truncated files are built again; files with changed contents are an error.
    verify:  check the contents of all files, not only of new and changed ones.
    """
    if config.prepared is not None:
        if not config.prepared.is_dir():
            reject("data.source", repr(config.source), "prepared:FOLDER with a folder that exists")
        return _opened(config, config.prepared, token_files.open_token_files(config.prepared, verify=verify))
    make_folder(config.cache_folder, "data.cache")
    content = fingerprint(config)
    tokenizer = obtain_tokenizer(config, content=content, quiet=quiet)
    encoder = Encoder(tokenizer)
    decisive = (config.text_field, config.held_out, config.held_out_tokens, config.max_tokens, config.seed)
    identity = ["tokens", token_files.FORMAT, split.VERSION, content, encoder.fingerprint, *decisive]
    folder = config.cache_folder / "tokens" / digest_of_json(identity)
    index = open_or_build(
        folder,
        partial(_checked, verify=verify),
        lambda into: _write(into, config, tokenizer, encoder, quiet=quiet),
        advice=DISK_FULL,
    )
    return _opened(config, folder, index)


def _checked(folder: Path, *, verify: bool) -> token_files.Index:
    index = token_files.open_token_files(folder, verify=verify)
    try:
        load_tokenizer(str(folder / _TOKENIZER))
    except (ValueError, OSError) as error:
        raise DamagedError(f"{folder / _TOKENIZER} is damaged ({error})") from error
    return index


def _write(
    folder: Path, config: DataConfig, tokenizer: PreTrainedTokenizerFast, encoder: Encoder, *, quiet: bool
) -> None:
    """Write the tokens with their tokenizer, so that the folder can be moved elsewhere."""
    token_files.write_token_files(folder, config, encoder, quiet=quiet)
    tokenizer.save_pretrained(folder / _TOKENIZER)


def _opened(config: DataConfig, folder: Path, index: token_files.Index) -> Prepared:
    def dataset(files: tuple[token_files.TokenFile, ...]) -> PackedDataset:
        paths = [(folder / file.name, file.tokens) for file in files]
        return PackedDataset(paths, dtype=index.dtype, sequence_length=config.sequence_length)

    if index.train_tokens < config.sequence_length:
        received = f"{config.source!r}, with {index.train_tokens:,} training tokens"
        reject("data.source", received, f"at least sequence_length = {config.sequence_length:,} of them")
    held_out = None
    if index.held_out_tokens >= config.sequence_length:
        held_out = dataset(index.held_out)
    elif config.held_out:
        log_once(
            f"no evaluation set: {index.held_out_tokens:,} held-out tokens do not fill a sequence of "
            f"{config.sequence_length:,}; use more text or a larger data.held_out"
        )
    return Prepared(
        train=dataset(index.train),
        held_out=held_out,
        tokenizer=load_tokenizer(str(folder / _TOKENIZER)),
        folder=folder,
        train_tokens=index.train_tokens,
        held_out_tokens=index.held_out_tokens,
        train_documents=index.train_documents,
        held_out_documents=index.held_out_documents,
        vocab_size=index.vocab_size,
    )
