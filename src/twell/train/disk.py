"""Files on a disk that may fill up or lose power: small ones are whole or absent, large ones are checked."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .._files import write_atomically
from .._log import log_once

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# Writers in C++ and Rust raise errors of their own. Seen on a full tmpfs: torch.save says "basic_ios::clear:
# iostream error" or "inline_container.cc: unexpected pos", safetensors "I/O error: ... (os error 28)".
_FULL = re.compile(
    r"no space left|disk quota exceeded|storagefull|iostream error|inline_container.*unexpected pos"
    rf"|(?:os error|errno) (?:{'|'.join(map(str, NO_SPACE))})\b",
    re.IGNORECASE | re.DOTALL,
)
_BLOCK_BYTES = 1 << 22


@contextmanager
def saving(path: Path, what: str, then: Callable[[], str]) -> Iterator[None]:
    """Around whatever writes `path`: if there is no room for it, it is removed and an OSError says so.

    path:  a folder, or a file.
    what:  is saved, for the reader.
    then:  what is left or to be done; asked once the path is gone.
    """
    try:
        yield
    except Exception as error:
        if not is_full(error):
            raise
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        raise OSError(errno.ENOSPC, f"no space left to save {what}; {then()}") from error


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, says that the disk is full."""
    while error is not None:
        if getattr(error, "errno", None) in NO_SPACE or _FULL.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around whatever writes to `path`: if there is no room, say for what."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise OSError(errno.ENOSPC, f"no space left to write {path}") from error


def write_whole(path: Path, text: str) -> None:
    """`write_atomically`, on the disk when it returns; if there is no room, say for what."""
    with writing(path):
        write_atomically(path, text)
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=1) + "\n")


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file that a run has written; None without it, or where it is damaged (logged)."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        log_once(f"{path} cannot be read and does not count: {error}")
        return None
    if not isinstance(found, dict):
        log_once(f"{path} cannot be read and does not count: a JSON {type(found).__name__}, no object")
        return None
    return found


def digest_of(path: Path, *, flush: bool = False) -> str:
    """BLAKE2b of a file; with `flush` its content is on the disk afterwards."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while part := file.read(_BLOCK_BYTES):
            digest.update(part)
        if flush:
            os.fsync(file.fileno())
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Have a file or folder on the disk before going on."""
    if os.name == "nt":  # folders cannot be opened there, nor files synced that are open for reading
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
