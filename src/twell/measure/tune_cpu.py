"""Where sparse stops paying on the CPU at hand, measured on purpose and kept for automatic plans."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import torch

from ..crossover.cpu import MANY_TOKENS, PROBE_BUCKETS, remeasure
from ..kernels.cpu.gemm import FEW_TOKENS
from ..kernels.cpu.gemm import remeasure as remeasure_form
from ..kernels.cpu.weights import CpuSite
from ..policy.cpu import sparse_can_pay

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class CpuLimits(NamedTuple):
    """What automatic plans go by from `tokens` tokens on.

    neuron_major:  whether each neuron's down weights lie together, as `SparseMLP` keeps them.
    row:    the share of active neurons up to which the row path is taken.
    block:  whether blocks of tokens that share few neurons take the block path; None for too few tokens.
    """

    dtype: torch.dtype
    tokens: int
    neuron_major: bool
    row: float
    block: bool | None


def tune_cpu(
    hidden: int,
    neurons: int,
    *,
    gated: bool = True,
    report: Callable[[CpuLimits], None] | None = None,
) -> list[CpuLimits]:
    """Limits of a block of this size in every dtype in which sparse execution may pay, kept for this CPU.

    report: called with each as it is found.
    """
    found = []
    threads = torch.get_num_threads()
    for tokens in (1 << power for power in range(FEW_TOKENS.bit_length())):
        remeasure_form(tokens, neurons, hidden, threads)
        for transposed in (True, False):
            remeasure_form(tokens, hidden, neurons, threads, transposed)
    for dtype, tokens, neuron_major in product(DTYPES, PROBE_BUCKETS, (True, False)):
        site = CpuSite(
            tokens=tokens,
            hidden=hidden,
            neurons=neurons,
            dtype=dtype,
            gated=gated,
            neuron_major_down=neuron_major,
            threads=threads,
        )
        if not sparse_can_pay(site):
            continue  # dense, whatever the limits are
        row, block = remeasure(site)
        found.append(CpuLimits(dtype, tokens, neuron_major, row, block if tokens >= MANY_TOKENS else None))
        if report is not None:
            report(found[-1])
    return found
