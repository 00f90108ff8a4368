"""What a block is and what is known of it, as the rows of a table: how a notebook shows a `SparseMLP`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from torch import Tensor, nn

from ._html import table
from .layer_state import LayerState, known_layer
from .problem import PLAIN


def state_of(block: Any) -> LayerState | None:
    """The block's state or the one that a compiled graph keeps for its weights: whichever ran last."""
    states = [block._layer]
    weights = block._plain_weights()
    selector = None if weights is None else weights[0] if weights[2] is None else weights[2]
    if type(selector) in PLAIN:
        states.append(known_layer(selector))
    called = [state for state in states if state is not None and "forward" in state.ran]
    return max(called, key=lambda state: state.ran["forward"].order, default=None)


def block_html(block: Any) -> str:
    """Never waits for a GPU, and never fails: what cannot be told of an odd block is left out."""
    asked: dict[str, Callable[[Any], str]] = {
        "kind": lambda block: "gated" if block.gated else "non-gated",
        "D x H": lambda block: f"{block.hidden_size} x {block.intermediate_size}",
        "activation": lambda block: block.activation.spec,
        "parameters": _parameters,
        "weights": _weights,
        "plan": lambda block: "auto" if block.plan is None else block.plan.spec,
        "active per token": _recorded_share,
        "active per block of tokens": _read_share,
        "ran": _ran,
        "why": _why,
    }
    rows = [(name, told) for name, ask in asked.items() if (told := _told(ask, block))]
    return table((type(block).__name__, ""), rows, left=(0, 1))


def _told(ask: Callable[[Any], str], block: Any) -> str:
    try:
        return ask(block)
    except Exception:  # quantised, sharded, replicated or half-built projections fail in any way
        return ""


def _projections(block: Any) -> list[nn.Module]:
    found = block.gate_proj, block.up_proj, block.down_proj
    return list(dict.fromkeys(module for module in found if module is not None))


def _parameters(block: Any) -> str:
    found = {id(p): p.numel() for module in _projections(block) for p in module.parameters()}
    return f"{sum(found.values()):,}"


def _weights(block: Any) -> str:
    """Dtypes and devices."""
    tensors = [t for module in _projections(block) for t in chain(module.parameters(), module.buffers())]
    kinds = dict.fromkeys(f"{str(t.dtype).removeprefix('torch.')} on {t.device}" for t in tensors)
    return ", ".join(kinds)


def _recorded_share(block: Any) -> str:
    l0: Tensor | None = None if block.last_stats is None else block.last_stats.l0
    if l0 is None or l0.device.type != "cpu":  # reading it would wait for a GPU
        return ""
    return f"{float(l0.detach()) / block.intermediate_size:.2%}"


def _read_share(block: Any) -> str:
    state = state_of(block)
    if state is None:
        return ""
    shares = [state.ran["forward"].share, *(reading.share for reading in state.readings().values())]
    return next((f"{share:.1%}" for share in shares if share is not None), "")


def _ran(block: Any) -> str:
    state = state_of(block)
    if state is None:
        return "not yet"
    backward = f", backward {state.ran['backward'].path}" if "backward" in state.ran else ""
    return f"{state.ran['forward'].path}{backward}"


def _why(block: Any) -> str:
    state = state_of(block)
    return "" if state is None else state.ran["forward"].reason
