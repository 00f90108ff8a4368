"""The folder of a run: one run at a time, never two runs mixed, the same data when it goes on."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from .._checks import reject
from .._log import log_once
from .config import RunConfig
from .data import Prepared
from .disk import read_object, write_json, write_whole
from .settings import read_settings, run_config, to_yaml

try:
    import fcntl
except ImportError:  # Windows: nothing keeps a second run out
    fcntl = None

CONFIG, METRICS, SUMMARY, DATA = "config.yaml", "metrics.jsonl", "summary.json", "data.json"
CHOICES = "choices.json"
_LOCK = ".twell-lock"  # its presence says that a run was here

# Settings that do not change what is computed, and may therefore differ when a run is resumed.
HARMLESS = {
    "train": {"eval_every", "save_every", "log_every", "keep", "workers", "report", "micro_batch"},
    "data": {"cache"},
}

_held: list[IO[str]] = []  # locks of this process


def _leave_locks_to_parent() -> None:
    """In a forked process: a data loader that outlives a killed run would go on holding its folder."""
    while _held:
        _held.pop().close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_locks_to_parent)


@contextmanager
def claimed(config: RunConfig, folder: Path, *, resume: bool, first: bool) -> Iterator[None]:
    """Hold `folder` for a run; a new one writes its config.

    first:  whether this is the first process of the job, which does the work.
    """
    if resume and not (folder / CONFIG).is_file():
        reject("resume", str(folder), f"the folder of a run, with its {CONFIG}")
    if not first:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    if not resume and _names(folder) and not (folder / _LOCK).exists():
        reject("out", str(folder), "a new folder, or an empty one")  # before anything is written there
    with _locked(folder, "resume" if resume else "out"):
        if resume:
            _check_settings(config, folder)
        else:
            _start(config, folder)
        yield


@contextmanager
def _locked(folder: Path, argument: str) -> Iterator[None]:
    """Keep other runs out, until this process ends or leaves the context."""
    with (folder / _LOCK).open("a") as lock:
        _take(lock, folder, argument)
        _held.append(lock)
        try:
            yield
        finally:
            if lock in _held:  # a forked process has left it already
                _held.remove(lock)
                if fcntl is not None:
                    fcntl.flock(lock, fcntl.LOCK_UN)  # whoever else may have the file open


def _take(lock: IO[str], folder: Path, argument: str) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        reject(argument, str(folder), "a folder that no other run is using right now")
    except OSError as error:  # a network file system without locks
        log_once(f"{folder} cannot be locked ({error}): nothing keeps a second run out")


def _start(config: RunConfig, folder: Path) -> None:
    # What a run leaves that failed before its first step may be written over.
    if _names(folder) - {CONFIG, DATA, CHOICES}:
        reject("out", str(folder), "a new folder, or an empty one; to go on with that run: --resume")
    write_whole(folder / CONFIG, to_yaml(config))
    for name in (DATA, CHOICES):
        (folder / name).unlink(missing_ok=True)


def _names(folder: Path) -> set[str]:
    """What is in a folder and not hidden."""
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def _check_settings(config: RunConfig, folder: Path) -> None:
    different = differences(run_config(read_settings(folder / CONFIG)), config)
    if different:
        reject("settings", ", ".join(different), f"those of the run, in {folder / CONFIG}")


def differences(one: RunConfig, other: RunConfig) -> list[str]:
    """Settings that change what is computed and are not the same, as section.key=old->new."""
    found = []
    for section in ("model", "data", "recipe", "train"):
        before, after = one.as_dict()[section], other.as_dict()[section]
        for key in before:
            if key not in HARMLESS.get(section, ()) and before[key] != after[key]:
                found.append(f"{section}.{key}={before[key]}->{after[key]}")
    return found


def check_data(folder: Path, data: Prepared, source: Any, *, resume: bool, first: bool) -> None:
    """A run that goes on must find the tokens and the tokenizer that it began with.

    source:  what the settings call it, for the reader.
    """
    path = folder / DATA
    now = {
        "source": source,
        "train_tokens": data.train_tokens,
        "held_out_tokens": data.held_out_tokens,
        "train_documents": data.train_documents,
        "held_out_documents": data.held_out_documents,
        "identity": _identity(data.folder),
    }
    stored = read_object(path) if resume else None
    if stored is not None and "identity" in stored:
        if stored["identity"] != now["identity"]:
            reject(
                "data.source",
                "other text or another tokenizer than the run began with",
                "the same: files, their contents and the tokenizer must not change",
            )
    elif first:
        write_json(path, now)


def _identity(tokens: Path) -> str:
    """Of the tokens, whose hashes the index holds, and of the tokenizer."""
    digest = hashlib.blake2b(digest_size=16)
    for path in (tokens / "index.json", tokens / "tokenizer" / "tokenizer.json"):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Paths that mean the same wherever the run is resumed from."""

    def absolute(name: Any) -> Any:
        if not isinstance(name, str):
            return name
        prefix = "prepared:" if name.startswith("prepared:") else ""
        path = Path(name.removeprefix(prefix)).expanduser()
        return f"{prefix}{path.resolve()}" if path.exists() else name

    data, model = config.data, config.model
    source = data.source
    source = tuple(map(absolute, source)) if isinstance(source, tuple) else absolute(source)
    return dataclasses.replace(
        config,
        data=dataclasses.replace(data, source=source, tokenizer=absolute(data.tokenizer)),
        model=dataclasses.replace(model, init_from=absolute(model.init_from)),
    )
