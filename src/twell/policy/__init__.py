"""The one decision: which path runs a call, and why.

A call is decided once. `decide` takes eager calls, before they run; `decide_inside` takes those of the
registered ops, whose graphs were compiled before anything was known; `decide_backward` their backward. What
was measured lies in `crossover`, what is known of a layer in its `LayerState`.
"""

from __future__ import annotations

from ..backends import get_backend
from ..kernels.args import Decision, FfnArgs, source_of
from ..kernels.gpu.sizes import DEFAULT_ROWS
from ..layer_state import LayerState, layer_of
from . import cpu, gpu
from .resolution import Resolution, resolve, resolve_cached

__all__ = ["Resolution", "decide", "decide_backward", "decide_inside", "resolve", "resolve_cached"]

_UNASKED = 255


def decide(
    args: FfnArgs,
    resolution: Resolution,
    layer: LayerState,
    *,
    training: bool,
    record: bool,
    hooked: bool = False,
) -> Decision:
    """For an eager call whose plan came to `resolution`; noted in `layer`.

    hooked: whether hooks watch what is saved for the backward, as those of a checkpoint do.
    """
    if resolution.backend == "dense":
        # What was resolved to dense stays so as long as nothing changes. Everything is checked again once in
        # 256 calls.
        decision = Decision("dense", 0, "dense", resolution.reason, ahead=_UNASKED, layer=layer)
    elif resolution.path == "auto":
        decision = _automatic(args, resolution, layer, training, hooked)
    else:
        decision = _named(args, resolution, layer, training, record)
    layer.note("forward", decision.path, decision.reason, decision.reading)
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
    """For a registered op: its path "auto" is decided now, by what is known of the layer (None: found by its
    weights)."""
    layer = layer or layer_of(source_of(args.selector))
    resolution = Resolution(path, block_rows, backend, "compiled so")
    decision = decide(args, resolution, layer, training=training, record=record)
    # The op has its own backend to fall back to, which keeps what it saves of the same sizes.
    return decision._replace(backend=backend, block_rows=block_rows)


def decide_backward(args: FfnArgs, block_rows: int, backend: str, forward: Decision | None) -> Decision:
    """For the backward of a step; forward: what was decided for its forward, if that is known."""
    rules = get_backend(backend).rules
    if rules == "cpu":
        decision = cpu.decide_backward(args, None if forward is None else forward.layer)
    elif forward is not None and (rules is None or forward.path == "dense"):
        decision = forward
    elif rules is None:
        decision = Decision("auto", block_rows, backend, "its backend decides")
    else:
        rows = block_rows or DEFAULT_ROWS
        reason = gpu.why_out_of_reach(args, training=True, rows=rows)
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
    _path, rows, backend, reason = resolution
    rules = _RULES.get(get_backend(backend).rules)
    if rules is None:  # registered by somebody else, who decides
        return Decision("auto", rows, backend, reason, layer=layer)
    if training:
        decision = rules.decide_training(args, rows, layer, hooked)
    else:
        decision = rules.decide_inference(args, rows, layer)
    # Rules name the backend that they were made for; another may follow them, too.
    return decision if decision.backend in ("dense", backend) else decision._replace(backend=backend)


_RULES = {"cpu": cpu, "gpu": gpu}


def _named(
    args: FfnArgs, resolution: Resolution, layer: LayerState, training: bool, record: bool
) -> Decision:
    """A path that somebody names is taken as it is, where the kernels reach."""
    path, rows, backend, reason = resolution
    decision = Decision(path, rows, backend, reason, ahead=_UNASKED, layer=layer)
    if get_backend(backend).rules != "gpu" or path == "dense":
        return decision
    unreachable = gpu.why_out_of_reach(args, training, rows or DEFAULT_ROWS)
    if unreachable is not None:
        return Decision("dense", rows, "dense", unreachable, layer=layer)
    if path == "row":
        decision = gpu.row_or_block(args, decision, training, record)
    return decision
