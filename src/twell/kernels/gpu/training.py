"""Training on the GPU: a sparse forward that keeps which neurons were active, and the backward from that.

Nothing else is saved: lists of active neurons take 4 bytes per neuron and block of tokens, 3 MB for 16,384
tokens of 5,632 neurons. For the listed neurons the backward computes activations again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..._ran import note_path
from ..args import Decision, Existing, FfnArgs, FfnOutput, Gradients, Saved
from ..dense import dense_backward, dense_forward
from .backward.run import gpu_backward
from .backward.stages import Active
from .blocks import run_blocks
from .forward import check_block_rows, output_of, tapes_of
from .operands import prepare, readable
from .sizes import DEFAULT_ROWS, list_sizes

# The backward has room for a third of the neurons at once, in whole chunks; above, it takes rounds.
_CROWDED = 0.3


def train_forward(args: FfnArgs, decision: Decision, record: bool) -> tuple[FfnOutput, Saved]:
    """The block, and the active neurons of each of its blocks of tokens; never waits for the device."""
    if args.x.is_cuda and args.x.device.index != torch.cuda.current_device():
        with torch.cuda.device(args.x.device):  # Triton launches on the current device
            return train_forward(args, decision, record)
    check_block_rows(args, decision.block_rows)
    if decision.path == "dense":
        return _dense(args, decision, record)
    operands = prepare(args)
    note_path("block", args.x, operands.neurons, reason=decision.reason)
    rows = decision.block_rows or DEFAULT_ROWS
    run = run_blocks(operands, rows, record, keep=True, tapes=tapes_of(decision))
    if decision.read:
        decision.reading.take(run.counts, run.counts.numel() * operands.neurons)
    return output_of(run, operands), Saved(run.lists, run.counts)


def train_backward(
    args: FfnArgs,
    saved: Saved,
    decision: Decision,
    grad_y: Tensor,
    grad_l1: Tensor | None,
    needed: FfnArgs,
    into: Existing | None = None,
) -> Gradients:
    """into: gradients of weights to add to, if the kernels run; None is returned in their place then."""
    note_path(decision.path, args.x, args.up.shape[0], "backward", decision.reason)
    if decision.path == "dense":
        return dense_backward(args, grad_y, grad_l1, needed)
    share = None if decision.reading is None else decision.reading.share
    crowded = None if share is None else share > _CROWDED
    # Hooks may hand back copies that are not aligned as the kernels expect.
    active = Active(readable(saved.lists), readable(saved.counts), decision.block_rows or DEFAULT_ROWS)
    return gpu_backward(args, active, grad_y, grad_l1, needed, crowded, into, tapes_of(decision))


def _dense(args: FfnArgs, decision: Decision, record: bool) -> tuple[FfnOutput, Saved]:
    """Dense inside the op. Every neuron is listed, so that a backward which does not know is exact too."""
    output = dense_forward(args, record, reason=decision.reason)
    neurons = args.up.shape[0]
    size, blocks = list_sizes(args.x.shape[0], neurons, decision.block_rows)
    lists = torch.zeros(size, dtype=torch.int32, device=args.x.device)
    if blocks and neurons:
        every = torch.arange(neurons, dtype=torch.int32, device=args.x.device)
        lists[: blocks * neurons].view(blocks, neurons).copy_(every.expand(blocks, neurons))
    counts = torch.full((blocks,), neurons, dtype=torch.int32, device=args.x.device)
    return output, Saved(lists, counts)
