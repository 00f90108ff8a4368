"""Which checkpoints of a run are whole: a manifest, written last, holds the size and hash of every file."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from pathlib import Path, PurePath
from typing import Any

from .._checks import is_local, reject
from .disk import digest_of, write_json

MANIFEST = "manifest.json"
MODEL = "model"
_CONFIG = "config.json"
_ENTRY = {"bytes": int, "blake2b": str}  # of a file in the manifest
_FOLDER = re.compile(r"^checkpoint-(\d+)$")
_log = logging.getLogger("twell")


def find_model(name: str, argument: str = "model") -> str:
    """The folder of a model: its own, or in that of a run its last (while there is none, its newest whole
    checkpoint). What is no folder and looks like a name on the Hub is left as it is.

    argument:  how to call it where it is refused.
    """
    folder = Path(name).expanduser()
    if not folder.exists():
        if is_local(name):
            reject(argument, repr(name), "a folder with a model, a run's folder, or a name on the Hub")
        return name
    if (folder / MODEL / _CONFIG).is_file():
        return str(folder / MODEL)
    found = folder if (folder / _CONFIG).is_file() else newest_whole(folder)
    if found is None or not (found / _CONFIG).is_file():
        reject(argument, repr(name), f"a folder with a {_CONFIG}, or that of a run with a checkpoint")
    return str(found)


def write_manifest(folder: Path) -> None:
    """Declare `folder` complete. Everything in it is on the disk before the manifest is."""
    files = {}
    for path in _files(folder):
        files[path.relative_to(folder).as_posix()] = {
            "bytes": path.stat().st_size,
            "blake2b": digest_of(path, flush=True),
        }
    write_json(folder / MANIFEST, {"files": files, "blake2b": _digest(files)})


def fault(folder: Path) -> str | None:
    """What is wrong with a checkpoint; None if it is whole."""
    try:
        files = _manifest(json.loads((folder / MANIFEST).read_bytes()))
    except FileNotFoundError:
        return f"it has no {MANIFEST}: it was not finished"
    except (ValueError, OSError, RecursionError) as error:
        return f"its {MANIFEST} cannot be read: {error}"
    for name, known in files.items():
        try:
            problem = _file_fault(folder / name, **known)
        except (ValueError, OSError) as error:  # a name that no file can have, a disk that does not read
            problem = f"cannot be read: {error}"
        if problem is not None:
            return f"{name} {problem}"
    return None


def _manifest(content: Any) -> dict[str, dict[str, Any]]:
    """The files that a manifest lists; a ValueError if it is not as it was written."""
    if not isinstance(content, dict) or not content.keys() <= {"files", "blake2b"}:
        raise ValueError("not a manifest")
    files = content.get("files")
    if not isinstance(files, dict) or not files:
        raise ValueError("it lists no files")
    for name, known in files.items():
        if not isinstance(known, dict) or {k: type(v) for k, v in known.items()} != _ENTRY:
            raise ValueError(f"what it says of {name!r} is damaged")
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise ValueError(f"{name!r} is outside of the checkpoint")
    # Manifests of earlier versions have no digest of their own.
    if "blake2b" in content and content["blake2b"] != _digest(files):
        raise ValueError("its own digest is another")
    return files


def _file_fault(path: Path, *, bytes: int, blake2b: str) -> str | None:
    if not path.is_file():
        return "is missing"
    if path.stat().st_size != bytes:
        return f"has {path.stat().st_size} bytes instead of {bytes}"
    return None if digest_of(path) == blake2b else "is damaged"


def _digest(files: dict[str, dict[str, Any]]) -> str:
    """Of the entries of a manifest: names, sizes and digests in it could be damaged, too."""
    return hashlib.blake2b(json.dumps(files, sort_keys=True).encode(), digest_size=16).hexdigest()


def newest_whole(run: Path) -> Path | None:
    """The newest checkpoint of a run that is whole; says which newer ones are not."""
    for folder in sorted(checkpoints(run), key=step_of, reverse=True):
        problem = fault(folder)
        if problem is None:
            return folder
        _log.warning("checkpoint %s is left out: %s", folder, problem)
    return None


def newest_finished(run: Path) -> Path | None:
    """The newest checkpoint that was saved to its end; nobody has looked whether it still is whole."""
    finished = [folder for folder in checkpoints(run) if (folder / MANIFEST).is_file()]
    return max(finished, key=step_of, default=None)


def drop_old(run: Path, keep: int) -> None:
    """Keep the newest `keep` finished checkpoints: called when a newer one has just been finished."""
    finished = [folder for folder in checkpoints(run) if (folder / MANIFEST).exists()]
    for folder in sorted(finished, key=step_of)[:-keep]:
        shutil.rmtree(folder)


def set_aside_after(run: Path, step: int) -> None:
    """Checkpoints of later steps than the one to go on from are not whole: put aside, not deleted."""
    for folder in checkpoints(run):
        if step_of(folder) > step:
            target = run / f"damaged-{folder.name}"
            shutil.rmtree(target, ignore_errors=True)
            folder.rename(target)


def checkpoints(run: Path) -> list[Path]:
    """Folders of checkpoints, whole or not."""
    return [path for path in run.glob("checkpoint-*") if path.is_dir() and _FOLDER.search(path.name)]


def step_of(folder: Path) -> int:
    return int(_FOLDER.search(folder.name)[1])


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
