"""The folder of a run: used by one run at a time, never by two different ones, resumed with the same data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .._errors import reject
from .._files import digest_of, locked, make_folder, read_json_object, write_atomically, write_json
from .._log import log_once
from .config import RunConfig
from .data import Prepared
from .settings import read_settings, run_config, to_yaml

CONFIG, METRICS, SUMMARY, DATA = "config.yaml", "metrics.jsonl", "summary.json", "data.json"
CHOICES, ENVIRONMENT = "choices.json", "environment.json"
_LOCK = ".twell-lock"  # it stays, and shows that the folder belongs to a run

# Settings that do not change the result, so a resumed run may change them.
HARMLESS = {
    "train": {"eval_every", "save_every", "log_every", "keep", "workers", "report", "micro_batch"},
    "data": {"cache"},
}


@contextmanager
def claimed(config: RunConfig, folder: Path, *, resume: bool, first: bool) -> Iterator[None]:
    """Lock `folder` for a run. A new run writes its config; a resumed one must have the same settings.

    first:  whether this is the job's first process; the others only check that there is a run to resume.
    """
    if resume and not (folder / CONFIG).is_file():
        reject("resume", str(folder), f"the folder of a run, with its {CONFIG}")
    if not first:
        yield
        return
    make_folder(folder, "out")
    if not resume and _names(folder) and not (folder / _LOCK).exists():
        reject("out", str(folder), "a new folder, or an empty one")  # before anything is written there
    with exclusive(folder, "resume" if resume else "out"):
        if resume:
            _check_settings(config, folder)
        else:
            _start(config, folder)
        yield


@contextmanager
def exclusive(folder: Path, argument: str) -> Iterator[None]:
    """Keep other processes out of `folder`, until this one ends or leaves the context."""
    with locked(folder / _LOCK, wait=0) as state:
        if state == "busy":
            reject(argument, str(folder), "a folder that no other process is using right now")
        if state == "unavailable":
            log_once(f"{folder} cannot be locked: nothing keeps a second process out")
        yield


def _start(config: RunConfig, folder: Path) -> None:
    # These are all that a run leaves if it fails before its first step: they may be overwritten.
    if _names(folder) - {CONFIG, DATA, CHOICES}:
        reject("out", str(folder), "a new folder, or an empty one; to continue that run: --resume")
    write_atomically(folder / CONFIG, to_yaml(config))
    for name in (DATA, CHOICES):
        (folder / name).unlink(missing_ok=True)


def _names(folder: Path) -> set[str]:
    """Names in a folder, without hidden ones."""
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def _check_settings(config: RunConfig, folder: Path) -> None:
    different = differences(run_config(read_settings(folder / CONFIG)), config)
    if different:
        reject(
            "settings", ", ".join(different), f"the settings that the run began with, in {folder / CONFIG}"
        )


def differences(one: RunConfig, other: RunConfig) -> list[str]:
    """Settings that change the result and differ, as section.key=old->new."""
    found = []
    for section in ("model", "data", "recipe", "train"):
        before, after = one.as_dict()[section], other.as_dict()[section]
        for key in before:
            if key not in HARMLESS.get(section, ()) and before[key] != after[key]:
                found.append(f"{section}.{key}={before[key]}->{after[key]}")
    return found


def check_data(folder: Path, data: Prepared, source: Any, *, resume: bool, first: bool) -> None:
    """Note the data of a new run; refuse to resume a run with other tokens or another tokenizer.

    source:  as in the settings, for the reader.
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
    stored = read_json_object(path) if resume else None
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
    """A digest of the index, which holds the digests of the tokens, and of the tokenizer."""
    paths = (tokens / "index.json", tokens / "tokenizer" / "tokenizer.json")
    return digest_of(b"".join(path.read_bytes() for path in paths))


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Make paths absolute, so that the run can be resumed from any folder."""

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
