"""The GPU backend: which kernels run a call."""

from __future__ import annotations

import torch

from ..._checks import reject
from ..._ran import note_path
from ..args import Decision, FfnArgs, FfnOutput
from ..dense import dense_forward
from .blocks import BlockRun, run_blocks
from .few_tokens import run_few
from .operands import Operands, prepare
from .sizes import FEW_TOKENS

_BLOCK_ROWS = (0, 64, 128)
_INTERPRETED_ROWS = (0, 16, 32, 64, 128)  # small blocks keep interpreted tests short


def gpu_forward(args: FfnArgs, decision: Decision, record: bool) -> FfnOutput:
    """Run the block on the GPU; never waits for the device.

    decision: "row", "block" or "dense"; the block path has a two-launch form for few tokens. block_rows: 64
    or 128; 0 means the default.
    """
    if args.x.is_cuda and args.x.device.index != torch.cuda.current_device():
        with torch.cuda.device(args.x.device):  # Triton launches on the current device
            return gpu_forward(args, decision, record)
    if decision.path == "dense":
        return dense_forward(args, record, reason=decision.reason)
    check_block_rows(args, decision.block_rows)
    if decision.path == "row":
        return _row(args, decision)
    return _block(args, decision, record)


def check_block_rows(args: FfnArgs, block_rows: int) -> None:
    accepted = _BLOCK_ROWS if args.x.is_cuda else _INTERPRETED_ROWS
    if block_rows not in accepted:
        reject("block_rows", block_rows, f"one of {accepted} on a GPU (0: the default)")


def _block(args: FfnArgs, decision: Decision, record: bool) -> FfnOutput:
    operands = prepare(args)
    few = operands.tokens <= FEW_TOKENS and not record and decision.block_rows == 0
    note_path("few" if few else "block", args.x, operands.neurons, reason=decision.reason)
    if few:
        y, counts, slots = run_few(operands)
        output = FfnOutput(y)
    else:
        run = run_blocks(operands, decision.block_rows, record)
        output, counts, slots = output_of(run, operands), run.counts, run.counts.numel() * operands.neurons
    if decision.read:
        decision.reading.take(counts, slots)
    return output


def output_of(run: BlockRun, operands: Operands) -> FfnOutput:
    if run.recorded is None:
        return FfnOutput(run.y)
    total = torch.stack([sums.sum() for sums in run.recorded.sums]).sum()
    return FfnOutput(run.y, (total / operands.tokens).float(), run.recorded.firing)


def _row(args: FfnArgs, decision: Decision) -> FfnOutput:
    from .rows import run_rows

    note_path("row", args.x, args.up.shape[0], reason=decision.reason)
    return FfnOutput(run_rows(prepare(args)))
