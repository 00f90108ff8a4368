"""Backends that only tests have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch

from twell.backends import BACKENDS, Backend, Site
from twell.kernels.dense import dense_forward
from twell.policy import resolve_cached

from .interpreter import hasten


@contextmanager
def added(backend: Backend) -> Iterator[None]:
    """Inside the `with`, plans may name `backend`, and automatic ones try it first."""
    with mock.patch.dict(BACKENDS, {backend.name: backend}):
        resolve_cached.cache_clear()
        yield
    resolve_cached.cache_clear()


def dense_backend(name: str, **options) -> Backend:
    """Runs everything densely, whatever path it is asked for."""
    defaults = {
        "paths": frozenset({"auto", "row", "block"}),
        "refusal": lambda site: None,
        "forward": lambda args, decision, record: dense_forward(args, record),
    }
    return Backend(name=name, **{**defaults, **options})


def interpreted_backend() -> Backend:
    """The portable GPU kernels on CPU tensors, through Triton's interpreter."""
    hasten()
    return replace(BACKENDS["gpu"], name="interpreted", refusal=_interpreter_refusal)


def _interpreter_refusal(site: Site) -> str | None:
    if site.device_type != "cpu":
        return "the interpreter takes CPU tensors"
    if site.dtype == torch.bfloat16:
        return "the interpreter does not multiply bfloat16 correctly"
    return None
