"""Small files that outlive a process: where they are kept, and how they are written."""

from __future__ import annotations

import os
import tempfile
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
    """Write `text` to `path` so that readers, and a full disk, find the old file or the new one whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    written = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        written.chmod(0o666 & ~_umask())  # mkstemp's files are for their owner only
        written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
