"""Matrix products on the CPU in the form that is fastest on this machine.

fp32, [M, 1024] x [1024, 4096], 2 Zen 3 cores, cold weights: F.linear (MKL) against oneDNN's matrix-vector
product for 1 token: 1.10 / 0.79 ms; against (W x^T)^T for M 4: 2.1 / 0.7 ms, 16: 2.8 / 1.5, 64: 5.9 / 4.1. On
16 Sapphire Rapids cores the same forms are slower than F.linear, so each is tried once per process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import linear

_FEW_TOKENS = 64
_PROBE_HIDDEN, _PROBE_NEURONS, _PROBE_SETS, _PROBE_REPETITIONS = 1024, 2048, 4, 5
_MUST_TAKE_AT_MOST = 0.9  # of F.linear's time

# Registered by torch for its own compiler, not called for eager fp32.
_ONEDNN_LINEAR = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


# Two threads that probe at once would each measure the other.
PROBE_LOCK = threading.RLock()


def multiply(x: Tensor, weight: Tensor, tuned: bool) -> Tensor:
    """x @ weight^T; always a new tensor. x [m, D], weight [K, D].

    tuned: take the form that was fastest on this machine, else F.linear.
    """
    tokens = x.shape[0]
    if tuned and 0 < tokens <= _FEW_TOKENS and weight.dtype == torch.float32 and weight.is_contiguous():
        bucket = 1 << (tokens - 1).bit_length()
        with PROBE_LOCK:
            product = _fastest(bucket, torch.get_num_threads())
        return product(x, weight)
    return linear(x, weight)


@lru_cache(maxsize=64)
def has_native_gemm(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies 16-bit matrices in hardware."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float16 and torch.ops.mkldnn._is_mkldnn_fp16_supported()


@lru_cache(maxsize=64)
def _fastest(tokens: int, threads: int) -> Callable[[Tensor, Tensor], Tensor]:
    """F.linear, or the other form for so few tokens if it is clearly faster with `threads` threads."""
    other = _onednn_vector if tokens == 1 else _weight_first
    if other is _onednn_vector and (_ONEDNN_LINEAR is None or not torch.backends.mkldnn.is_available()):
        return linear
    x = probe_numbers(tokens, _PROBE_HIDDEN)
    weights = [probe_numbers(_PROBE_NEURONS, _PROBE_HIDDEN)]
    weights += [weights[0].clone() for _ in range(_PROBE_SETS - 1)]
    least = {linear: float("inf"), other: float("inf")}
    for _ in range(_PROBE_REPETITIONS):
        for form in least:
            begun = time.perf_counter()
            for weight in weights:
                form(x, weight)
            least[form] = min(least[form], time.perf_counter() - begun)
    return other if least[other] <= _MUST_TAKE_AT_MOST * least[linear] else linear


def probe_numbers(*shape: int) -> Tensor:
    """float32 in [0, 1) that leave the caller's random state alone."""
    return torch.rand(
        *shape, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu"
    )


def _weight_first(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(weight, x.mT).mT.contiguous()


def _onednn_vector(x: Tensor, weight: Tensor) -> Tensor:
    return _ONEDNN_LINEAR(x, weight, None, "none", [], "")
