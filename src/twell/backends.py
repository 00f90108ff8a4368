"""The registry of implementations that a plan can choose from.

A backend says what it cannot run and why, computes the forward, and may bring a backward of its own. Whether
it is worth it is for `policy` to decide. New kernels join with `register_backend`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ._checks import reject
from .kernels import cpu_training
from .kernels.args import Decision, FfnArgs, FfnOutput, Gradients, Saved, StepRepeat
from .kernels.cpu import cpu_forward
from .kernels.csr import SAMPLED_DOT_AVAILABLE
from .kernels.dense import dense_backward, dense_forward
from .kernels.gpu.sizes import list_sizes

PATHS = ("auto", "dense", "row", "block")
_GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class Site:
    """What is known of a call before it runs: everything a backend may refuse.

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


class Repeat(Protocol):
    """path: what ran, as `recorded_paths` has it."""

    path: str

    def __call__(self, *tensors: Tensor | None) -> Tensor | None:
        """y [..., E] of (x [..., D], up, down, gate, up_bias, down_bias, gate_bias), or None where that has
        to be run in full."""


Forward = Callable[[FfnArgs, Decision, bool], FfnOutput]
Backward = Callable[[FfnArgs, Tensor, Tensor | None, FfnArgs], Gradients]


@dataclass(frozen=True, kw_only=True)
class Training:
    """Training kernels whose backward takes over something from the forward.

    forward:   (args, decision, record) -> FfnOutput and what the backward wants saved.
    backward:  (args, saved, decision, grad_y, grad_l1, needed) -> gradients of the seven tensor arguments.
    sizes:     (tokens, neurons, block_rows) -> sizes of the two saved tensors.
    adds:      whether `backward` takes an `Existing` more, and gives None where it has added to that.
    repeat:    (args, decision, record) of a step whose forward has just run -> how it is run again, or None.
    """

    forward: Callable[[FfnArgs, Decision, bool], tuple[FfnOutput, Saved]]
    backward: Callable[..., Gradients]
    sizes: Callable[[int, int, int], tuple[int, int]]
    adds: bool = False
    repeat: Callable[[FfnArgs, Decision, bool], StepRepeat | None] | None = None


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One implementation of the feed-forward block.

    name:        how plans and logs call it.
    paths:       the plan paths it implements, of "auto", "dense", "row", "block".
    refusal:     Site -> why it cannot run there, or None if it can.
    forward:     (args, decision, record) -> FfnOutput.
    backward:    (args, grad_y, grad_l1, needed) -> gradients of the seven tensor arguments; None means the
                 dense backward.
    training:    kernels for training that do more than that; None if there are none.
    rules:       "cpu" or "gpu": whose rules `policy` applies to its calls; None: it decides for itself.
    repeat:      (args, decision) of a call that has just run -> how calls with operands of the same shapes,
                 strides and types are run again, or None; see `kernels.gpu.forward.Repeat`.
    """

    name: str
    paths: frozenset[str]
    refusal: Callable[[Site], str | None]
    forward: Forward
    backward: Backward | None = None
    training: Training | None = None
    rules: str | None = None
    repeat: Callable[[FfnArgs, Decision], Repeat | None] | None = None

    @property
    def trains(self) -> bool:
        """Whether it has a backward of its own."""
        return self.backward is not None or self.training is not None

    def refuses(self, site: Site, path: str) -> str | None:
        """Why this backend cannot run `path` at `site`, or None."""
        if path not in self.paths:
            return f"it has no {path!r} path"
        return self.refusal(site)


_BACKENDS: dict[str, Backend] = {}
_version = 0


def register_backend(backend: Backend) -> None:
    """Add a backend; automatic plans try later registrations first, so specialised ones win."""
    if backend.name in _BACKENDS:
        reject("backend.name", repr(backend.name), f"a new name, not one of {backend_names()}")
    unknown = backend.paths - set(PATHS)
    if unknown:
        reject("backend.paths", sorted(unknown), f"names from {PATHS}")
    _BACKENDS[backend.name] = backend
    _bump_version()


def unregister_backend(name: str) -> None:
    """Remove a backend that `register_backend` added."""
    del _BACKENDS[get_backend(name).name]
    _bump_version()


def registry_version() -> int:
    """A number that changes with every registration, for caches of decisions."""
    return _version


def _bump_version() -> None:
    global _version
    _version += 1


def get_backend(name: str) -> Backend:
    if name not in _BACKENDS:
        reject("backend", repr(name), " | ".join(map(repr, backend_names())))
    return _BACKENDS[name]


def backend_names() -> tuple[str, ...]:
    return tuple(_BACKENDS)


def candidates() -> tuple[Backend, ...]:
    """Sparse backends in the order in which automatic plans try them."""
    return tuple(b for b in reversed(_BACKENDS.values()) if b.name != "dense")


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
    if site.hidden % 8 or site.neurons % 8:
        return f"D and H must be multiples of 8, not {site.hidden} and {site.neurons}"
    return None


def _gpu_forward(args: FfnArgs, decision: Decision, record: bool) -> FfnOutput:
    # Imported with the first call: Triton takes half a second, and may not be there.
    from .kernels.gpu.forward import gpu_forward

    return gpu_forward(args, decision, record)


def _gpu_repeat(args: FfnArgs, decision: Decision) -> Repeat | None:
    from .kernels.gpu.forward import gpu_repeat

    return gpu_repeat(args, decision)


def _gpu_train_forward(args: FfnArgs, decision: Decision, record: bool) -> tuple[FfnOutput, Saved]:
    from .kernels.gpu.training import train_forward

    return train_forward(args, decision, record)


def _gpu_step_repeat(args: FfnArgs, decision: Decision, record: bool) -> StepRepeat | None:
    from .kernels.gpu.training import gpu_step_repeat

    return gpu_step_repeat(args, decision, record)


def _gpu_train_backward(*arguments) -> Gradients:
    from .kernels.gpu.training import train_backward

    return train_backward(*arguments)


register_backend(
    Backend(
        name="dense",
        paths=frozenset({"dense"}),
        refusal=lambda site: None,
        forward=lambda args, decision, record: dense_forward(args, record, reason=decision.reason),
        backward=dense_backward,
    )
)
register_backend(
    Backend(
        name="cpu",
        rules="cpu",
        paths=frozenset(PATHS),
        refusal=_cpu_refusal,
        forward=cpu_forward,
        training=Training(
            forward=cpu_training.train_forward,
            backward=cpu_training.train_backward,
            sizes=cpu_training.sizes,
        ),
    )
)
register_backend(
    Backend(
        name="gpu",
        rules="gpu",
        paths=frozenset(PATHS),
        refusal=_gpu_refusal,
        forward=_gpu_forward,
        repeat=_gpu_repeat,
        training=Training(
            forward=_gpu_train_forward,
            backward=_gpu_train_backward,
            sizes=list_sizes,
            adds=True,
            repeat=_gpu_step_repeat,
        ),
    )
)
