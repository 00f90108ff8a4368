"""Which checkpoints of a run are whole: a manifest, written last, holds the size and digest of every file."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path, PurePath
from typing import Any

from .._errors import is_local, reject
from .._files import digest_of_file, digest_of_json, write_json
from .presets import PRESETS

MANIFEST = "manifest.json"
MODEL = "model"
_CONFIG = "config.json"
_RUNS = "runs"  # where runs are without --out; never taken for an owner on the Hub
_ENTRY = {"bytes": int, "blake2b": str}  # what a manifest says of a file
_FOLDER = re.compile(r"^checkpoint-(\d+)$")
_log = logging.getLogger("twell")


def find_model(name: str, argument: str = "model") -> str:
    """The folder of a model: `name` itself, or in a run's folder its final model, else its newest whole
    checkpoint. A name on the Hub is returned as it is.

    argument:  what to call it in an error.
    """
    folder = Path(name).expanduser()
    if not folder.exists():
        in_runs = folder.parts[:1] == (_RUNS,)
        if is_local(name) or in_runs:
            accepted = "a folder with a model, a run's folder, or a name on the Hub"
            hint = f"; {_how_to_make(folder)}" if in_runs else ""
            reject(argument, f"{name!r}, which does not exist", f"{accepted}{hint}")
        return name
    if (folder / MODEL / _CONFIG).is_file():
        return str(folder / MODEL)
    found = folder if (folder / _CONFIG).is_file() else newest_whole(folder)
    if found is None or not (found / _CONFIG).is_file():
        reject(argument, repr(name), f"a folder with a {_CONFIG}, or a run's folder with a checkpoint")
    return str(found)


def _how_to_make(run: Path) -> str:
    """The command that makes a run in the folder `run`, or in one like it."""
    name = run.parts[1] if len(run.parts) > 1 and run.parts[1] in PRESETS else "NAME"
    return f"`twell train --preset {name}` makes {_RUNS}/{name}"


def write_manifest(folder: Path) -> None:
    """Declare `folder` complete, once everything in it is on the disk."""
    files = {}
    for path in _files(folder):
        files[path.relative_to(folder).as_posix()] = {
            "bytes": path.stat().st_size,
            "blake2b": digest_of_file(path, flush=True),
        }
    write_json(folder / MANIFEST, {"files": files, "blake2b": digest_of_json(files)})


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
        except (ValueError, OSError) as error:  # an impossible name, a failing disk
            problem = f"cannot be read: {error}"
        if problem is not None:
            return f"{name} {problem}"
    return None


def _manifest(content: Any) -> dict[str, dict[str, Any]]:
    """The files that a manifest lists; a ValueError if it is damaged."""
    if not isinstance(content, dict) or not content.keys() <= {"files", "blake2b"}:
        raise ValueError("not a manifest")
    files = content.get("files")
    if not isinstance(files, dict) or not files:
        raise ValueError("it lists no files")
    for name, known in files.items():
        if not isinstance(known, dict) or {k: type(v) for k, v in known.items()} != _ENTRY:
            raise ValueError(f"its entry for {name!r} is damaged")
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise ValueError(f"{name!r} is outside of the checkpoint")
    # Manifests of earlier versions have no digest of their own.
    if "blake2b" in content and content["blake2b"] != digest_of_json(files):
        raise ValueError("its own digest does not match")
    return files


def _file_fault(path: Path, *, bytes: int, blake2b: str) -> str | None:
    if not path.is_file():
        return "is missing"
    if path.stat().st_size != bytes:
        return f"has {path.stat().st_size} bytes instead of {bytes}"
    return None if digest_of_file(path) == blake2b else "is damaged"


def newest_whole(run: Path) -> Path | None:
    """The newest whole checkpoint of a run; logs what is wrong with newer ones."""
    for folder in sorted(checkpoints(run), key=step_of, reverse=True):
        problem = fault(folder)
        if problem is None:
            return folder
        _log.warning("checkpoint %s is skipped: %s", folder, problem)
    return None


def newest_finished(run: Path) -> Path | None:
    """The newest checkpoint that was completely saved; its files are not checked."""
    finished = [folder for folder in checkpoints(run) if (folder / MANIFEST).is_file()]
    return max(finished, key=step_of, default=None)


def drop_old(run: Path, keep: int) -> None:
    """Keep only the newest `keep` finished checkpoints. Call it when one has just been finished."""
    finished = [folder for folder in checkpoints(run) if (folder / MANIFEST).exists()]
    for folder in sorted(finished, key=step_of)[:-keep]:
        shutil.rmtree(folder)


def set_aside_after(run: Path, step: int) -> None:
    """Rename the checkpoints after `step`, where the run resumes: they are damaged, but may be of use."""
    for folder in checkpoints(run):
        if step_of(folder) > step:
            target = run / f"damaged-{folder.name}"
            shutil.rmtree(target, ignore_errors=True)
            folder.rename(target)


def checkpoints(run: Path) -> list[Path]:
    """Checkpoint folders, whole or not."""
    return [path for path in run.glob("checkpoint-*") if path.is_dir() and _FOLDER.search(path.name)]


def step_of(folder: Path) -> int:
    return int(_FOLDER.search(folder.name)[1])


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
