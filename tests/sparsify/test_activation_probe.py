"""Activations are recognised by what they return."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from twell import Activation
from twell.sparsify.activation_probe import Recognised, recognise

CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("function", "spec"),
    [
        (torch.relu, "relu"),
        (nn.ReLU(), "relu"),
        (nn.ReLU(inplace=True), "relu"),
        (lambda x: x.clamp(min=0), "relu"),
        (lambda x: torch.where(x > 0, x, 0.0), "relu"),
        (lambda x: functional.relu(x).square(), "relu2"),
        (lambda x: functional.relu(x) * x, "relu2"),
        (lambda x: functional.threshold(x, 0.5, 0.0), "fatrelu(0.5)"),
        (nn.Threshold(0.125, 0.0), "fatrelu(0.125)"),
    ],
)
def test_known_ones(function, spec, dtype):
    assert recognise(function, dtype, CPU) == Recognised(Activation.parse(spec))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_threshold_that_no_dtype_has(dtype):
    """0.1 is no binary number: what counts is which values pass."""
    found = recognise(lambda x: torch.where(x.double() > 0.1, x, 0.0), dtype, CPU)
    values = torch.linspace(0.09, 0.11, 2001, dtype=torch.float64).to(dtype)
    assert torch.equal(found.activation(values) != 0, values.double() > 0.1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shift", [1.0, 0.25, 0.1])
def test_shifted(shift, dtype):
    found = recognise(lambda x: functional.relu(x - shift), dtype, CPU)
    assert found.activation == Activation("relu")
    assert found.shift == pytest.approx(shift, rel=torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    "function",
    [functional.silu, functional.gelu, torch.tanh, torch.sigmoid, functional.elu, functional.leaky_relu, abs],
)
def test_no_exact_zeros(function):
    assert "no exact zeros" in recognise(function, torch.float32, CPU)


@pytest.mark.parametrize(
    "function",
    [
        functional.relu6,
        nn.ReLU6(inplace=True),
        nn.Hardtanh(0, 6, inplace=True),
        lambda x: functional.relu(x).clamp(max=100),
        lambda x: functional.relu(x).clamp(max=1e30),
        lambda x: functional.relu(x) ** 3,
        lambda x: functional.relu(x) * 2,
        functional.hardswish,
        functional.softshrink,
        lambda x: functional.relu(x) + 1e-3 * functional.relu(x - 60),
    ],
)
def test_zeros_of_something_else(function):
    found = recognise(function, torch.float32, CPU)
    assert isinstance(found, str)


def test_what_mixes_its_values_is_refused():
    assert "element by element" in recognise(lambda x: functional.relu(x - x[0]), torch.float32, CPU)
    assert "shapes" in recognise(lambda x: x[:3], torch.float32, CPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_shift_is_refused_in_16_bits(dtype):
    """A bias of 16 bits cannot hold it."""
    assert "none of relu" in recognise(lambda x: functional.relu(x - 0.01), dtype, CPU)
