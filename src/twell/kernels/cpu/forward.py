"""The forward pass on the CPU.

Tokens run in chunks. Each chunk runs the selector (gate) projection densely, looks at how many neurons are
active, and finishes on the cheapest path:

    row     the paper's: one dot product per active (token, neuron) pair for up (a sampled matrix product),
            one weighted sum of weight rows per token for down (an embedding bag);
    block   the union of active neurons per block of tokens, dense products over gathered weight rows;
    dense   the remaining two projections as they are.

The decision costs one pass over a boolean mask: a host need not synchronise to look at its own results.
Neurons that no token of a chunk (row: the token itself) activates are skipped, so a NaN or Inf in *their*
weights does not reach the output; one that meets an active neuron does.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..._log import note_path
from ...problem import Decision, FfnArgs, FfnOutput, Saved
from ..dense import count_rows
from .csr import RowPattern, RowSums, sampled_dot
from .weights import WeightViews

# D 1024, H 4096, fp32, 2 Zen 3 cores, 2048 tokens, row path: 128 -> 185 ms, 256 -> 160, 512 -> 145,
# 1024 -> 169, 2048 -> 161. 512 tokens keep the chunk's activations (8 MiB) inside the L3 cache; more
# cores have more of it and need larger products.
CHUNK_TOKENS_PER_THREAD = 256
CHUNK_TOKENS = range(512, 4097)

# Same shape, block path: 16 -> 144 ms, 32 -> 146, 64 -> 122, 128 -> 133.
DEFAULT_BLOCK_ROWS = 64


def cpu_forward(args: FfnArgs, decision: Decision, record: bool) -> FfnOutput:
    """Run the block on the CPU.

    decision: automatic if it has `chunks`. Path "auto" lets them choose chunk by chunk, and leaves the rest
    dense once a chunk was not sparse enough; "row", "block" and "dense" run as named.
    """
    path = decision.path
    tokens, neurons = args.x.shape[0], args.up.shape[0]
    weights = WeightViews(args, tuned=decision.chunks is not None)
    stats = Stats(neurons, args.x.dtype) if record else None
    if tokens == 0:
        path = "dense"
    if tokens == 1 and path in ("auto", "row"):
        y = _single_token(args.x, path, decision, weights, stats)
    else:
        y = _chunks(args.x, path, decision, weights, stats)
    if stats is None:
        return FfnOutput(y)
    return FfnOutput(y, stats.l1(tokens), stats.firing)


def cpu_train_forward(args: FfnArgs, decision: Decision, record: bool) -> tuple[FfnOutput, Saved]:
    """`cpu_forward`, with nothing saved: the backward finds the active pairs by itself."""
    empty = (torch.empty(0, dtype=torch.int32, device=args.x.device) for _ in range(2))
    return cpu_forward(args, decision, record), Saved(*empty)


def _single_token(
    x: Tensor, path: str, decision: Decision, weights: WeightViews, stats: Stats | None
) -> Tensor:
    activated = weights.activate_selector(x)
    reason = decision.reason
    if path == "auto":
        path, reason = decision.chunks.choose(activated)
    _note(decision, path, reason, x, weights)
    if path == "dense":
        return finish_dense(x, activated, weights, stats)
    neurons = activated[0].nonzero().squeeze(1)
    return finish_single_row(x, activated, neurons, weights, stats)


def _chunks(x: Tensor, path: str, decision: Decision, weights: WeightViews, stats: Stats | None) -> Tensor:
    tokens, chunk = x.shape[0], max(_chunk_tokens(), decision.block_rows or DEFAULT_BLOCK_ROWS)
    outputs, start, reason = [], 0, decision.reason
    while start < tokens or not outputs:  # no tokens still make one chunk
        stop = tokens if path == "dense" else min(start + chunk, tokens)
        y, ran, reason = _finish_chunk(x[start:stop], path, reason, decision, weights, stats)
        if ran == "dense":
            path = "dense"  # also for the remaining tokens
        outputs.append(y)
        start = stop
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _finish_chunk(
    x: Tensor, path: str, reason: str, decision: Decision, weights: WeightViews, stats: Stats | None
) -> tuple[Tensor, str, str]:
    """y [m, D] of one chunk, the path it took, and why."""
    activated = weights.activate_selector(x)
    block_rows = decision.block_rows or DEFAULT_BLOCK_ROWS
    automatic = path == "auto"
    if automatic:
        path, reason = decision.chunks.choose(activated)
    if path != "dense":
        active = activated.bool()
        count = int(torch.count_nonzero(active))
        if automatic and not decision.chunks.still_pays(path, active, count, block_rows):
            path, reason = "dense", f"{count / max(active.numel(), 1):.1%} of all pairs active"
    _note(decision, path, reason, x, weights)
    if path == "row":
        y = finish_row(x, activated, active, count, weights, stats)
    elif path == "block":
        y = finish_block(x, activated, active, block_rows, weights, stats)
    else:
        y = finish_dense(x, activated, weights, stats)
    return y, path, reason


def _note(decision: Decision, path: str, reason: str, x: Tensor, weights: WeightViews) -> None:
    note_path(path, x, weights.site.neurons, reason=reason)
    if decision.path == "auto" and decision.layer is not None:
        decision.layer.note("forward", path, reason)


def _chunk_tokens() -> int:
    wanted = CHUNK_TOKENS_PER_THREAD * torch.get_num_threads()
    return min(max(wanted, CHUNK_TOKENS.start), CHUNK_TOKENS.stop - 1)


# The finishes take x [m, D] and activated [m, H] and return y [m, D]; `stats` gathers what is recorded.


class Stats:
    """Running sums of the recorded statistics."""

    def __init__(self, neurons: int, dtype: torch.dtype) -> None:
        self._dtype = torch.promote_types(dtype, torch.float32)
        self._sums: list[float] = []
        self.firing = torch.zeros(neurons, dtype=torch.int64, device="cpu")

    def add_hidden(self, hidden: Tensor) -> None:
        self._sums.append(hidden.abs().sum(dtype=self._dtype).item())

    def l1(self, tokens: int) -> Tensor:
        """[]: the sum of what was added, per token."""
        try:
            total = math.fsum(self._sums)
        except OverflowError:
            total = math.inf
        return torch.tensor(total / max(tokens, 1), dtype=self._dtype, device="cpu")


def finish_single_row(
    x: Tensor, activated: Tensor, neurons: Tensor, weights: WeightViews, stats: Stats | None
) -> Tensor:
    """The row path for one token: no mask, no pattern, as few operations as possible.

    neurons: int64 [nnz], the active ones.
    At D 1024, H 4096 an operation between two cold matrix products costs about 15 us, a sixth of the whole
    sparse part.
    """
    wide = weights.wide_dtype
    hidden = activated[0].index_select(0, neurons).to(wide)
    if weights.gated:
        up = torch.mv(weights.gather_up(neurons).to(wide), x[0].to(wide))
        hidden *= weights.up_factor(up, neurons)
    if stats is not None:
        stats.add_hidden(hidden)
        stats.firing[neurons] += 1
    return weights.finish(weights.single_down(hidden, neurons)).unsqueeze(0)


def finish_row(
    x: Tensor, activated: Tensor, active: Tensor, count: int, weights: WeightViews, stats: Stats | None
) -> Tensor:
    pattern = RowPattern.of(active, count)
    hidden = activated.view(-1).index_select(0, pattern.flat).to(weights.wide_dtype)
    if weights.gated:
        up, columns = weights.up_rows(pattern)
        dots = sampled_dot(x.to(weights.wide_dtype), up, pattern, columns)
        hidden *= weights.up_factor(dots, pattern.columns)
    down, columns = weights.down_rows(pattern)
    if stats is not None:
        stats.add_hidden(hidden)
        stats.firing += pattern.firing()
    return weights.finish(RowSums(pattern.offsets).of(down, columns, hidden))


def finish_block(
    x: Tensor, activated: Tensor, active: Tensor, block_rows: int, weights: WeightViews, stats: Stats | None
) -> Tensor:
    wide = weights.wide_dtype
    outputs = []
    for start in range(0, x.shape[0], block_rows):
        rows = slice(start, start + block_rows)
        union = active[rows].any(dim=0).nonzero().squeeze(1)
        hidden = activated[rows].index_select(1, union).to(wide)
        if weights.gated:
            up = weights.gather_up(union).to(wide)
            hidden *= weights.up_factor(x[rows].to(wide) @ up.mT, union)
        outputs.append(weights.finish(hidden @ weights.gather_down(union).to(wide)))
        if stats is not None:
            stats.add_hidden(hidden)
    if stats is not None:
        stats.firing += count_rows(active)
    return torch.cat(outputs)


def finish_dense(x: Tensor, activated: Tensor, weights: WeightViews, stats: Stats | None) -> Tensor:
    if stats is not None:
        stats.firing += count_rows(activated.bool())
    hidden = activated
    if weights.gated:
        hidden = hidden.mul_(weights.project_up(x))
    if stats is not None:
        stats.add_hidden(hidden)
    return weights.project_down(hidden)
