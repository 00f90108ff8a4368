"""Training on the GPU: a sparse forward that keeps which neurons were active, and the backward from that.

Nothing else is saved: lists of active neurons take 4 bytes per neuron and block of tokens, 3 MB for 16,384
tokens of 5,632 neurons. For the listed neurons the backward computes activations again.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

import torch
from torch import Tensor

from ..._log import log_once
from ..._ran import note_path
from ..args import RUN, Existing, FfnArgs, FfnOutput, Gradients, Saved, Skip, source_of
from ..dense import dense_backward, dense_forward
from ..switch import trains_sparse
from . import monitor
from .backward.run import gpu_backward
from .backward.stages import Active, fits
from .blocks import run_blocks
from .choice import UNREAD, layer_key, operations
from .forward import check_block_rows, indexable, output_of
from .operands import element_bytes, prepare, readable
from .sizes import DEFAULT_ROWS, list_sizes
from .target import target_of

# Shares of active neurons (of the union of a block) up to which a step is faster sparse: on an H200 (D 2048,
# H 5632, 16,384 tokens) 1.33x at 0.49, 0.8x with all active.
_ENTER, _LEAVE = 0.6, 0.65

# The backward has room for a third of the neurons at once, in whole chunks; above, it takes rounds.
_CROWDED = 0.3

# Operations of a forward pass below which steps stay dense, 7,200 tokens at D 2048, H 5632. Measured on both
# sides only: 4,096 tokens 0.5x to 0.67x (the host launches longer than dense runs), 16,384 from 2.2x to 3.6x.
_OPERATIONS = 5e11

# By the address of a call's lists, the key of its layer, None if it ran dense after all. Only a matter of
# speed: see `_dense`.
_ran: dict[int, Hashable | None] = {}
_MOST_CALLS = 4096


def skips_step(args: FfnArgs, hooked: bool = False) -> Skip:
    """Whether an automatic plan should leave this step, and how many more, to dense PyTorch; counts it.

    Now and then a step runs sparse whatever is known, to be read.
    hooked: whether someone watches what is saved for the backward. A checkpoint does, and wants the same when
            the block is computed again; so the op runs, decides for itself, and saves the same either way.
    """
    if not _can_pay(args):
        return Skip(True, UNREAD, lambda calls: None)
    if hooked:
        return RUN
    key = _key(args)
    if torch.cuda.is_current_stream_capturing():
        return RUN if _sparse(key) else Skip(dense=True)
    if monitor.wants_reading(key, source_of(args.selector)) or _sparse(key):
        return RUN
    return Skip(True, monitor.calls_before_reading(key), partial(monitor.count_calls, key))


def train_forward(args: FfnArgs, path: str, block_rows: int, record: bool) -> tuple[FfnOutput, Saved]:
    """The block, and the active neurons of each of its blocks of tokens; never waits for the device.

    path: "auto" decides; "dense" is taken as it is; everything else runs the block path.
    """
    if args.x.is_cuda and args.x.device.index != torch.cuda.current_device():
        with torch.cuda.device(args.x.device):  # Triton launches on the current device
            return train_forward(args, path, block_rows, record)
    check_block_rows(args, block_rows)
    rows = block_rows or DEFAULT_ROWS
    if path == "dense" or not _trainable(args, rows) or (path == "auto" and skips_step(args).dense):
        return _dense(args, block_rows, record)
    if path == "row":
        log_once("training on the block path instead of 'row', which has no backward of its own")
    operands = prepare(args)
    note_path("block", args.x, operands.neurons)
    run = run_blocks(operands, rows, record, keep=True)
    key = _key(args)
    if monitor.takes_due(key) and not torch.cuda.is_current_stream_capturing():
        monitor.note_run(key, run.counts, run.counts.numel() * operands.neurons)
    _remember(run.lists, key)
    return output_of(run, operands), Saved(run.lists, run.counts)


def train_backward(
    args: FfnArgs,
    saved: Saved,
    block_rows: int,
    grad_y: Tensor,
    grad_l1: Tensor | None,
    needed: FfnArgs,
    into: Existing | None = None,
) -> Gradients:
    """into: gradients of weights to add to, if the kernels run; None is returned in their place then."""
    rows = block_rows or DEFAULT_ROWS
    key = _ran.get(saved.lists.data_ptr(), _key(args))
    dense = not _trainable(args, rows) or key is None
    note_path("dense" if dense else "block", args.x, args.up.shape[0], "backward")
    if dense:
        return dense_backward(args, grad_y, grad_l1, needed)
    share = monitor.known_share(key)
    crowded = None if share is None else share > _CROWDED
    # Hooks may hand back copies that are not aligned as the kernels expect.
    active = Active(readable(saved.lists), readable(saved.counts), rows)
    return gpu_backward(args, active, grad_y, grad_l1, needed, crowded, into)


def _dense(args: FfnArgs, block_rows: int, record: bool) -> tuple[FfnOutput, Saved]:
    """Dense inside the op. Every neuron is listed, so that a backward which does not know is exact too."""
    output = dense_forward(args, record)
    neurons = args.up.shape[0]
    size, blocks = list_sizes(args.x.shape[0], neurons, block_rows)
    lists = torch.zeros(size, dtype=torch.int32, device=args.x.device)
    if blocks and neurons:
        every = torch.arange(neurons, dtype=torch.int32, device=args.x.device)
        lists[: blocks * neurons].view(blocks, neurons).copy_(every.expand(blocks, neurons))
    counts = torch.full((blocks,), neurons, dtype=torch.int32, device=args.x.device)
    _remember(lists, None)
    return output, Saved(lists, counts)


def _remember(lists: Tensor, key: Hashable | None) -> None:
    if len(_ran) >= _MOST_CALLS:
        _ran.clear()
    _ran[lists.data_ptr()] = key


def _trainable(args: FfnArgs, rows: int) -> bool:
    """Whether the kernels can do it, on blocks of `rows` tokens."""
    if not indexable(args):
        return False
    tokens, neurons, outputs = args.x.shape[0], args.up.shape[0], args.down.shape[0]
    if not fits(tokens, neurons, rows):
        log_once(f"training dense: {tokens} tokens of {neurons} neurons pass the backward's indices")
        return False
    if outputs * element_bytes(args.x.dtype) % 16:
        log_once(f"training dense: {outputs} outputs are no multiple of 16 bytes")
        return False
    return True


def _can_pay(args: FfnArgs) -> bool:
    """What was measured: Hopper's own kernels, and more work than launches take."""
    x = args.x
    return (
        x.dtype != torch.float32
        and _trainable(args, DEFAULT_ROWS)
        and operations(args) >= _OPERATIONS
        and target_of(x.device).hopper
        and x.shape[1] % 64 == 0
        and args.down.shape[0] % 64 == 0
    )


def _sparse(key: Hashable) -> bool:
    return trains_sparse(key, monitor.known_share(key), _ENTER, _LEAVE)


def _key(args: FfnArgs) -> Hashable:
    """Of what is known of a layer, apart from what inference knows of it."""
    return "train", *layer_key(args)
