"""Files that outlive a process: where they are kept, and how they survive crashes and full disks."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

from filelock import FileLock, Timeout

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

from ._log import log_once

CACHE_VARIABLE = "TWELL_CACHE"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# Writers in C++ and Rust raise errors of their own. Seen on a full tmpfs: torch.save says "basic_ios::clear:
# iostream error" or "inline_container.cc: unexpected pos", safetensors "I/O error: ... (os error 28)".
_FULL = re.compile(
    r"no space left|disk quota exceeded|storagefull|iostream error|inline_container.*unexpected pos"
    rf"|(?:os error|errno) (?:{'|'.join(map(str, NO_SPACE))})\b",
    re.IGNORECASE | re.DOTALL,
)
_BLOCK_BYTES = 1 << 22
_ALREADY_THERE = (errno.EEXIST, errno.ENOTEMPTY)

Opened = TypeVar("Opened")
_log = logging.getLogger("twell")


# Folders


def user_cache() -> Path:
    """twell/ in the user's cache folder; it may not exist yet. RuntimeError without a home directory."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "twell"


def cache_folder() -> Path | None:
    """Where measurements of this machine are kept: $TWELL_CACHE, else the user's cache folder.

    It may not exist yet; None without a home directory.
    """
    root = os.environ.get(CACHE_VARIABLE)
    try:
        return Path(root) if root else user_cache()
    except RuntimeError:
        return None


def make_folder(path: Path, argument: str) -> None:
    """Create a folder with its parents; `argument` names it if a file is in the way."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        from ._errors import reject  # here: it brings torch, which `import twell` need not wait for

        file = next(place for place in (path, *path.parents) if place.exists())
        reject(argument, repr(str(path)), f"a folder, or a path where one can be made; {file} is a file")


# Small files


def write_atomically(path: Path, text: str) -> None:
    """Write a small file in one piece: readers find the old content or the new, even after a power cut."""
    temporary = _part_of(path)
    with needs_space(str(path)):
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if path.exists():
                with suppress(OSError):  # some network file systems have no modes
                    shutil.copymode(path, temporary)
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
    sync(path.parent)


def _part_of(path: Path) -> Path:
    """What becomes `path` once it is complete."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")


def require_writable(path: Path, argument: str) -> None:
    """Refuse a path where `write_atomically` would fail, before the work whose results go there.

    A few bytes are written beside it, and removed; its folder is made.
    """
    from ._errors import reject  # here: it brings torch, which `import twell` need not wait for

    try:
        if path.exists() and not path.is_file():
            what = "a folder" if path.is_dir() else "no plain file"
            reject(argument, f"{str(path)!r}, {what}", "a file to write")
        make_folder(path.parent, argument)
        part = _part_of(path)
        try:
            with part.open("wb") as file:
                file.write(b"\n")
                file.flush()
                os.fsync(file.fileno())
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        reject(argument, f"{str(path)!r}: {error.strerror or error}", "a file that can be written")


def write_json(path: Path, value: Any) -> None:
    """`write_atomically`, as indented JSON."""
    write_atomically(path, json.dumps(value, indent=1) + "\n")


def read_json_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is no file, or a damaged one (logged)."""
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError(f"a JSON {type(found).__name__}, not an object")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        log_once(f"{path} is ignored, it cannot be read: {error}")
        return None
    return found


def sync(path: Path) -> None:
    """Return once a file or folder is on the disk."""
    if os.name == "nt":  # Windows opens no folders, and syncs no files that are open for reading
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that syncs no folders
            raise
    finally:
        os.close(descriptor)


# Digests


def new_digest() -> hashlib.blake2b:
    """The library's one kind of digest, for data that arrives in parts."""
    return hashlib.blake2b(digest_size=16)


def digest_of(data: bytes) -> str:
    digest = new_digest()
    digest.update(data)
    return digest.hexdigest()


def digest_of_json(value: Any) -> str:
    """Equal JSON values give equal digests, whatever the order of their keys."""
    return digest_of(json.dumps(value, sort_keys=True).encode())


def digest_of_file(path: Path, *, flush: bool = False) -> str:
    """`flush`: also have the content on the disk afterwards."""
    digest = new_digest()
    with path.open("rb") as file:
        while part := file.read(_BLOCK_BYTES):
            digest.update(part)
        if flush:
            os.fsync(file.fileno())
    return digest.hexdigest()


# Full disks


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, says that the disk is full."""
    while error is not None:
        if getattr(error, "errno", None) in NO_SPACE or _FULL.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def needs_space(
    what: str, *, discard: Path | None = None, advice: str | Callable[[], str] = ""
) -> Iterator[None]:
    """Turn any error of a full disk into an OSError that says there was no space for `what`.

    discard:  the incomplete file or folder, removed first.
    advice:   what the reader can do, or still has; a function is called after `discard` is gone.
    """
    try:
        yield
    except Exception as error:
        if not is_full(error):
            raise
        if discard is not None:
            remove(discard)
        hint = advice() if callable(advice) else advice
        message = "; ".join(filter(None, (f"no space left to write {what}", hint)))
        raise OSError(errno.ENOSPC, message) from error


def remove(path: Path) -> None:
    """Remove a file or folder, as far as possible."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


