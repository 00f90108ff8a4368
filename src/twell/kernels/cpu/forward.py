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

import torch
from torch import Tensor

from ..._log import note_path
from ...problem import Decision, FfnArgs, FfnOutput, Saved
from .paths import Stats, finish_block, finish_dense, finish_row, finish_single_row
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
    """The same, and nothing saved: the backward finds the active pairs by itself."""
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
    outputs, start = [], 0
    while start < tokens or not outputs:  # no tokens still make one chunk
        stop = tokens if path == "dense" else min(start + chunk, tokens)
        y, ran = _finish_chunk(x[start:stop], path, decision, weights, stats)
        if ran == "dense":
            path = "dense"  # for the remaining tokens, too
        outputs.append(y)
        start = stop
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _finish_chunk(
    x: Tensor, path: str, decision: Decision, weights: WeightViews, stats: Stats | None
) -> tuple[Tensor, str]:
    """y [m, D] of one chunk, and the path it took."""
    activated = weights.activate_selector(x)
    block_rows = decision.block_rows or DEFAULT_BLOCK_ROWS
    automatic, reason = path == "auto", decision.reason
    if automatic:
        path, reason = decision.chunks.choose(activated)
    if path != "dense":
        active = activated.bool()
        count = int(torch.count_nonzero(active))
        if automatic and not decision.chunks.still_pays(path, active, count, block_rows):
            path, reason = "dense", f"{count / max(active.numel(), 1):.1%} of all pairs active"
    _note(decision, path, reason, x, weights)
    if path == "row":
        return finish_row(x, activated, active, count, weights, stats), path
    if path == "block":
        return finish_block(x, activated, active, block_rows, weights, stats), path
    return finish_dense(x, activated, weights, stats), path


def _note(decision: Decision, path: str, reason: str, x: Tensor, weights: WeightViews) -> None:
    note_path(path, x, weights.site.neurons, reason=reason)
    if decision.path == "auto" and decision.layer is not None:
        decision.layer.note("forward", path, reason)


def _chunk_tokens() -> int:
    wanted = CHUNK_TOKENS_PER_THREAD * torch.get_num_threads()
    return min(max(wanted, CHUNK_TOKENS.start), CHUNK_TOKENS.stop - 1)
