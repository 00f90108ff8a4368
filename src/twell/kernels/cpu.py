"""The CPU backend: row and block execution with ordinary torch ops, no build step.

Tokens are taken in chunks. Each chunk runs the selector (gate) projection densely, looks at how many
neurons are active, and finishes on the cheapest path:

    row     one dot product per active (token, neuron) pair for up (a sampled matrix product), one
            weighted sum of weight rows per token for down (an embedding bag);
    block   the union of active neurons per block of tokens, dense products over gathered weight rows;
    dense   the remaining two projections as they are.

The decision costs one pass over a boolean mask and nothing else: a host needs no synchronisation to
look at its own results. Neurons that no token of a chunk (row: the token itself) activates are skipped,
so a NaN or Inf in *their* weights does not reach the output; one that meets an active neuron does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .args import FfnArgs, FfnOutput
from .cpu_choice import block_wins
from .cpu_weights import WeightViews
from .csr import RowPattern, sampled_dot, weighted_row_sum

# D 1024, H 4096, fp32, 2 Zen 3 cores, 2048 tokens, row path: 128 -> 185 ms, 256 -> 160, 512 -> 145,
# 1024 -> 169, 2048 -> 161. 512 tokens keep the chunk's activations (8 MiB) inside the L3 cache.
CHUNK_TOKENS = 512

# Same shape, block path: 16 -> 144 ms, 32 -> 146, 64 -> 122, 128 -> 133.
DEFAULT_BLOCK_ROWS = 64


def cpu_forward(args: FfnArgs, path: str, block_rows: int, record: bool) -> FfnOutput:
    """Run the block on the CPU.

    path:        "auto" decides per chunk; "row", "block" and "dense" are taken as they are.
    block_rows:  tokens per block of the block path; 0 means the default.
    """
    tokens, neurons = args.x.shape[0], args.up.shape[0]
    weights = WeightViews(args)
    stats = _Stats(neurons, args.x.dtype) if record else None
    if tokens == 1 and path in ("auto", "row"):  # decode
        return _finish(_single_token(args.x, path, weights, stats), stats, tokens)
    block_rows = block_rows or DEFAULT_BLOCK_ROWS
    chunk = max(CHUNK_TOKENS, block_rows)
    y = torch.empty(tokens, args.down.shape[0], dtype=args.x.dtype)
    for start in range(0, tokens, chunk):
        x = args.x[start : start + chunk]
        activated = weights.activate_selector(x)
        active = activated != 0
        count = int(torch.count_nonzero(active))
        chosen = path if path != "auto" else _choose(active, count, block_rows, weights)
        if chosen == "row":
            out = _row_chunk(x, activated, active, count, weights, stats)
        elif chosen == "block":
            out = _block_chunk(x, activated, active, block_rows, weights, stats)
        else:
            out = _dense_chunk(x, activated, weights, stats)
        y[start : start + chunk] = out
    return _finish(y, stats, tokens)


def _choose(active: Tensor, count: int, block_rows: int, weights: WeightViews) -> str:
    tokens, neurons = active.shape
    if not weights.sparse_can_pay():
        return "dense"
    density = count / max(tokens * neurons, 1)
    if weights.row_wins(tokens, density):
        return "row"
    return "block" if block_wins(active, density, block_rows) else "dense"


def _finish(y: Tensor, stats: _Stats | None, tokens: int) -> FfnOutput:
    if stats is None:
        return FfnOutput(y)
    return FfnOutput(y, stats.l1 / max(tokens, 1), stats.firing)


class _Stats:
    """Running sums of the recorded statistics."""

    def __init__(self, neurons: int, dtype: torch.dtype) -> None:
        self.l1 = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32))
        self.firing = torch.zeros(neurons, dtype=torch.int64)

    def add_hidden(self, hidden: Tensor) -> None:
        self.l1 += hidden.abs().sum(dtype=self.l1.dtype)


def _single_token(x: Tensor, path: str, weights: WeightViews, stats: _Stats | None) -> Tensor:
    """The row path for one token: no mask, no pattern, as few operations as it takes.

    At D 1024, H 4096 an operation costs about 15 us between two cold matrix products, a sixth of
    what the whole sparse part does.
    """
    activated = weights.activate_selector(x)
    if path == "auto" and not weights.sparse_can_pay():
        return _dense_chunk(x, activated, weights, stats)
    neurons = activated[0].nonzero().squeeze(1)
    if path == "auto" and not weights.row_wins(1, neurons.numel() / max(activated.shape[1], 1)):
        return _dense_chunk(x, activated, weights, stats)
    hidden = activated[0].index_select(0, neurons)
    if weights.gated:
        hidden *= weights.add_up_bias(torch.mv(weights.gather_up(neurons), x[0]), neurons)
    if stats is not None:
        stats.add_hidden(hidden)
        stats.firing[neurons] += 1
    return weights.finish(weights.single_down(hidden, neurons)).unsqueeze(0)


def _row_chunk(
    x: Tensor,
    activated: Tensor,
    active: Tensor,
    count: int,
    weights: WeightViews,
    stats: _Stats | None,
) -> Tensor:
    pattern = RowPattern.of(active, count)
    hidden = activated.view(-1).index_select(0, pattern.flat).to(weights.wide_dtype)
    if weights.gated:
        up, columns = weights.up_rows(pattern)
        dots = sampled_dot(x.to(weights.wide_dtype), up, pattern, columns)
        hidden *= weights.add_up_bias(dots, pattern.columns)
    down, columns = weights.down_rows(pattern)
    if stats is not None:
        stats.add_hidden(hidden)
        stats.firing += pattern.firing()
    return weights.finish(weighted_row_sum(down, hidden, pattern, columns))


def _block_chunk(
    x: Tensor,
    activated: Tensor,
    active: Tensor,
    block_rows: int,
    weights: WeightViews,
    stats: _Stats | None,
) -> Tensor:
    wide = weights.wide_dtype
    outputs = []
    for start in range(0, x.shape[0], block_rows):
        rows = slice(start, start + block_rows)
        union = active[rows].any(dim=0).nonzero().squeeze(1)
        hidden = activated[rows].index_select(1, union).to(wide)
        if weights.gated:
            up = weights.gather_up(union).to(wide)
            hidden *= weights.add_up_bias(x[rows].to(wide) @ up.mT, union)
        outputs.append(weights.finish(hidden @ weights.gather_down(union).to(wide)))
        if stats is not None:
            stats.add_hidden(hidden)
    if stats is not None:
        stats.firing += active.sum(dim=0)
    return torch.cat(outputs)


def _dense_chunk(x: Tensor, activated: Tensor, weights: WeightViews, stats: _Stats | None) -> Tensor:
    if stats is not None:
        stats.firing += (activated != 0).sum(dim=0)
    hidden = activated
    if weights.gated:
        hidden = hidden.mul_(weights.project_up(x))
    if stats is not None:
        stats.add_hidden(hidden)
    return weights.finish(weights.project_down(hidden))
