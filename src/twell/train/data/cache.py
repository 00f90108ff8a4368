"""Folders that are built once: complete or absent, whoever is interrupted, however many build together."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from ..._log import log_once
from ..disk import is_full, sync

try:
    import fcntl
except ImportError:  # Windows: processes may do the same work twice, the first to finish wins
    fcntl = None

Opened = TypeVar("Opened")

_log = logging.getLogger("twell")
_ALREADY_THERE = (errno.EEXIST, errno.ENOTEMPTY)


class DamagedError(ValueError):
    """A folder of the cache is not what its builder wrote; the message names the file."""


def key(*parts: Any) -> str:
    """A folder name that stands for `parts` (JSON values): other parts, another name."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def open_or_build(folder: Path, opened: Callable[[Path], Opened], build: Callable[[Path], None]) -> Opened:
    """What `opened` makes of `folder`, which `build` fills first where it is missing or damaged.

    opened:  raises `DamagedError` for a folder that cannot be used.
    build:   fills the empty folder it is given, which takes the place of `folder` only when it is done. One
             process builds, others wait for it.
    """
    found = _open_existing(folder, opened)
    if found is not None:
        return found
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_name(f"{folder.name}.lock")) as alone:
        found = _open_existing(folder, opened)
        if found is not None:
            return found
        if alone:
            _remove_leftovers(folder)
        temporary = _temporary_beside(folder)
        temporary.mkdir()
        try:
            build(temporary)
            _flush_to_disk(temporary)
            _put_in_place(temporary, folder, opened)
        except Exception as error:
            if not is_full(error):
                raise
            message = (
                f"no space left in {folder.parent}: free some, or set data.cache to a folder on another disk"
            )
            raise OSError(errno.ENOSPC, message) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return opened(folder)


def _open_existing(folder: Path, opened: Callable[[Path], Opened]) -> Opened | None:
    if not folder.exists():
        return None
    try:
        return opened(folder)
    except DamagedError as error:
        log_once(f"{error}; building it again")
        return None


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Wait for the lock; False where there are none, and other processes may be at work too.

    The system frees the lock with its process, so a killed one blocks nobody. The file stays: removing it
    would let two processes lock two files of one name.
    """
    with path.open("a") as file:
        yield _acquire(file)


def _acquire(file: IO[str]) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _log.info("twell: waiting for the process that holds %s", file.name)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:  # a network file system without locks
        return False
    return True


def _mark(folder: Path) -> str:
    """How the temporary folders of this machine begin; on another one, the lock may not hold."""
    return f".{folder.name}.{socket.gethostname()}."


def _temporary_beside(folder: Path) -> Path:
    return folder.with_name(_mark(folder) + uuid.uuid4().hex[:12])


def _remove_leftovers(folder: Path) -> None:
    """With the lock held, a temporary folder of this machine belongs to a process that was killed."""
    for path in folder.parent.iterdir():
        if path.name.startswith(_mark(folder)):
            shutil.rmtree(path, ignore_errors=True)


def _put_in_place(temporary: Path, folder: Path, opened: Callable[[Path], Any]) -> None:
    try:
        temporary.rename(folder)
    except OSError as error:
        if error.errno not in _ALREADY_THERE:
            raise
        if _open_existing(folder, opened) is not None:
            return  # another process was faster
        aside = _temporary_beside(folder)
        folder.rename(aside)
        temporary.rename(folder)
        shutil.rmtree(aside, ignore_errors=True)
    sync(folder.parent)


def _flush_to_disk(folder: Path) -> None:
    """A power cut after the rename must not leave a complete folder of incomplete files."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)
