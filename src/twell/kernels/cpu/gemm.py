"""Dense products on the CPU, in the form that is fastest on this machine and as accurate as F.linear.

fp32, [M, 1024] x [1024, 4096], 2 Zen 3 cores, cold weights: F.linear (MKL) against oneDNN's product for 1
token: 1.10 / 0.79 ms (transposed weights, [M, 2048] x [2048, 512], M 1, 2, 4: 0.28 / 0.21, 0.47 / 0.31,
0.51 / 0.34); against (W x^T)^T for M 4: 2.1 / 0.7 ms, 16: 2.8 / 1.5, 64: 5.9 / 4.1. At D 256, H 1024, and on
16 Sapphire Rapids cores at any size, the same forms are slower than F.linear; on some Intel CPUs they round
worse (D 1000, 24 neurons: 2.0 times F.linear's error in the median, 3.2 at most). So each form is tried at
the weight's shape, for speed and for accuracy.

A 16-bit product without 16-bit units reads a transposed weight, as a neuron-major `down`, element by element:
bf16, H 4096, D 1024, 1 token 12.4 ms against 0.44 with `down` stored row-major; 8 tokens 106 against 3.2.
`sum_all_rows` replaces it there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from . import measurements

FEW_TOKENS = 64  # up to here other forms are tried
_SMALL = 1 << 17  # numbers of a weight (D 256, H 512): smaller products take about 50 us, not worth a trial
_PROBE_SIZE = 4096  # larger sides are tried at this size
_PROBE_BYTES = 64 << 20  # of weights that a trial rotates among, so that they come from memory
_MUST_TAKE_AT_MOST = 0.9  # of F.linear's time
_MAY_ERR_AT_MOST = 1.25  # times F.linear's error
_ROUNDS_WORSE = 1e-3  # stands for a form that is less accurate, in place of its gain
_SLICE = 1 << 17  # numbers of a weight that `_sum_in_float32` casts at a time, within a core's cache

# Registered by torch for its own compiler; eager fp32 does not use it.
_ONEDNN_LINEAR = getattr(torch.ops.mkldnn, "_linear_pointwise", None)

Form = Callable[[Tensor, Tensor], Tensor]


def multiply(x: Tensor, weight: Tensor, tuned: bool) -> Tensor:
    """x @ weight^T, always a new tensor; x [m, D], weight [K, D].

    tuned: take the form that is fastest on this machine, not F.linear.
    """
    form = form_for(x.shape[0], weight) if tuned else None
    return linear(x, weight) if form is None else form(x, weight)


def form_for(tokens: int, weight: Tensor) -> Form | None:
    """The form in which `tokens` multiply `weight` fastest; None: F.linear."""
    if not 0 < tokens <= FEW_TOKENS or weight.dtype != torch.float32 or weight.numel() < _SMALL:
        return None
    transposed = not weight.is_contiguous()
    if transposed and not weight.mT.is_contiguous():
        return None
    form = best_form(tokens, *weight.shape, torch.get_num_threads(), transposed)
    return None if form is linear else form


def best_form(tokens: int, outputs: int, inputs: int, threads: int, transposed: bool = False) -> Form:
    """The other form if it is clearly faster and as accurate, else F.linear.

    transposed: whether the weight's columns are contiguous, as in a neuron-major `down`.
    """
    other, name, measure = _trial(tokens, outputs, inputs, threads, transposed)
    if other is None:
        return linear
    gain = measurements.measured(name, measure, otherwise=1.0)
    return other if gain * _MUST_TAKE_AT_MOST >= 1 else linear


def remeasure(tokens: int, outputs: int, inputs: int, threads: int, transposed: bool = False) -> None:
    """Measure again what `best_form` goes by, and keep the new number."""
    other, name, measure = _trial(tokens, outputs, inputs, threads, transposed)
    if other is not None:
        measurements.measure_again(name, measure)


@lru_cache(maxsize=1024)
def _trial(
    tokens: int, outputs: int, inputs: int, threads: int, transposed: bool
) -> tuple[Form | None, str, Callable[[], float]]:
    """The form that competes with F.linear, if any; the name of its gain; and how to measure that."""
    # (W x^T)^T reads a transposed weight element by element: 2 tokens, D 512, H 2048 3.1 ms against 0.5.
    other = _onednn if tokens == 1 or transposed else _weight_first
    if other is _onednn and (_ONEDNN_LINEAR is None or not torch.backends.mkldnn.is_available()):
        other = None
    sizes = 1 << (tokens - 1).bit_length(), min(outputs, _PROBE_SIZE), min(inputs, _PROBE_SIZE)
    count, outputs, inputs = sizes
    form = getattr(other, "__name__", "")
    layout = ", transposed" if transposed else ""
    name = f"linear over {form}: {count} x {inputs} -> {outputs}{layout}, {threads} threads"
    return other, name, partial(_gain, other, *sizes, transposed)


@lru_cache(maxsize=8)
def has_native_gemm(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies 16-bit matrices in hardware."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float16 and torch.ops.mkldnn._is_mkldnn_fp16_supported()


def _gain(other: Form, tokens: int, outputs: int, inputs: int, transposed: bool) -> float:
    """F.linear's time over `other`'s; `_ROUNDS_WORSE` if `other` is less accurate."""
    x, weight = measurements.random_floats(tokens, inputs), measurements.random_floats(outputs, inputs)
    if transposed:
        weight = weight.mT.contiguous().mT
    if not _is_as_accurate(other, x - 0.5, weight - 0.5):
        return _ROUNDS_WORSE
    sets = max(1, min(4, _PROBE_BYTES // (weight.numel() * weight.itemsize)))
    weights = [weight, *(weight.clone() for _ in range(sets - 1))]

    def run(form: Form) -> float:
        begun = time.perf_counter()
        for one in weights:
            form(x, one)
        return time.perf_counter() - begun

    least, other_least = measurements.least_seconds(partial(run, linear), partial(run, other))
    return least / other_least


def _is_as_accurate(other: Form, x: Tensor, weight: Tensor) -> bool:
    """Tried for all tokens and for three quarters of them: libraries have kernels for round numbers."""
    for rows in {x.shape[0], -(-3 * x.shape[0] // 4)}:
        part = x[:rows]
        exact = part.double() @ weight.double().mT
        errors = [(form(part, weight) - exact).norm().item() for form in (other, linear)]
        if not errors[0] <= _MAY_ERR_AT_MOST * errors[1]:
            return False
    return True


def _weight_first(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(weight, x.mT).mT.contiguous()


def _onednn(x: Tensor, weight: Tensor) -> Tensor:
    return _ONEDNN_LINEAR(x, weight, None, "none", [], "")


def reads_badly(down: Tensor) -> bool:
    """Whether a matrix product would read `down` [D, H] element by element."""
    return (
        down.device.type == "cpu"
        and down.dtype in (torch.bfloat16, torch.float16)
        and not down.is_contiguous()
        and not has_native_gemm(down.dtype)
    )


def sum_all_rows(hidden: Tensor, down: Tensor, bias: Tensor | None) -> Tensor:
    """hidden @ down^T + bias for few tokens, as weighted sums of neuron rows; down.mT must be contiguous.

    Sums in float32 and rounds once. bf16, H 4096, D 1024, weights in cache: 1 token 0.45 ms, 8 tokens 1.6.
    """
    if bias is not None:
        return _sum_in_float32(hidden, down.mT, bias)
    tokens, neurons = hidden.shape
    outputs = down.shape[0]
    # Bags run in parallel, so the rows of very few tokens are cut into parts, one bag each.
    # Cold weights, 2 Zen 3 cores, 1 / 2 / 4 / 8 parts: 1 token 1.09 / 0.64 / 0.64 / 0.89 ms, 2 tokens
    # 0.83 / 0.81 / 0.90 / 1.02, 3 tokens 1.20 / 1.08 / 1.18 / 1.47.
    parts = 2 if tokens < 4 and outputs % 2 == 0 else 1
    row = torch.arange(neurons, device="cpu") * parts
    part = torch.arange(parts, device="cpu").unsqueeze(1)
    scale = hidden.to(down.dtype).unsqueeze(1).expand(tokens, parts, neurons)
    bags, *_ = torch.embedding_bag(
        down.mT.reshape(neurons * parts, outputs // parts),
        (part + row).expand(tokens, parts, neurons).reshape(-1),
        torch.arange(tokens * parts, device="cpu") * neurons,
        mode=0,
        per_sample_weights=scale.reshape(-1),
    )
    return bags.view(tokens, outputs)


def _sum_in_float32(hidden: Tensor, rows: Tensor, bias: Tensor) -> Tensor:
    """`sum_all_rows` with a bias, which may cancel most of a sum: nothing is rounded to 16 bits before."""
    total = bias.float().expand(hidden.shape[0], -1).contiguous()
    step = max(_SLICE // max(rows.shape[1], 1), 1)
    for first in range(0, rows.shape[0], step):
        part = slice(first, first + step)
        total.addmm_(hidden[:, part].float(), rows[part].float())
    return total.to(rows.dtype)