# Locks

State = Literal["held", "busy", "unavailable"]
_POLL_SECONDS = 0.05
_held: set[int] = set()  # descriptors of lock files that this process has locked


def _leave_locks_to_parent() -> None:
    """In a forked process: a data loader that outlives a killed run must not hold its lock."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_locks_to_parent)


@contextmanager
def locked(path: Path, *, wait: float | None = None) -> Iterator[State]:
    """Hold the lock file `path`, and yield how that went; the file stays behind.

    wait:  seconds to wait for another process before "busy"; None waits as long as it takes.
    "unavailable" means that the file cannot be written, or that its file system has no locks. If a process is
    killed, the system frees its locks.
    """
    with (_flocked if fcntl else _locked_without_flock)(path, wait) as state:
        yield state


@contextmanager
def _flocked(path: Path, wait: float | None) -> Iterator[State]:
    # Not filelock: without flock it takes a file that somebody left behind for a lock, and waits for ever.
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        yield "unavailable"
        return
    state = _flock(descriptor, wait, path)
    if state != "held":
        os.close(descriptor)
        yield state
        return
    _held.add(descriptor)
    try:
        yield state
    finally:
        if descriptor in _held:  # a forked process has none
            _held.remove(descriptor)
            os.close(descriptor)


def _flock(descriptor: int, wait: float | None, path: Path) -> State:
    deadline = None if wait is None else time.monotonic() + wait
    said = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return "held"
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                return "unavailable"
        if deadline is not None and time.monotonic() >= deadline:
            return "busy"
        if not said:
            _log.info("twell: waiting for the process that holds %s", path)
            said = True
        time.sleep(_POLL_SECONDS)


@contextmanager
def _locked_without_flock(path: Path, wait: float | None) -> Iterator[State]:
    """Windows."""
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=-1 if wait is None else wait)
    except Timeout:
        yield "busy"
        return
    except (OSError, NotImplementedError):
        yield "unavailable"
        return
    try:
        yield "held"
    finally:
        lock.release()
        with suppress(OSError):
            path.touch()  # releasing it there removes the file


# Folders that are complete or absent


class DamagedError(ValueError):
    """A cached folder is not what its builder wrote; the message names the file."""


def open_or_build(
    folder: Path, opened: Callable[[Path], Opened], build: Callable[[Path], None], *, advice: str = ""
) -> Opened:
    """Open `folder`; build it first if it is missing or damaged. One process builds, others wait for it.

    opened:  opens a folder, or raises `DamagedError`.
    build:   fills an empty folder, which takes the place of `folder` once it is complete.
    advice:  what to do if the disk is full.
    """
    found = _open_existing(folder, opened)
    if found is not None:
        return found
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f"{folder.name}.lock")) as state:
        found = _open_existing(folder, opened)
        if found is not None:
            return found
        if state == "held":  # without a lock, other processes may be at work too
            remove_leftovers(folder)
        temporary = _temporary_beside(folder)
        temporary.mkdir()
        try:
            with needs_space(str(folder), advice=advice):
                build(temporary)
                # A power cut after the rename must not leave a complete folder of incomplete files.
                for path in (*temporary.rglob("*"), temporary):
                    sync(path)
                _put_in_place(temporary, folder, opened)
        finally:
            remove(temporary)
    return opened(folder)


def replace_folder(new: Path, folder: Path) -> None:
    """Move `new` to `folder`, whose old content is removed afterwards."""
    old = _temporary_beside(folder)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    remove(old)
    sync(folder.parent)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes of this machine have left beside `folder`. Call it with the lock held."""
    for path in folder.parent.iterdir():
        if path.name.startswith(_mark(folder)):
            remove(path)


def _open_existing(folder: Path, opened: Callable[[Path], Opened]) -> Opened | None:
    if not folder.exists():
        return None
    try:
        return opened(folder)
    except DamagedError as error:
        log_once(f"{error}; building it again")
        return None


def _put_in_place(temporary: Path, folder: Path, opened: Callable[[Path], Any]) -> None:
    try:
        temporary.rename(folder)
        sync(folder.parent)
    except OSError as error:
        if error.errno not in _ALREADY_THERE:
            raise
        if _open_existing(folder, opened) is None:  # else another process was faster
            replace_folder(temporary, folder)


def _mark(folder: Path) -> str:
    """How temporary folders begin. With the machine's name: the lock may not hold on another one."""
    return f".{folder.name}.{socket.gethostname()}."


def _temporary_beside(folder: Path) -> Path:
    return folder.with_name(_mark(folder) + uuid.uuid4().hex[:12])
