"""From a plan to a path and a backend that can run it, before anything is known of the layer."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import NamedTuple

import torch

from .._log import log_once
from ..backends import Site, candidates, get_backend
from ..kernels.cpu.weights import CpuSite
from ..plan import ENVIRONMENT_VARIABLE, Plan, parse_override
from .cpu import sparse_can_pay


class Resolution(NamedTuple):
    """What a plan comes to at a site; `decide` settles path "auto" call by call."""

    path: str
    block_rows: int
    backend: str
    reason: str


def resolve(plan: Plan | None, site: Site) -> Resolution:
    """What will run at `site`: a path and a backend that can run it.

    The environment variable TWELL_PLAN wins over `plan`, and `plan` over "auto". Where the wanted backend or
    path cannot run, dense runs, with one log line per reason.
    """
    override = os.environ.get(ENVIRONMENT_VARIABLE)
    wanted = parse_override(override) if override else (plan or _AUTO)
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


_AUTO = Plan()


def resolve_observed(resolution: Resolution, training: bool) -> Resolution:
    """The same where a compiler, a dispatch mode or a tensor subclass observes the operations.

    An automatic plan trains dense there: the observer sees the whole block (a compiler fuses it) and the
    backward computes nothing twice, which beats an op that may turn out dense inside.
    """
    if training and resolution.path == "auto":
        return Resolution("dense", 0, "dense", "automatic plans train dense where operations are observed")
    return resolution


def _why_never(backend: str, site: Site) -> str | None:
    """Why an automatic plan runs dense whatever the layer, if it does."""
    if backend == "cpu" and site.tokens is not None and not sparse_can_pay(_cpu_site(site)):
        return "too little work for the CPU to look for zeros, or 16-bit matrix units"
    if backend == "gpu" and site.dtype == torch.float32:
        return "float32 products run on tensor cores at reduced precision or not at all"
    return None


def _cpu_site(site: Site) -> CpuSite:
    return CpuSite(
        tokens=site.tokens,
        hidden=site.hidden,
        neurons=site.neurons,
        dtype=site.dtype,
        gated=site.gated,
        neuron_major_down=True,  # does not matter here
        threads=torch.get_num_threads(),
    )


@lru_cache(maxsize=4096)
def resolve_cached(
    state: object,  # `resolution_state()`, for the key only
    plan: str | None,
    device_type: str,
    dtype: torch.dtype,
    tokens: int | None,
    hidden: int,
    neurons: int,
    gated: bool,
    training: bool,
) -> Resolution:
    """`resolve`, cached. The plan comes as its `spec`: a `Plan` that traced code builds has no fields yet."""
    site = Site(
        device_type=device_type,
        dtype=dtype,
        tokens=tokens,
        hidden=hidden,
        neurons=neurons,
        gated=gated,
        training=training,
    )
    return resolve(None if plan is None else Plan.parse(plan), site)
