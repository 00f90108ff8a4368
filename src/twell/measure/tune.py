"""Measures where sparse stops paying on this machine and stores the limits that automatic plans use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from .._errors import reject
from ..crossover import MANY_TOKENS, PROBE_BUCKETS, Shape, remeasure, store
from ..functional import ffn
from ..kernels.cpu.gemm import FEW_TOKENS
from ..kernels.cpu.gemm import remeasure as remeasure_form
from ..kernels.cpu.weights import CpuSite
from ..plan import Plan
from ..policy.cpu import sparse_can_pay
from .ffn import stock_dense
from .timing import compare

# A limit holds up to the next count. Other kernels take over at 17, 33 and 65.
TOKENS = (1, 8, 16, 17, 32, 33, 64, 65, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SHARES = (0.01, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
TRAINING_TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
MARGIN = 0.97  # sparse must take at most this share of dense's time, except with everything active
_COLD_BYTES = 256 << 20
_GPU_DTYPE = torch.bfloat16
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_QUICK_DTYPES = (torch.float32, torch.bfloat16)


def tune_gpu(
    hidden: int = 2048,
    neurons: int = 5632,
    *,
    gated: bool = True,
    tokens: Sequence[int] = TOKENS,
    repetitions: int = 15,
    report: Callable[[int, float, dict[float, float]], None] | None = None,
) -> dict[int, float]:
    """tokens -> the largest share of active neurons at which sparse beats dense; stored for this GPU.

    Times CUDA graphs over enough layers that few tokens find the weights cold in the L2 cache.
    report: called per token count with the limit and the speed-up at every share.
    """
    if not torch.cuda.is_available():
        reject("device", "no CUDA device", "a GPU that torch sees; tune_cpu measures the CPU")
    limits: dict[int, float] = {}
    with torch.no_grad():
        for count in tokens:
            gains = {share: _gain(count, hidden, neurons, share, gated, repetitions) for share in SHARES}
            limits[count] = crossing(gains)
            if report is not None:
                report(count, limits[count], gains)
    name = torch.cuda.get_device_properties(torch.cuda.current_device()).name
    store(name, Shape(hidden, neurons, gated), limits)
    return limits


def tune_training(
    hidden: int = 2048,
    neurons: int = 5632,
    *,
    gated: bool = True,
    tokens: Sequence[int] = TRAINING_TOKENS,
    repetitions: int = 15,
    report: Callable[[int, float, dict[float, float]], None] | None = None,
) -> dict[int, float]:
    """tokens -> the largest share of active neurons at which a training step gains; stored for this GPU.

    A step is a forward and a backward with gradients of x and all weights, without L1 and statistics: those
    cost dense steps more than sparse ones. Fewer tokens than the first count train dense.
    report: called per token count with the limit and the speed-up at every share.
    """
    if not torch.cuda.is_available():
        reject("device", "no CUDA device", "a GPU that torch sees; on a CPU every step looks for itself")
    plan = Plan(path="block", backend="gpu")
    limits: dict[int, float] = {1: 0.0}
    for count in tokens:
        gains = {
            share: training_gain(count, hidden, neurons, share, gated, plan, repetitions=repetitions)
            for share in SHARES
        }
        limits[count] = crossing(gains)
        if report is not None:
            report(count, limits[count], gains)
    name = torch.cuda.get_device_properties(torch.cuda.current_device()).name
    store(name, Shape(hidden, neurons, gated, training=True), limits)
    return limits


def training_gain(
    count: int,
    hidden: int,
    neurons: int,
    share: float,
    gated: bool,
    plan: Plan,
    *,
    repetitions: int = 15,
    device: str = "cuda",
    dtype: torch.dtype = _GPU_DTYPE,
) -> float:
    """How many times faster a step of `count` tokens is with `plan`, this share of the neurons active.

    On a GPU, the smaller of two gains: with the host running ahead, and with its launches in the way, as in
    small models that wait for them.
    """
    x = torch.randn(count, hidden, device=device, dtype=torch.float32)
    x[:, 0] = 8.0
    up, down, gate, rows = _layer(hidden, neurons, share, gated, device, dtype)
    grad_y = torch.randn(count, hidden, device=device).to(dtype)
    operands = [x.to(dtype), up, *([] if gate is None else [gate])]
    x, up, *gates = (operand.detach().requires_grad_() for operand in operands)
    gate = gates[0] if gates else None
    down, rows = down.requires_grad_(), rows.mT.detach().requires_grad_()

    def step(function: Callable[..., Tensor], down: Tensor) -> Callable[[], None]:
        inputs = [x, up, down, *gates]

        def run() -> None:
            torch.autograd.grad(function(x, up, down, gate), inputs, grad_y)

        return run

    steps = {
        "dense": step(stock_dense, down),
        "sparse": step(partial(ffn, plan=plan), rows),
    }
    gains = []
    for queued in (True, False) if device == "cuda" else (False,):
        times = compare(steps, device=device, repetitions=repetitions, calls_per_sample=1, queued=queued)
        gains.append(times["dense"].median / times["sparse"].median)
    return min(gains)


def crossing(gains: dict[float, float]) -> float:
    """The share up to which every measured speed-up is at least 1 / MARGIN, linear between shares.

    1 where sparse is within MARGIN of dense even with everything active; 0 where it never pays.
    """
    shares = sorted(gains)
    needed = 1 / MARGIN
    if gains[shares[-1]] >= MARGIN and all(gains[s] >= 1 for s in shares[:-1]):
        return 1.0
    limit = 0.0
    for before, share in zip([None, *shares], shares, strict=False):
        if gains[share] < needed:
            if before is not None:
                span = gains[before] - gains[share]
                limit = before + (share - before) * (gains[before] - needed) / span
            break
        limit = share
    return limit


def _gain(count: int, hidden: int, neurons: int, share: float, gated: bool, repetitions: int) -> float:
    matrices = 3 if gated else 2
    layers = max(1, -(-_COLD_BYTES // (matrices * hidden * neurons * 2))) if count <= 1024 else 1
    x = torch.randn(count, hidden, device="cuda", dtype=torch.float32)
    x[:, 0] = 8.0
    x = x.to(_GPU_DTYPE)
    stack = [_layer(hidden, neurons, share, gated, "cuda", _GPU_DTYPE) for _ in range(layers)]
    plan = Plan(path="block", backend="gpu")
    timings = compare(
        {
            "dense": _graphed(lambda: [stock_dense(x, up, down, gate) for up, down, gate, _ in stack]),
            "sparse": _graphed(lambda: [ffn(x, up, rows.mT, gate, plan=plan) for up, _, gate, rows in stack]),
        },
        device="cuda",
        repetitions=repetitions,
        calls_per_sample=1,
    )
    return timings["dense"].median / timings["sparse"].median


def _layer(
    hidden: int, neurons: int, share: float, gated: bool, device: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """up, down, gate and neuron-major down, with the same `share` of the neurons active for every token."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.float32) / shape[-1] ** 0.5

    selector, down = normal(neurons, hidden), normal(hidden, neurons)
    active = torch.randperm(neurons, device=device) < round(share * neurons)
    selector[:, 0] = torch.where(active, 2.0, -2.0)
    selector, down = selector.to(dtype), down.to(dtype)
    up = normal(neurons, hidden).to(dtype) if gated else selector
    return up, down, selector if gated else None, down.mT.contiguous()


