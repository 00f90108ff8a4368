"""The one decision: which path runs a call, and why.

`resolve` takes a plan to a path and a backend that can run it. Then a call is decided once: `decide` takes
eager calls, before they run; `decide_inside` takes the registered ops, whose graphs were compiled before
anything was known; `decide_backward` takes their backward. `crossover` holds what was measured, a layer's
`LayerState` what is known of it.
"""

from __future__ import annotations

from ..backends import get_backend
from ..kernels.gpu.sizes import DEFAULT_ROWS
from ..layer_state import LayerState, layer_of
from ..problem import Decision, FfnArgs, source_of
from . import cpu, gpu
from .resolution import Resolution, resolve, resolve_cached, resolve_observed

__all__ = [
    "Resolution",
    "decide",
    "decide_backward",
    "decide_inside",
    "resolve",
    "resolve_cached",
    "resolve_observed",
]

_AHEAD = 255  # calls that repeat a settled decision before everything is checked again


def decide(
    args: FfnArgs,
    resolution: Resolution,
    layer: LayerState,
    *,
    training: bool,
    record: bool,
    hooked: bool = False,
) -> Decision:
    """Decide an eager call whose plan came to `resolution`, and note it in `layer`.

    hooked: whether hooks see what the step saves for its backward, as in a checkpoint.
    """
    if resolution.backend == "dense":
        decision = Decision("dense", 0, "dense", resolution.reason, ahead=_AHEAD, layer=layer)
    elif resolution.path == "auto":
        decision = _automatic(args, resolution, layer, training, hooked)
    else:
        decision = _named(args, resolution, layer, training, record)
    layer.note("forward", decision.path, decision.reason, decision.reading, decision.known[0])
    return decision


def decide_inside(
    args: FfnArgs,
    path: str,
    block_rows: int,
    backend: str,
    *,
    training: bool,
    record: bool,
    layer: LayerState | None = None,
) -> Decision:
    """Decide the call of a registered op now, by what is known of the layer (None: found by its weights)."""
    layer = layer or layer_of(source_of(args.selector))
    resolution = Resolution(path, block_rows, backend, "compiled so")
    decision = decide(args, resolution, layer, training=training, record=record)
    # The op's own backend also runs what is decided dense, so that it saves tensors of the same sizes.
    return decision._replace(backend=backend, block_rows=block_rows)


def decide_backward(args: FfnArgs, block_rows: int, backend: str, forward: Decision | None) -> Decision:
    """Decide the backward of a step; forward: the decision for its forward, if known."""
    if get_backend(backend).rules == "cpu":
        decision = cpu.decide_backward(args, None if forward is None else forward.layer)
    elif forward is not None and forward.path == "dense":
        decision = forward
    else:
        reason = gpu.why_out_of_reach(args, training=True, rows=block_rows or DEFAULT_ROWS)
        path = "block" if reason is None else "dense"
        known = "as its forward" if forward is None else forward.reason
        reading, layer = (None, None) if forward is None else (forward.reading, forward.layer)
        decision = Decision(path, block_rows, backend, reason or known, reading=reading, layer=layer)
    if decision.layer is not None:
        decision.layer.note("backward", decision.path, decision.reason, decision.reading)
    return decision


def _automatic(
    args: FfnArgs, resolution: Resolution, layer: LayerState, training: bool, hooked: bool
) -> Decision:
    rows, backend = resolution.block_rows, resolution.backend
    rules = cpu if get_backend(backend).rules == "cpu" else gpu
    if training:
        decision = rules.decide_training(args, rows, layer, hooked)
    else:
        decision = rules.decide_inference(args, rows, layer)
    # Rules name the backend they were made for; another may follow them.
    return decision if decision.backend == "dense" else decision._replace(backend=backend)


def _named(
    args: FfnArgs, resolution: Resolution, layer: LayerState, training: bool, record: bool
) -> Decision:
    """Take a named path as it is, where the kernels reach."""
    path, rows, backend, reason = resolution
    decision = Decision(path, rows, backend, reason, ahead=_AHEAD, layer=layer)
    if get_backend(backend).rules != "gpu" or path == "dense":
        return decision
    unreachable = gpu.why_out_of_reach(args, training, rows or DEFAULT_ROWS)
    if unreachable is not None:
        return Decision("dense", rows, "dense", unreachable, layer=layer)
    if path == "row":
        decision = gpu.row_or_block(args, decision, training, record)
    return decision
