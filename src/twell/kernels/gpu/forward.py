"""The GPU backend: which kernels run a call."""

from __future__ import annotations

import torch

from ..._log import log_once
from ..args import FfnArgs, FfnOutput
from ..dense import dense_forward
from . import monitor
from .blocks import run_blocks
from .few_tokens import MOST_TOKENS, run_few
from .limits import share_limit
from .operands import is_neuron_major, prepare
from .target import target_of

_INDEX_LIMIT = 2**31  # kernels index weights with 32 bits
_COPY_TOKENS = 4096  # from here on, a transposed copy of `down` costs little beside the products


def gpu_forward(args: FfnArgs, path: str, block_rows: int, record: bool) -> FfnOutput:
    """Run the block on the GPU; never waits for the device.

    path:        "row", "block" and "dense" are taken as they are; "auto" takes the block path (for few tokens
                 its two-launch form) unless dense is known to be faster.
    block_rows:  tokens per block, 64 or 128 (16 or more under the interpreter); 0 means the default.
    """
    if args.x.is_cuda and args.x.device.index != torch.cuda.current_device():
        with torch.cuda.device(args.x.device):  # Triton launches on the current device
            return gpu_forward(args, path, block_rows, record)
    tokens, neurons, outputs = args.x.shape[0], args.up.shape[0], args.down.shape[0]
    if min(tokens, neurons, outputs) == 0:
        return dense_forward(args, record)
    if neurons * max(outputs, args.x.shape[1]) >= _INDEX_LIMIT:
        log_once(f"running dense: H x D = {neurons} x {max(outputs, args.x.shape[1])} passes 32-bit indices")
        return dense_forward(args, record)
    if path == "dense":
        return dense_forward(args, record)
    if path == "row":
        return _row(args, record)
    if path == "auto":
        return _auto(args, block_rows, record)
    return _block(args, block_rows, record, None)


def _auto(args: FfnArgs, block_rows: int, record: bool) -> FfnOutput:
    tokens, device = args.x.shape[0], args.x.device
    if tokens < _COPY_TOKENS and not is_neuron_major(args.down):
        log_once(
            f"running dense for fewer than {_COPY_TOKENS} tokens: `down` is not neuron-major "
            "(down.mT contiguous), and transposing it would cost more than the sparsity saves"
        )
        return dense_forward(args, record)
    target = target_of(device)
    limit = share_limit(target.name, target.hopper, tokens)
    if limit >= 1:
        return _block(args, block_rows, record, None)
    if limit <= 0:
        return dense_forward(args, record)
    bucket = 1 << (tokens - 1).bit_length()
    key = (device.index, args.selector.data_ptr(), tuple(args.selector.shape), bucket)
    if torch.cuda.is_current_stream_capturing():  # nothing may be asked of the device now
        share = monitor.last_share(key)
        sparse, reading = share is None or share <= limit, False
    else:
        share, reading = monitor.known_share(key), monitor.wants_reading(key)
        # Launched one by one, two kernels of ours take the host longer than dense takes the GPU for few
        # tokens; inside a CUDA graph launches are free. So eager calls of few tokens only take readings.
        sparse = reading or (tokens > MOST_TOKENS and share is not None and share <= limit)
    if not sparse:
        return dense_forward(args, record)
    return _block(args, block_rows, record, key if reading else None)


def _block(args: FfnArgs, block_rows: int, record: bool, reading_key) -> FfnOutput:
    operands = prepare(args)
    if operands.tokens <= MOST_TOKENS and not record and block_rows == 0:
        y, counts, slots = run_few(operands)
        recorded = None
    else:
        y, recorded, counts, slots = run_blocks(operands, block_rows, record)
    if reading_key is not None:
        monitor.read_later(reading_key, counts, slots)
    if recorded is None:
        return FfnOutput(y)
    total = torch.stack([sums.sum() for sums in recorded.sums]).sum()
    return FfnOutput(y, total / operands.tokens, recorded.firing)


def _row(args: FfnArgs, record: bool) -> FfnOutput:
    from .rows import run_rows

    if record:  # statistics come from the block kernels' workspace
        return _block(args, 0, record, None)
    return FfnOutput(run_rows(prepare(args)))
