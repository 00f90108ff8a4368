"""Which checkpoints of a run are whole: a manifest, written last, holds the size and hash of every file."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from pathlib import Path

from .._checks import is_local, reject

MANIFEST = "manifest.json"
MODEL = "model"
_CONFIG = "config.json"
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
        files[str(path.relative_to(folder))] = {
            "bytes": path.stat().st_size,
            "blake2b": _hash(path, sync=True),
        }
    temporary = folder / f".{MANIFEST}.part"
    with temporary.open("w") as out:
        json.dump({"files": files}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(folder / MANIFEST)


def fault(folder: Path) -> str | None:
    """What is wrong with a checkpoint; None if it is whole."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        return f"it has no {MANIFEST}: it was not finished"
    except (ValueError, KeyError, OSError) as error:
        return f"its {MANIFEST} cannot be read: {error}"
    for name, known in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != known["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {known['bytes']}"
        if _hash(path) != known["blake2b"]:
            return f"{name} is damaged"
    return None


def newest_whole(run: Path) -> Path | None:
    """The newest checkpoint of a run that is whole; says which newer ones are not."""
    for folder in sorted(checkpoints(run), key=step_of, reverse=True):
        problem = fault(folder)
        if problem is None:
            return folder
        _log.warning("checkpoint %s is left out: %s", folder, problem)
    return None


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


def _hash(path: Path, sync: bool = False) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while part := file.read(1 << 22):
            digest.update(part)
        if sync:
            os.fsync(file.fileno())
    return digest.hexdigest()
