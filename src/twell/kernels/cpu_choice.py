"""Which path finishes a chunk of tokens on the CPU, from how many neurons are active.

The limits are densities (active share of a chunk's [tokens, H] entries) below which a path was faster
than the dense finish on 2 Zen 3 cores at D 1024, H 4096, with a margin: being dense near the limit costs
little, being sparse beyond it a lot. Measured speed-ups over stock dense PyTorch, fp32, row path against
dense finish: 1 token at 30% 1.28 / 1.14; 8 tokens at 30% 1.39 / 1.14; 64 tokens at 15% 1.25 / 1.11, at 30%
0.91 / 1.26; 512 tokens at 15% 1.11 / 0.96, at 20% 0.93 / 0.97. bf16, 1 token at 20% 1.01 / 1.00.
"""

from __future__ import annotations

from torch import Tensor

_MANY_TOKENS = 64  # from here on the dense products are bound by arithmetic, no longer by memory

_ROW_LIMIT_MANY = 0.13
_ROW_LIMIT_FEW = 0.25
_ROW_LIMIT_FEW_LOW_PRECISION = 0.13
# down stored [D, H] row by row: gathering a neuron touches one cache line per output feature.
# 1 token at 6%: 1.26 / 1.54; 8 tokens at 6%: 1.08 / 1.13; 64 tokens at 6% 1.31 / 1.41, at 1% 2.05 / 1.42.
_ROW_LIMIT_STRIDED_DOWN = 0.03

# Block path, 64-token blocks: the up and down projections take about twice the dense time per neuron
# (19% of the neurons: 0.39 of the dense time), so it breaks even near 45% of the neurons.
_BLOCK_LIMIT_UNION = 0.30


# What a core does on the dense finish, fp32: reads 10 GB/s of cold weights (2 Zen 3 cores 15 in all, 16
# Sapphire Rapids cores 180), multiplies at 60 GFLOP/s (139 and 900 in all).
_READ_BYTES_PER_CORE = 10e9
_FLOPS_PER_CORE = 60e9
# What the sparse finish costs before its first product: some 15 small operations and the op around them,
# 0.25 ms on the former machine, 0.28 on the latter, where 1 token at D 1024, H 4096 takes 0.26 ms densely.
_SPARSE_OVERHEAD_SECONDS = 0.4e-3


def sparse_can_pay(
    tokens: int, hidden: int, neurons: int, *, itemsize: int, gated: bool, threads: int
) -> bool:
    """Whether the products that sparsity may save take longer than looking for it costs."""
    weights = (2 if gated else 1) * hidden * neurons
    reading = weights * itemsize / (_READ_BYTES_PER_CORE * threads)
    multiplying = 2 * tokens * weights / (_FLOPS_PER_CORE * threads)
    return max(reading, multiplying) >= _SPARSE_OVERHEAD_SECONDS


def row_wins(tokens: int, density: float, *, low_precision: bool, cheap_down_rows: bool) -> bool:
    """Whether the row path is expected to beat the dense finish.

    cheap_down_rows: a neuron's down weights lie together, or will be copied so once per call.
    """
    if not cheap_down_rows:
        limit = _ROW_LIMIT_STRIDED_DOWN
    elif tokens >= _MANY_TOKENS:
        limit = _ROW_LIMIT_MANY
    else:
        limit = _ROW_LIMIT_FEW_LOW_PRECISION if low_precision else _ROW_LIMIT_FEW
    return density <= limit


def block_wins(active: Tensor, density: float, block_rows: int) -> bool:
    """Whether the tokens of each block share so many neurons that the block path beats dense.

    active: bool [m, H].
    """
    tokens, neurons = active.shape
    if tokens < _MANY_TOKENS or density > _BLOCK_LIMIT_UNION:
        return False  # a block's union is at least as large as its mean density
    unions = [active[start : start + block_rows].any(dim=0) for start in range(0, tokens, block_rows)]
    mean_union = sum(int(union.sum()) for union in unions) / len(unions)
    return mean_union <= _BLOCK_LIMIT_UNION * neurons
