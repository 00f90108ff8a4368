"""Documents out of one file: text, JSON Lines or Parquet."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import json
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ..._checks import reject
from .optional import needed

TEXT = (".txt", ".txt.gz", ".txt.xz")
JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.xz")
PARQUET = (".parquet",)
SUFFIXES = (*TEXT, *JSON_LINES, *PARQUET)

BLOCK_BYTES = 1 << 20
"""Read at a time, so that a file of many documents is never in memory as a whole."""


def is_readable(path: Path) -> bool:
    """Whether the name ends in one of `SUFFIXES`."""
    return path.name.lower().endswith(SUFFIXES)


def read(path: Path, text_field: str) -> Iterator[str]:
    """The documents of `path`, in its order; they may be empty."""
    name = path.name.lower()
    if name.endswith(TEXT):
        return read_text(path)
    if name.endswith(JSON_LINES):
        return read_json_lines(path, text_field)
    if not name.endswith(PARQUET):
        reject("data.source", f"the file {path}", f"files ending in {', '.join(SUFFIXES)}")
    return read_parquet(path, text_field)


def read_text(path: Path) -> Iterator[str]:
    """NUL bytes separate documents; a file without them is one."""
    with _opened(path) as file:
        parts: list[bytes] = []
        for block in _blocks(file):
            head, *rest = block.split(b"\0")
            parts.append(head)
            for start_of_next in rest:
                yield _decoded(b"".join(parts))
                parts = [start_of_next]
        yield _decoded(b"".join(parts))


def read_json_lines(path: Path, text_field: str) -> Iterator[str]:
    """One object per line; blank lines are skipped."""
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            text = _decoded(line).strip()
            if text:
                yield text_of(_object(text, f"{path}, line {number}"), text_field, f"{path}, line {number}")


def read_parquet(path: Path, text_field: str) -> Iterator[str]:
    """One document per row."""
    parquet = needed("pyarrow.parquet", f"reading {path.name}")
    arrow = needed("pyarrow", f"reading {path.name}")
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if text_field not in names:
                raise ValueError(f"{path}: no column {text_field!r} (data.text_field); it has {names}")
            row = 0
            for batch in file.iter_batches(batch_size=1024, columns=[text_field]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield text_of({text_field: value}, text_field, f"{path}, row {row}")
    except (arrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: not a Parquet file, or damaged ({error})") from error


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        entries = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: invalid JSON ({error})") from None
    if not isinstance(entries, dict):
        raise ValueError(f"{where}: a JSON {type(entries).__name__}, expected an object")
    return entries


def text_of(record: dict[str, Any], text_field: str, where: str) -> str:
    """The text of one record, empty for a null; `where` names the record in an error."""
    if text_field not in record:
        raise ValueError(f"{where}: no field {text_field!r} (data.text_field); it has {sorted(record)}")
    value = record[text_field]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{where}: field {text_field!r} is a {type(value).__name__}, expected a string")
    return value


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix.lower(), open)
    with opener(path, "rb") as file:
        try:
            yield file
        except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}: cut off or damaged ({error})") from error


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block


def _decoded(data: bytes) -> str:
    return data.removeprefix(codecs.BOM_UTF8).decode("utf-8", errors="replace")
