"""The GPU backend: which kernels run a call."""

from __future__ import annotations

import torch

from ..._checks import reject
from ..._log import log_once
from ..._ran import note_path
from ..args import FfnArgs, FfnOutput
from ..dense import dense_forward
from . import monitor
from .blocks import BlockRun, run_blocks
from .choice import FEW_TOKENS, choose, layer_key
from .few_tokens import run_few
from .operands import Operands, prepare
from .sizes import DEFAULT_ROWS

_BLOCK_ROWS = (0, 64, 128)
_INTERPRETED_ROWS = (0, 16, 32, 64, 128)  # small blocks keep interpreted tests short
_INDEX_LIMIT = 2**31  # kernels index weights, and a block's rows of neurons or features, with 32 bits


def gpu_forward(args: FfnArgs, path: str, block_rows: int, record: bool) -> FfnOutput:
    """Run the block on the GPU; never waits for the device.

    path:        "row", "block" and "dense" are taken as they are; "auto" takes the block path (for few tokens
                 its two-launch form) unless dense is known to be faster.
    block_rows:  tokens per block: 64 or 128; 0 means the default.
    """
    if args.x.is_cuda and args.x.device.index != torch.cuda.current_device():
        with torch.cuda.device(args.x.device):  # Triton launches on the current device
            return gpu_forward(args, path, block_rows, record)
    if path == "dense" or not indexable(args):
        return dense_forward(args, record)
    check_block_rows(args, block_rows)
    if path == "row":
        return _row(args, record)
    if path == "auto":
        return _auto(args, block_rows, record)
    return _block(args, block_rows, record, None)


def indexable(args: FfnArgs) -> bool:
    """Whether there is anything to compute, and the kernels' indices reach."""
    tokens, neurons, outputs = args.x.shape[0], args.up.shape[0], args.down.shape[0]
    if min(tokens, neurons, outputs) == 0:
        return False
    wide = max(outputs, args.x.shape[1])
    if max(neurons * wide, max(neurons, wide) * DEFAULT_ROWS) >= _INDEX_LIMIT:
        log_once(f"running dense: H x D = {neurons} x {wide} passes 32-bit indices")
        return False
    return True


def check_block_rows(args: FfnArgs, block_rows: int) -> None:
    accepted = _BLOCK_ROWS if args.x.is_cuda else _INTERPRETED_ROWS
    if block_rows not in accepted:
        reject("block_rows", block_rows, f"one of {accepted} on a GPU (0: the default)")


def _auto(args: FfnArgs, block_rows: int, record: bool) -> FfnOutput:
    sparse, reading_key = choose(args)
    if not sparse:
        return dense_forward(args, record)
    if reading_key is None and not torch.cuda.is_current_stream_capturing():
        monitor.note_run(layer_key(args))
    return _block(args, block_rows, record, reading_key)


def _block(args: FfnArgs, block_rows: int, record: bool, reading_key) -> FfnOutput:
    operands = prepare(args)
    few = operands.tokens <= FEW_TOKENS and not record and block_rows == 0
    note_path("few" if few else "block", args.x, operands.neurons)
    if few:
        y, counts, slots = run_few(operands)
        output = FfnOutput(y)
    else:
        run = run_blocks(operands, block_rows, record)
        output, counts, slots = output_of(run, operands), run.counts, run.counts.numel() * operands.neurons
    if reading_key is not None:
        monitor.note_run(reading_key, counts, slots)
    return output


def output_of(run: BlockRun, operands: Operands) -> FfnOutput:
    if run.recorded is None:
        return FfnOutput(run.y)
    total = torch.stack([sums.sum() for sums in run.recorded.sums]).sum()
    return FfnOutput(run.y, (total / operands.tokens).float(), run.recorded.firing)


def _row(args: FfnArgs, record: bool) -> FfnOutput:
    from .rows import run_rows

    reason = None
    if args.x.dtype == torch.float32:
        reason = "its words hold 16-bit values, not float32"
    elif record:
        reason = "statistics come from the block path"
    if reason is not None:
        log_once(f"running the block path instead of 'row': {reason}")
        return _block(args, 0, record, None)
    note_path("row", args.x, args.up.shape[0])
    return FfnOutput(run_rows(prepare(args)))
