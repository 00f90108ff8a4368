"""What the registered ops count as in `torch.utils.flop_counter`: the dense block's products.

twell imports this when a call or a backward of its own meets a flop counter; import it before you call
`torch.ops.twell` yourself. `import twell` does not: torch's counter imports Triton (0.2 s).

Counting active neurons would give another number at every step. The dense count compares with stock blocks,
and utilisation is measured by it. Work that a backward repeats is not counted.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import flop_registry, register_flop_formula

from . import ops as _ops  # noqa: F401 - defines torch.ops.twell

_Shape = torch.Size


@register_flop_formula([torch.ops.twell.ffn, torch.ops.twell.ffn_train])
def _forward(x: _Shape, up: _Shape, down: _Shape, gate: _Shape | None, *_rest, **_options) -> int:
    projection, output = _products(x, up, down)
    return output + projection * (1 if gate is None else 2)


@register_flop_formula(torch.ops.twell.ffn_backward)
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
    """The products that autograd computes in a stock block for the gradients that are needed."""
    x_needed, up_needed, down_needed, gate_needed, up_bias, _down_bias, gate_bias = rest[-1]
    projection, output = _products(x, up, down)
    hidden_needed = x_needed or up_needed or gate_needed or up_bias or gate_bias
    outputs = 0 if grad_y is None else hidden_needed + down_needed
    projections = up_needed + (x_needed if gate is None else gate_needed + 2 * x_needed)
    return output * outputs + projection * projections


def tell_active_counters() -> None:
    """Add the formulas to running counters: a counter takes the formulas known when it was made."""
    known = {op: formula for op, formula in flop_registry.items() if str(op).startswith("twell.")}
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", mode), "flop_registry", None)
        if registry is not None:
            for op, formula in known.items():
                registry.setdefault(op, formula)  # a mapping of the user's stays


def _products(x: _Shape, up: _Shape, down: _Shape) -> tuple[int, int]:
    """Operations of one projection from x, and of the down projection; a multiply-add counts as two."""
    tokens, (neurons, features) = x[0], up
    return 2 * tokens * features * neurons, 2 * tokens * neurons * down[0]
