"""The portable GPU kernels as a backend that takes CPU tensors, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from twell.backends import PATHS, Backend, Training, register_backend, unregister_backend


def _refusal(site):
    if site.device_type != "cpu":
        return "the interpreter takes CPU tensors"
    if site.dtype == torch.bfloat16:
        return "the interpreter does not multiply bfloat16 correctly"
    return None


@pytest.fixture
def interpreted():
    """The name of a backend that runs the GPU kernels on CPU tensors."""
    if torch.cuda.is_available():
        pytest.skip("with a GPU the kernels themselves are tested (-m gpu)")
    from twell.kernels.gpu.forward import gpu_forward, gpu_repeat
    from twell.kernels.gpu.sizes import list_sizes
    from twell.kernels.gpu.training import gpu_step_repeat, train_backward, train_forward

    training = Training(
        forward=train_forward,
        backward=train_backward,
        sizes=list_sizes,
        adds=True,
        repeat=gpu_step_repeat,
    )
    register_backend(
        Backend(
            name="interpreted",
            paths=frozenset(PATHS),
            refusal=_refusal,
            forward=gpu_forward,
            repeat=gpu_repeat,
            training=training,
            rules="gpu",
        )
    )
    yield "interpreted"
    unregister_backend("interpreted")