def _graphed(calls: Callable[[], Iterable[Tensor]]) -> Callable[[], None]:
    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    return graph.replay


class CpuLimits(NamedTuple):
    """The limits that automatic plans use from `tokens` tokens on.

    neuron_major:  whether each neuron's down weights are contiguous, as in `SparseMLP`.
    row:    the largest share of active neurons that the row path takes.
    block:  whether the block path pays for tokens that share few neurons; None with too few tokens.
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
    quick: bool = False,
    report: Callable[[CpuLimits], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[CpuLimits]:
    """Limits of a block of this size wherever sparse execution may pay; stored for this CPU.

    quick:  float32 and bfloat16 in the layout of `SparseMLP` only; a plan measures the rest when it needs it.
    report: called with each limit as it is found.
    progress: called after each measurement with how many are done, and how many there are.
    """
    found = []
    threads = torch.get_num_threads()
    layouts = (True,) if quick else (True, False)
    forms = [
        form
        for tokens in (1 << power for power in range(FEW_TOKENS.bit_length()))
        for form in (
            (tokens, neurons, hidden, threads),
            *((tokens, hidden, neurons, threads, transposed) for transposed in layouts),
        )
    ]
    sites = [
        CpuSite(tokens, hidden, neurons, dtype, gated, neuron_major, threads)
        for dtype, tokens, neuron_major in product(_QUICK_DTYPES if quick else DTYPES, PROBE_BUCKETS, layouts)
    ]
    sites = [site for site in sites if sparse_can_pay(site)]  # others run dense at any limit

    def note(done: int) -> None:
        if progress is not None:
            progress(done, len(forms) + len(sites))

    for done, form in enumerate(forms, 1):
        remeasure_form(*form)
        note(done)
    for done, site in enumerate(sites, len(forms) + 1):
        row, block = remeasure(site)
        block = block if site.tokens >= MANY_TOKENS else None
        found.append(CpuLimits(site.dtype, site.tokens, site.neuron_major_down, row, block))
        if report is not None:
            report(found[-1])
        note(done)
    return found
