"""The one decision: which path runs a call, and why.

`resolve` takes a plan to a path and a backend that can run it. Then a call is decided once: `decide` takes
eager calls, before they run; `decide_inside` takes the registered ops, whose graphs were compiled before
anything was known; `decide_backward` takes their backward. `crossover` holds what was measured, a layer's
`LayerState` what is known of it.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import NamedTuple

import torch

from .._log import log_once
from ..backends import Site, candidates, get_backend
from ..kernels.cpu.weights import CpuSite
from ..kernels.gpu.sizes import DEFAULT_ROWS
from ..layer_state import LayerState, layer_of
from ..plan import ENVIRONMENT_VARIABLE, Plan, parse_override
from ..problem import AHEAD, Decision, FfnArgs, source_of
from . import cpu, gpu


class Resolution(NamedTuple):
    """A plan, resolved for a site; `decide` settles path "auto" call by call."""

    path: str
    block_rows: int
    backend: str
    reason: str


def resolve(plan: Plan | None, site: Site) -> Resolution:
    """Find a path for `site`, and a backend that can run it.

    The environment variable TWELL_PLAN wins over `plan`, and `plan` over "auto". Where the wanted backend or
    path cannot run, dense runs, with one log line per reason.
    """
    override = os.environ.get(ENVIRONMENT_VARIABLE)
    wanted = parse_override(override) if override else (plan or Plan())
    named_by = "TWELL_PLAN names it" if override else "the plan names it"
    if wanted.path == "dense" and wanted.backend is None:
        return Resolution("dense", 0, "dense", named_by)
    named = wanted.backend is not None
    refusals, never_pays = [], None
    for backend in (get_backend(wanted.backend),) if named else candidates():
        refusal = backend.refuses(site, wanted.path)
        if refusal is not None:
            refusals.append(f"backend {backend.name!r}: {refusal}")
            continue
        if wanted.path != "auto":
            return Resolution(wanted.path, wanted.block_rows, backend.name, named_by)
        never_pays = None if named else _why_never(backend.name, site)
        if never_pays is None:
            if site.training and site.tokens is None:
                log_once(
                    "compiled training steps run dense with an automatic plan: SparseMLP.eager = True "
                    'decides between graphs; Plan(path="block") trains on the active set inside of them'
                )
            return Resolution("auto", wanted.block_rows, backend.name, "automatic")
    if never_pays is not None:
        return Resolution("dense", 0, "dense", never_pays)
    reason = "; ".join(refusals)
    log_once(f"running dense instead of {wanted.path!r}: {reason}")
    return Resolution("dense", 0, "dense", reason)


def resolve_observed(resolution: Resolution, training: bool) -> Resolution:
    """Adapt `resolution` where a compiler, a dispatch mode or a tensor subclass observes the operations.

    An automatic plan trains dense there: the observer sees the whole block (a compiler fuses it) and the
    backward computes nothing twice, which beats an op that may turn out dense inside.
    """
    if training and resolution.path == "auto":
        return Resolution("dense", 0, "dense", "automatic plans train dense where operations are observed")
    return resolution


def _why_never(backend: str, site: Site) -> str | None:
    """Why an automatic plan runs dense whatever the layer, if it does."""
    if backend == "cpu" and site.tokens is not None:
        neuron_major, threads = True, torch.get_num_threads()  # the layout of `down` does not matter here
        kind = site.tokens, site.hidden, site.neurons, site.dtype, site.gated, neuron_major, threads
        return cpu.why_never(CpuSite(*kind))
    if backend == "gpu" and site.dtype == torch.float32:
        return gpu.why_not_float32()
    return None


@lru_cache(maxsize=4096)
def resolve_cached(
    state: object, plan: str | None, *site: str | torch.dtype | int | bool | None
) -> Resolution:
    """`resolve`, cached.

    state:  `resolution_state()`, for the key only.
    plan:   its `spec`: a `Plan` that traced code builds has no fields yet.
    site:   the fields of a `Site`.
    """
    return resolve(None if plan is None else Plan.parse(plan), Site(*site))


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
        decision = Decision("dense", 0, "dense", resolution.reason, ahead=AHEAD, layer=layer)
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
    decision = Decision(path, rows, backend, reason, ahead=AHEAD, layer=layer)
    if get_backend(backend).rules != "gpu" or path == "dense":
        return decision
    unreachable = gpu.why_out_of_reach(args, training, rows or DEFAULT_ROWS)
    if unreachable is not None:
        return Decision("dense", rows, "dense", unreachable, layer=layer)
    if path == "row":
        decision = gpu.row_or_block(args, decision, training, record)
    return decision
