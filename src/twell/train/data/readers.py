"""Readers of one file's documents: text, JSON Lines, Parquet."""

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

from ..._errors import needed, reject

JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.xz")
PARQUET = (".parquet",)
SEPARATED = (".txt", ".txt.gz", ".txt.xz")
"""Text files whose documents NUL bytes may separate; in other files a NUL byte means: not text."""

ACCEPTED = f"text in UTF-8 (any name, also packed as .gz or .xz), {', '.join((*JSON_LINES, *PARQUET))}"

_HEAD_BYTES = 1 << 16
_NOT_TEXT = 0.3
"""Share of odd characters that no text has: random bytes have 0.6, Latin-1 read as UTF-8 less than 0.1."""

_ODD = frozenset("\ufffd\x7f") | {chr(c) for c in range(32)} - set("\t\n\v\f\r\b\x1b")

BLOCK_BYTES = 1 << 20
"""Bytes read at a time: a file of many documents is never in memory as a whole."""


def has_records(path: Path) -> bool:
    """Whether the name says JSON Lines or Parquet."""
    return path.name.lower().endswith((*JSON_LINES, *PARQUET))


def is_plain(path: Path) -> bool:
    """Whether the bytes of the file are its text's."""
    return not has_records(path) and not path.name.lower().endswith((".gz", ".xz"))


def is_named_data(path: Path) -> bool:
    """Whether the name says that this is data."""
    return path.name.lower().endswith((*SEPARATED, *JSON_LINES, *PARQUET))


def is_wanted(path: Path) -> bool:
    """Whether to read this file of a folder: its name says so, or it begins like text."""
    if is_named_data(path):
        return True
    try:
        return _is_text(path)
    except (ValueError, OSError):  # damaged or unreadable, and nobody asked for it by name
        return False


def require_readable(path: Path) -> None:
    """Refuse a file that is neither text nor records."""
    if not has_records(path) and not _is_text(path):
        reject("data.source", f"the file {path}, which is not text", ACCEPTED)


def read(path: Path, text_field: str, longest: int | None = None) -> Iterator[str]:
    """The documents of `path`, in order; they may be empty. longest: of `read_text`."""
    name = path.name.lower()
    if name.endswith(JSON_LINES):
        return read_json_lines(path, text_field)
    if name.endswith(PARQUET):
        return read_parquet(path, text_field)
    return read_text(path, longest)


def read_text(path: Path, longest: int | None = None) -> Iterator[str]:
    """One document, or several separated by NUL bytes.

    longest:  longer documents come in pieces of about this many bytes.
    """
    require_readable(path)
    with _opened(path) as file:
        parts: list[bytes] = []
        for block in _blocks(file):
            head, *rest = block.split(b"\0")
            parts.append(head)
            for start_of_next in rest:
                yield _decoded(b"".join(parts))
                parts = [start_of_next]
            if longest is not None and sum(map(len, parts)) >= longest:
                piece, rest_of_it = _cut(b"".join(parts))
                yield _decoded(piece)
                parts = [rest_of_it]
        yield _decoded(b"".join(parts))


def _cut(data: bytes) -> tuple[bytes, bytes]:
    """`data` after its last line end, else its last space, else its last whole character."""
    place = max(data.rfind(b"\n"), data.rfind(b" ") if b"\n" not in data else -1) + 1
    if place == 0:
        place = len(data)
        while place > 0 and data[place - 1] & 0xC0 == 0x80:  # inside a character of several bytes
            place -= 1
        place = max(place - 1, 1)
    return data[:place], data[place:]


def read_json_lines(path: Path, text_field: str) -> Iterator[str]:
    """One object per line; blank lines are skipped."""
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            text = _decoded(line).strip()
            if text:
                yield text_of(_object(text, f"{path}, line {number}"), text_field, f"{path}, line {number}")


def read_parquet(path: Path, text_field: str) -> Iterator[str]:
    """One document per row."""
    parquet = needed("pyarrow.parquet", f"reading {path.name}", extra="train")
    arrow = needed("pyarrow", f"reading {path.name}", extra="train")
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


def _is_text(path: Path) -> bool:
    """Whether a file begins like UTF-8 text."""
    with _opened(path) as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return False
    if path.name.lower().endswith(SEPARATED):
        head = head.replace(b"\0", b"")
    # An incremental decoder, since the last character may be cut.
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(head)
    return b"\0" not in head and sum(map(text.count, _ODD)) <= _NOT_TEXT * len(text)


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        entries = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: invalid JSON ({error})") from None
    if not isinstance(entries, dict):
        raise ValueError(f"{where}: a JSON {type(entries).__name__}, expected an object")
    return entries


def text_of(record: dict[str, Any], text_field: str, where: str) -> str:
    """The text of a record, empty for a null; `where` names the record in an error."""
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
