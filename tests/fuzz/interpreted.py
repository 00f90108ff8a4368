"""The GPU kernels as a backend for CPU tensors, in Triton's interpreter: a GPU run's logic without one."""

from __future__ import annotations

import os

import torch

from twell.backends import PATHS, Backend, Training, backend_names, register_backend

NAME = "interpreted"


def register() -> None:
    """Once per process; before anything else imports Triton."""
    if NAME in backend_names():
        return
    os.environ.setdefault("TRITON_INTERPRET", "1")
    register_backend(backend())


def backend() -> Backend:
    from twell.kernels.gpu.forward import gpu_forward
    from twell.kernels.gpu.sizes import list_sizes
    from twell.kernels.gpu.training import train_backward, train_forward

    training = Training(
        forward=train_forward,
        backward=train_backward,
        sizes=list_sizes,
        adds=True,
    )
    return Backend(
        name=NAME,
        paths=frozenset(PATHS),
        refusal=_refusal,
        forward=gpu_forward,
        training=training,
        rules="gpu",
    )


def _refusal(site) -> str | None:
    if site.device_type != "cpu":
        return "the interpreter takes CPU tensors"
    if site.dtype == torch.bfloat16:
        return "the interpreter does not multiply bfloat16 correctly"
    return None
