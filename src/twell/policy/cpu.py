"""Sparse or dense on a CPU, by the work of a call and by the activations themselves.

Paths differ in the last bit; name one in a `Plan` where results must not depend on the machine.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..crossover import MANY_TOKENS, PROBE_UNION, block_pays, row_limit
from ..kernels.cpu.backward import active_pairs
from ..kernels.cpu.csr import SAMPLED_DOT_AVAILABLE
from ..kernels.cpu.weights import CpuSite, site_of
from ..layer_state import LayerState
from ..problem import AHEAD, Decision, FfnArgs

# What a core does in the dense finish, fp32: it reads 10 GB/s of cold weights (2 Zen 3 cores 15 together, 16
# Sapphire Rapids cores 180) and multiplies at 60 GFLOP/s (139 and 900 together).
_READ_BYTES_PER_CORE = 10e9
_FLOPS_PER_CORE = 60e9
# Look for zeros only if they can save this much of reading weights, or of multiplying. Looking costs 60 us
# for one token and up to 200 for many, where threads fall asleep between products (2 Zen 3 cores).
_WORTH_LOOKING_SECONDS = 0.8e-3
_MANY_WORTH_LOOKING_SECONDS = 1.5e-3

# A few tokens of a chunk are looked at first: at D 256, H 1024, 64 tokens they cost 1% of the dense block,
# all of them 5%.
_SAMPLED_TOKENS = 8
_WHOLE_OVER_SAMPLE = 1.15  # just above the limit the row path loses less than looking has cost

# The backward runs on active pairs up to this share of them. Dense time over its own, fp32, 2 Zen 3 cores,
# D 512 and 1024, H 4 D, 256 and 1,024 tokens, gated and not, `down` stored either way: 10% active 1.12 to
# 1.92, 12.5% 0.99 to 1.64, 15% 0.90 to 1.46, 20% 0.80 to 1.15. fp64: 3% 1.67 to 2.43, 5% 1.11 to 1.34.
_MAX_DENSITY = {torch.float32: 0.1, torch.float64: 0.03}

# It needs this many tokens; more if a weight must be copied first. D 1024, H 4096, not gated, 10% active: 16
# tokens 1.9, but 0.6 with a copy of `down` in and one of its gradient out (13 ms each); 128 with copies 0.7.
_MIN_TOKENS, _MIN_TOKENS_COPYING = 16, 256
_MIN_HIDDEN = 128  # D 64, H 256, 8,192 tokens, 12.5% active: 0.78

_STOCK_TOKENS = 4  # fewer run as stock PyTorch runs them, in their own dtype

_BACKWARD_SAMPLED_SHARE = 32  # looks at one token in 32: about 1% of the dense backward
_BACKWARD_SAMPLED_TOKENS = range(16, 65)
_GOLDEN_RATIO = 0.6180339887498949

_TOO_SMALL = "too little work: looking for zeros would cost more than they save"
_UNITS = "16-bit matrix units multiply densely faster than anything sparse"


def sparse_can_pay(site: CpuSite) -> bool:
    """Whether the products that sparsity may save take longer than looking for zeros.

    Never with 16-bit matrix units: 16 Sapphire Rapids cores, bf16, 2048 tokens, 1% active 0.88x.
    """
    if site.native_16_bit:
        return False
    weights = (2 if site.gated else 1) * site.hidden * site.neurons
    reading = weights * site.dtype.itemsize / (_READ_BYTES_PER_CORE * site.threads)
    multiplying = 2 * site.tokens * weights / (_FLOPS_PER_CORE * site.threads)
    return reading >= _WORTH_LOOKING_SECONDS or multiplying >= _MANY_WORTH_LOOKING_SECONDS


def why_never(site: CpuSite) -> str | None:
    """Why sparsity cannot pay here, however few neurons are active."""
    if sparse_can_pay(site):
        return None
    return _UNITS if site.native_16_bit else _TOO_SMALL


class MeasuredChunks:
    """The cheapest way to finish a chunk of tokens, by limits measured on this machine."""

    __slots__ = ("_site",)

    def __init__(self, site: CpuSite) -> None:
        self._site = site

    def choose(self, activated: Tensor) -> tuple[str, str]:
        tokens, neurons = activated.shape
        sample = _sample(activated, _SAMPLED_TOKENS).bool()
        density = int(torch.count_nonzero(sample)) / max(sample.numel(), 1)
        limit = row_limit(self._site)
        reason = f"{density:.1%} of the neurons active in sampled tokens, rows pay up to {limit:.1%}"
        if density <= limit:
            return "row", reason
        if tokens < MANY_TOKENS or density > PROBE_UNION:  # a union is at least as large
            return "dense", reason
        union = int(torch.count_nonzero(sample.any(dim=0))) / max(neurons, 1)
        if union > PROBE_UNION or not block_pays(self._site):
            return "dense", reason
        return "block", f"{union:.1%} of the neurons active in any sampled token"

    def still_pays(self, path: str, active: Tensor, count: int, block_rows: int) -> bool:
        tokens, neurons = active.shape
        if path == "row":
            return count <= _WHOLE_OVER_SAMPLE * row_limit(self._site) * tokens * neurons
        unions = [active[start : start + block_rows].any(dim=0) for start in range(0, tokens, block_rows)]
        return sum(int(union.sum()) for union in unions) <= PROBE_UNION * neurons * len(unions)


def decide_inference(args: FfnArgs, block_rows: int, layer: LayerState) -> Decision:
    """Decide a call with an automatic plan."""
    site = site_of(args)
    reason = why_never(site)
    if reason is None:
        return _by_chunks(site, block_rows, layer)
    chunks = MeasuredChunks(site)  # tells the backend, should it run this, that nobody named a path
    return Decision("dense", 0, "dense", reason, ahead=AHEAD, chunks=chunks, layer=layer)


def decide_training(args: FfnArgs, block_rows: int, layer: LayerState, hooked: bool) -> Decision:
    """Decide a training step with an automatic plan, from a look at a few tokens.

    A checkpoint that computes the step again gets the same answer, so `hooked` does not matter.
    """
    site = site_of(args)
    if site.low_precision and not site.native_16_bit:
        # Our paths compute in float32, however active the layer: stock 16-bit products take 40 times as long.
        return _by_chunks(site, block_rows, layer)
    with torch.no_grad():
        if _backward_can_pay(args, site) and _is_sparse(args):
            return _by_chunks(site, block_rows, layer)
    reason = _UNITS if site.native_16_bit else "too little work, or too many active neurons"
    return Decision("dense", 0, "dense", reason, layer=layer)


def decide_backward(args: FfnArgs, layer: LayerState | None) -> Decision:
    """On active pairs ("row") or dense; backend "dense" is stock PyTorch in the operands' own dtype."""
    if args.x.shape[0] < _STOCK_TOKENS:
        return Decision("dense", 0, "dense", "too few tokens", layer=layer)
    sparse = _backward_can_pay(args, site_of(args)) and _is_sparse(args)
    reason = "few active pairs" if sparse else "too little work, or too many active pairs"
    return Decision("row" if sparse else "dense", 0, "cpu", reason, layer=layer)


