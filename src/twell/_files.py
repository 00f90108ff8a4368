"""Small files that outlive a process: where they are kept, and how they are written."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path

CACHE_VARIABLE = "TWELL_CACHE"


def cache_folder() -> Path | None:
    """Where measurements of this machine are kept: $TWELL_CACHE, else twell/ in the user's cache folder.

    None where there is no place for it. The folder may not exist yet.
    """
    root = os.environ.get(CACHE_VARIABLE)
    if root:
        return Path(root)
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # no home directory
        return None
    return Path(home) / "twell"


def write_atomically(path: Path, text: str) -> None:
    """Write a small file in one piece: readers find the old content or the new, also after a crash."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
