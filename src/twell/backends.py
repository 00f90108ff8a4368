"""The table of backends: what each can run, why not, and the functions that run it.

Whether sparse pays is for `policy` to decide.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ._errors import reject
from .kernels.cpu.backward import cpu_backward
from .kernels.cpu.csr import SAMPLED_DOT_AVAILABLE
from .kernels.cpu.forward import cpu_forward, cpu_train_forward
from .kernels.dense import dense_forward
from .kernels.gpu.sizes import list_sizes, unaligned
from .problem import Decision, FfnArgs, FfnOutput, Gradients, Repeat, Saved, StepRepeat

PATHS = ("auto", "dense", "row", "block")
_GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Site(NamedTuple):
    """A call, as far as known before it runs: everything a backend may refuse.

    tokens:    a power of two at or above the number of tokens; None where a trace leaves it open.
    training:  whether gradients will be asked for.
    """

    device_type: str
    dtype: torch.dtype
    tokens: int | None
    hidden: int
    neurons: int
    gated: bool
    training: bool


@dataclass(frozen=True, kw_only=True)
class Training:
    """Training kernels; the forward may hand something to the backward.

    forward:   (args, decision, record) -> FfnOutput and what the backward wants saved.
    backward:  (args, saved, decision, grad_y, grad_l1, needed) -> gradients of the seven tensor arguments.
    sizes:     (tokens, neurons, block_rows) -> sizes of the two saved tensors.
    adds:      whether `backward` also takes an `Existing`, and gives None where it has added to that.
    repeat:    (args, decision, record) of a step whose forward has just run -> how to run it again, or None.
    """

    forward: Callable[[FfnArgs, Decision, bool], tuple[FfnOutput, Saved]]
    backward: Callable[..., Gradients]
    sizes: Callable[[int, int, int], tuple[int, int]]
    adds: bool = False
    repeat: Callable[[FfnArgs, Decision, bool], StepRepeat | None] | None = None


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One implementation of the feed-forward block.

    name:      what plans and logs call it.
    paths:     the plan paths it implements.
    refusal:   Site -> why it cannot run there, or None if it can.
    forward:   (args, decision, record) -> FfnOutput.
    training:  its training kernels; None: the dense backward.
    rules:     "cpu" or "gpu": the rules that `policy` applies to its calls; None for dense PyTorch.
    repeat:    (args, decision, inside) of a call that has just run -> how to run calls with operands of the
               same shapes, strides and types again, or None; inside: whether a graph's op was called.
    """

    name: str
    paths: frozenset[str]
    refusal: Callable[[Site], str | None]
    forward: Callable[[FfnArgs, Decision, bool], FfnOutput]
    training: Training | None = None
    rules: str | None = None
    repeat: Callable[[FfnArgs, Decision, bool], Repeat | None] | None = None

    def refuses(self, site: Site, path: str) -> str | None:
        """Why this backend cannot run `path` at `site`, or None."""
        if path not in self.paths:
            return f"it has no {path!r} path"
        return self.refusal(site)


def get_backend(name: str) -> Backend:
    if name not in BACKENDS:
        reject("backend", repr(name), " | ".join(map(repr, BACKENDS)))
    return BACKENDS[name]


def candidates() -> tuple[Backend, ...]:
    """Sparse backends in the order in which automatic plans try them: the last of the table first."""
    return tuple(backend for backend in reversed(BACKENDS.values()) if backend.name != "dense")


def _cpu_refusal(site: Site) -> str | None:
    if site.device_type != "cpu":
        return f"the tensors are on {site.device_type!r}, not on the CPU"
    if not SAMPLED_DOT_AVAILABLE:
        return "this torch build has no sampled matrix product for CSR tensors on the CPU"
    return None


def _gpu_refusal(site: Site) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if site.device_type != "cuda":
        return f"the tensors are on {site.device_type!r}, not on a CUDA device"
    if torch.version.hip is not None:
        return "its kernels are written for NVIDIA GPUs"
    if site.dtype not in _GPU_DTYPES:
        return f"its kernels take {', '.join(map(str, _GPU_DTYPES))}, not {site.dtype}"
    return unaligned(site.hidden, site.neurons)


def _from_gpu(module: str, name: str) -> Callable[..., Any]:
    """A function of `kernels.gpu`, imported when it is called: Triton takes half a second, or is missing."""

    def run(*arguments: Any) -> Any:
        return getattr(importlib.import_module(f".kernels.gpu.{module}", __package__), name)(*arguments)

    return run


_TABLE = (
    Backend(
        name="dense",
        paths=frozenset({"dense"}),
        refusal=lambda site: None,
        forward=lambda args, decision, record: dense_forward(args, record, reason=decision.reason),
    ),
    Backend(
        name="cpu",
        rules="cpu",
        paths=frozenset(PATHS),
        refusal=_cpu_refusal,
        forward=cpu_forward,
        training=Training(
            forward=cpu_train_forward, backward=cpu_backward, sizes=lambda tokens, neurons, block_rows: (0, 0)
        ),
    ),
    Backend(
        name="gpu",
        rules="gpu",
        paths=frozenset(PATHS),
        refusal=_gpu_refusal,
        forward=_from_gpu("forward", "gpu_forward"),
        repeat=_from_gpu("forward", "gpu_repeat"),
        training=Training(
            forward=_from_gpu("training", "train_forward"),
            backward=_from_gpu("training", "train_backward"),
            sizes=list_sizes,
            adds=True,
            repeat=_from_gpu("training", "gpu_step_repeat"),
        ),
    ),
)
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in _TABLE}
