"""Where sparse stops paying on the GPU at hand, measured: the table that automatic plans go by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from .._checks import reject
from ..crossover.gpu import Shape, store
from ..functional import ffn
from ..plan import Plan
from .ffn import stock_dense
from .timing import compare

# Limits hold up to the next count: 17, 33 and 65 are where other kernels take over.
TOKENS = (1, 8, 16, 17, 32, 33, 64, 65, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SHARES = (0.01, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
MARGIN = 0.97  # sparse must take at most this share of dense's time, but for the last point
_COLD_BYTES = 256 << 20


def tune(
    hidden: int = 2048,
    neurons: int = 5632,
    *,
    dtype: torch.dtype = torch.bfloat16,
    gated: bool = True,
    tokens: Sequence[int] = TOKENS,
    repetitions: int = 15,
    report: Callable[[int, float, dict[float, float]], None] | None = None,
) -> dict[int, float]:
    """tokens -> the largest share of active neurons at which sparse beats dense; stored for this GPU.

    Times are those of CUDA graphs over enough layers that few tokens meet weights cold in the L2 cache.
    report: called per token count with the limit and the speed-up at every share measured.
    """
    if not torch.cuda.is_available():
        reject("device", "no CUDA device", "a GPU that torch sees; limits are those of a GPU")
    limits: dict[int, float] = {}
    with torch.no_grad():
        for count in tokens:
            gains = {
                share: _gain(count, hidden, neurons, share, dtype, gated, repetitions) for share in SHARES
            }
            limits[count] = crossing(gains)
            if report is not None:
                report(count, limits[count], gains)
    name = torch.cuda.get_device_properties(torch.cuda.current_device()).name
    store(name, Shape(hidden, neurons, gated), limits)
    return limits


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


def _gain(
    count: int, hidden: int, neurons: int, share: float, dtype: torch.dtype, gated: bool, repetitions: int
) -> float:
    matrices = 3 if gated else 2
    layers = max(1, -(-_COLD_BYTES // (matrices * hidden * neurons * 2))) if count <= 1024 else 1
    x = torch.randn(count, hidden, device="cuda", dtype=torch.float32)
    x[:, 0] = 8.0
    x = x.to(dtype)
    stack = [_layer(hidden, neurons, share, dtype, gated) for _ in range(layers)]
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
    hidden: int, neurons: int, share: float, dtype: torch.dtype, gated: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """up, down, gate and neuron-major down, with the same `share` of the neurons active for every token."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.float32) / shape[-1] ** 0.5

    selector, down = normal(neurons, hidden), normal(hidden, neurons)
    active = torch.randperm(neurons, device="cuda") < round(share * neurons)
    selector[:, 0] = torch.where(active, 2.0, -2.0)
    up = normal(neurons, hidden).to(dtype) if gated else selector.to(dtype)
    return up, down.to(dtype), selector.to(dtype) if gated else None, down.mT.contiguous().to(dtype)


def _graphed(calls: Callable[[], Iterable[Tensor]]) -> Callable[[], None]:
    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    return graph.replay
