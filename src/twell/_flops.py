"""What the registered ops count as in `torch.utils.flop_counter`: the dense block's products.

A count that followed the activations would differ from step to step; this one compares with stock blocks, and
is what a utilisation is measured by. Nothing is counted for what a backward computes again.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch

from ._after_import import after_import

_MODULE = "torch.utils.flop_counter"
_Shape = torch.Size


def count_flops_in_torch() -> None:
    """Register the formulas, now or when somebody imports torch's counter: it imports Triton (0.3 s)."""
    counter = sys.modules.get(_MODULE)
    if counter is not None and hasattr(counter, "FlopCounterMode"):
        _register(counter)
    else:
        after_import(_MODULE, _register, "torch's flop counter does not know the ops of twell")


def _register(counter: ModuleType) -> None:
    ops = torch.ops.twell
    counter.register_flop_formula([ops.ffn, ops.ffn_train])(_forward)
    counter.register_flop_formula(ops.ffn_backward)(_backward)


def _forward(x: _Shape, up: _Shape, down: _Shape, gate: _Shape | None, *_rest, **_options) -> int:
    projection, output = _products(x, up, down)
    return output + projection * (1 if gate is None else 2)


def _backward(
    grad_y: _Shape | None,
    _grad_l1: _Shape | None,
    x: _Shape,
    up: _Shape,
    down: _Shape,
    gate: _Shape | None,
    *rest,
    **_options,
) -> int:
    """The products that autograd makes in a stock block for the gradients that are needed."""
    x_needed, up_needed, down_needed, gate_needed, up_bias, _down_bias, gate_bias = rest[-1]
    projection, output = _products(x, up, down)
    hidden_needed = x_needed or up_needed or gate_needed or up_bias or gate_bias
    outputs = 0 if grad_y is None else hidden_needed + down_needed
    projections = up_needed + (x_needed if gate is None else gate_needed + 2 * x_needed)
    return output * outputs + projection * projections


def _products(x: _Shape, up: _Shape, down: _Shape) -> tuple[int, int]:
    """Operations of one projection from x, and of the one from hidden activations; a multiply-add is two."""
    tokens, (neurons, features) = x[0], up
    return 2 * tokens * features * neurons, 2 * tokens * neurons * down[0]
