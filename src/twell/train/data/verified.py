"""Checksums of large files: computed once per file, and again when its size or time has changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..._checks import reject
from ..._log import log_once
from ..disk import digest_of, read_object, write_json

_NOTES = ".verified.json"  # beside the files: name -> what it was when its contents were checked


def check_contents(folder: Path, digests: Mapping[str, str], *, always: bool = False) -> None:
    """Raise a ValueError unless the files of `folder` have these BLAKE2b digests.

    digests:  name of a file -> digest.
    always:   read every file, also those that were checked before and have kept their size and time.
    """
    notes = read_object(folder / _NOTES) or {}
    now = {name: _stamp(folder / name, digest) for name, digest in digests.items()}
    for name, digest in digests.items():
        if not always and notes.get(name) == now[name]:
            continue
        if digest_of(folder / name) != digest:
            reject(
                "data",
                f"{folder / name}, whose contents have changed since it was written",
                f"tokens as they were written: remove {folder} to have the text tokenised again, or bring an "
                "undamaged copy of it",
            )
    if notes != now:
        try:
            write_json(folder / _NOTES, now)
        except OSError as error:
            log_once(f"{folder / _NOTES} cannot be written ({error}): token files are read whole every time")


def _stamp(path: Path, digest: str) -> dict[str, Any]:
    status = path.stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "blake2b": digest}
