"""The portable GPU kernels as a backend that takes CPU tensors, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from ...backends import added, interpreted_backend
from ...interpreter import hasten

if not torch.cuda.is_available():
    hasten()  # tests of the row path launch kernels themselves


@pytest.fixture
def interpreted():
    """The name of a backend that runs the GPU kernels on CPU tensors."""
    if torch.cuda.is_available():
        pytest.skip("with a GPU the kernels themselves are tested (-m gpu)")
    backend = interpreted_backend()
    with added(backend):
        yield backend.name
