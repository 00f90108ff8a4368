"""How exact is exact: an error of at most twice that of stock PyTorch in the same dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from twell import reference
from twell.activations import Activation


def stock_dense(x, up, down, gate=None, *, activation="relu", up_bias=None, down_bias=None, gate_bias=None):
    """The block as a user writes it with torch.nn.functional, in the dtype of its operands."""
    linear = torch.nn.functional.linear
    act = Activation.parse(activation)
    hidden_up = linear(x, up, up_bias)
    if act.name == "drelu":
        hidden_up = torch.relu(hidden_up)
    hidden = act(hidden_up) if gate is None else act(linear(x, gate, gate_bias)) * hidden_up
    return linear(hidden, down, down_bias)


def every_activation(threshold: float = 0.25) -> pytest.MarkDecorator:
    """Parametrises `activation` and `gated`: all there are, with fatrelu at `threshold`."""
    both = [(name, gated) for name in ("relu", "relu2", f"fatrelu({threshold})") for gated in (True, False)]
    kinds = {True: "gated", False: "plain"}
    ids = lambda value: kinds[value] if isinstance(value, bool) else value  # noqa: E731
    return pytest.mark.parametrize(("activation", "gated"), [*both, ("drelu", True)], ids=ids)


def assert_accurate(result: Tensor, exact: Tensor, stock: Tensor, name: str = "output") -> None:
    """||result - exact|| at most 2 ||stock - exact||, plus one float32 rounding unit.

    The unit is for results of a few numbers, where stock happens to round luckily. In float64 stock
    PyTorch *is* the oracle (error 0), so another order of summation gets 8 units of its own.
    """
    assert result.shape == exact.shape, f"{name}: shape {tuple(result.shape)}, expected {tuple(exact.shape)}"
    assert result.dtype == stock.dtype, f"{name}: dtype {result.dtype}, expected {stock.dtype}"
    floor = (
        8 * torch.finfo(torch.float64).eps
        if result.dtype == torch.float64
        else torch.finfo(torch.float32).eps
    )
    error = reference.relative_error(result, exact)
    bound = 2 * reference.relative_error(stock, exact) + floor
    assert error <= bound, f"{name}: relative error {error:.2e} over the bound {bound:.2e}"
