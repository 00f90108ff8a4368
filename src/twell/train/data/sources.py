"""The documents of a corpus, always in the same order, and a fingerprint that changes with them."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..._errors import needed, reject
from ..._log import log_once
from ..config import DataConfig
from . import readers

BUILT_IN = "python"
HUB_PREFIX = "hf:"

NOT_IN_BUILT_IN = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)
"""Folders that the built-in corpus skips: installed packages, test suites, code tables, help texts."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One entry of `DataConfig.source`.

    read:         reads the documents from the start; some may be empty.
    fingerprint:  changes whenever the documents may have changed.
    """

    read: Callable[[], Iterator[str]]
    fingerprint: Any


def documents(config: DataConfig, longest: int | None = None) -> Iterator[str]:
    """The documents, without empty ones, as valid Unicode, always in the same order.

    A missing path fails here; reading starts with the iteration.
    longest:  text files come in pieces of about this many bytes, cut after line ends, each like a document of
              its own: a file of any size then takes little memory.
    """
    return _not_empty([_found(name, config.text_field, longest) for name in config.sources], config)


def text_bytes(config: DataConfig) -> int | None:
    """Bytes of the text; None where files hold more than text, and for datasets on the Hub and pipes."""
    total = 0
    for name in config.sources:
        if name.startswith(HUB_PREFIX):
            return None
        given = Path(name).expanduser()
        if name != BUILT_IN and not (given.is_file() or given.is_dir()):  # a look takes away from a pipe
            return None
        for path in built_in_files() if name == BUILT_IN else _paths(name):
            if not readers.is_plain(path):
                return None
            total += path.stat().st_size
    return total


def fingerprint(config: DataConfig) -> list[Any]:
    """What identifies the documents: names, sizes and times of files, names of Hugging Face datasets."""
    return [_found(name, config.text_field).fingerprint for name in config.sources]


def built_in_files() -> list[Path]:
    """The .py files of the running Python's standard library, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    found = _walk(root, skip=NOT_IN_BUILT_IN, wanted=lambda path: path.suffix == ".py")
    if not found:
        reject("data.source", f"'python', with no .py file in {root}", "a path or 'hf:NAME' on this Python")
    return found


def _not_empty(sources: list[Source], config: DataConfig) -> Iterator[str]:
    empty = True
    for source in sources:
        for text in source.read():
            if text and not text.isspace():
                empty = False
                yield _valid(text)
    if empty:
        reject("data.source", f"{config.source!r}, without text", "a source with at least one document")


def _valid(text: str) -> str:
    """`text` without lone surrogates, which JSON can spell and UTF-8 and tokenizers cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _found(name: str, text_field: str, longest: int | None = None) -> Source:
    if name == BUILT_IN:
        paths = built_in_files()
        return Source(read=lambda: _read_whole(paths), fingerprint=[sys.version, *map(_stat, paths)])
    if name.startswith(HUB_PREFIX):
        return _hub(name, text_field)
    paths = _paths(name)
    return Source(
        read=lambda: _read_all(paths, text_field, longest), fingerprint=[_stat(path) for path in paths]
    )


def _read_whole(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        yield path.read_bytes().decode("utf-8", errors="replace")


def _read_all(paths: list[Path], text_field: str, longest: int | None) -> Iterator[str]:
    for path in paths:
        yield from readers.read(path, text_field, longest)


def _paths(name: str) -> list[Path]:
    """The files to read for `name`, a file or a folder."""
    path = Path(name).expanduser()
    if path.is_dir():
        found, left_out = [], []
        for file in _walk(path, skip=frozenset(), wanted=lambda _: True):
            (found if readers.is_wanted(file) else left_out).append(file)
        if left_out:
            log_once(f"{name}: skipped {len(left_out)} files that are not text, such as {left_out[0]}")
        if any(readers.has_records(file) for file in found):
            beside = [file for file in found if not readers.is_named_data(file)]
            found = [file for file in found if readers.is_named_data(file)]
            if beside:
                log_once(f"{name}: skipped {len(beside)} files beside the records, such as {beside[0]}")
        if not found:
            reject("data.source", f"the folder {name}, without a file to read", readers.ACCEPTED)
        return found
    if not path.exists():
        reject("data.source", f"{name!r}, which does not exist", "'python', a file, a folder, or 'hf:NAME'")
    readers.require_readable(path)
    return [path]


def _walk(root: Path, *, skip: frozenset[str], wanted: Callable[[Path], bool]) -> list[Path]:
    """Wanted files below `root`, without hidden ones, in the same order on every system."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skip and not name.startswith(".")]
        paths = [Path(folder, name) for name in names if not name.startswith(".")]
        found += [path for path in paths if path.is_file() and wanted(path)]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def _stat(path: Path) -> list[str | int]:
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]


def _hub(name: str, text_field: str) -> Source:
    parts = name.removeprefix(HUB_PREFIX).split(":")
    if not parts[0] or len(parts) > 3:
        reject("data.source", repr(name), "'hf:NAME', 'hf:NAME:CONFIG' or 'hf:NAME:CONFIG:SPLIT'")
    dataset, config, split = (*parts, "", "")[:3]
    local = Path(dataset).expanduser()
    # A local folder can change under its name; datasets on the Hub are assumed to stay as they are.
    content = [_stat(path) for path in _walk(local, skip=frozenset(), wanted=Path.is_file)]
    if local.is_dir():
        dataset = str(local)
    return Source(
        read=lambda: _read_hub(name, dataset, config, split, text_field), fingerprint=[name, *content]
    )


def _read_hub(name: str, dataset: str, config: str, split: str, text_field: str) -> Iterator[str]:
    datasets = needed("datasets", f"reading {name!r}", extra="train")
    try:
        records = datasets.load_dataset(dataset, config or None, split=split or "train", streaming=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"data.source: cannot open {name!r}: {error}{_how_to_get(dataset)}") from error
    for number, record in enumerate(records, start=1):
        yield readers.text_of(record, text_field, f"{name}, record {number}")


def _how_to_get(dataset: str) -> str:
    """What to do about a dataset that is neither on disk nor within reach."""
    if Path(dataset).is_dir():
        return ""
    return (
        f"; get it where the Hub can be reached (`hf download {dataset} --repo-type dataset --local-dir "
        "FOLDER`), then set data.source=hf:FOLDER"
    )