def _by_chunks(site: CpuSite, block_rows: int, layer: LayerState) -> Decision:
    reason = "chunk by chunk, by how many neurons are active"
    return Decision("auto", block_rows, "cpu", reason, chunks=MeasuredChunks(site), layer=layer)


def _backward_can_pay(args: FfnArgs, site: CpuSite) -> bool:
    """Whether active pairs are worth looking for in a block of this kind."""
    tokens, hidden = args.x.shape
    weights = (args.up, args.down.mT) if args.gate is None else (args.up, args.down.mT, args.gate)
    copying = not all(weight.is_contiguous() for weight in weights)
    return (
        SAMPLED_DOT_AVAILABLE
        and tokens >= (_MIN_TOKENS_COPYING if copying else _MIN_TOKENS)
        and hidden >= _MIN_HIDDEN
        and sparse_can_pay(site)
    )


def _is_sparse(args: FfnArgs) -> bool:
    """Whether few enough pairs are active in a sample of the tokens."""
    tokens, neurons = args.x.shape[0], args.up.shape[0]
    least, most = _BACKWARD_SAMPLED_TOKENS.start, _BACKWARD_SAMPLED_TOKENS.stop - 1
    size = min(max(tokens // _BACKWARD_SAMPLED_SHARE, least), most, tokens)
    wide = torch.promote_types(args.x.dtype, torch.float32)
    x = _sample(args.x, size).to(wide)
    bias = None if args.selector_bias is None else args.selector_bias.to(wide)
    with torch.autocast("cpu", enabled=False):
        pre = linear(x, args.selector.to(wide), bias)
    active = active_pairs(pre, args.activation)
    return int(torch.count_nonzero(active)) <= _MAX_DENSITY[wide] * size * neurons


def _sample(rows: Tensor, size: int) -> Tensor:
    """At most `size` rows of [M, K], spread evenly; all of them if there are no more."""
    count = rows.shape[0]
    return rows if count <= size else rows.index_select(0, torch.tensor(_places(count, size), device="cpu"))


@lru_cache(maxsize=1024)
def _places(count: int, size: int) -> tuple[int, ...]:
    """`size` of range(count). A sequence's first tokens wake up to ten times as many neurons as the others,
    and must not come up too often: multiples of the golden ratio have no period that the sequences of a batch
    might share, and do not begin with the first row."""
    return tuple(int(place * _GOLDEN_RATIO % 1 * count) for place in range(1, size + 1))
