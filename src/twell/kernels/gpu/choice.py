"""Sparse or dense: what automatic plans do with a call, decided without waiting for the device."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from ..._log import log_once
from ..args import RUN, FfnArgs, Skip, source_of
from . import monitor
from .limits import Shape, share_limit
from .operands import is_neuron_major
from .target import target_of

# Up to here the two-launch kernels run; beyond, the block path reuses weights better.
FEW_TOKENS = 64

# Launched one by one from Python, our kernels take the host longer than dense takes the GPU for less work
# than this (0.34 to 0.59 ms of launches on a slow host, against 0.42 ms of dense at 4,096 tokens, D 2048,
# H 5632: 0.28e12 operations). Inside a CUDA graph launches are free.
EAGER_OPERATIONS = 5e11

# Inside a CUDA graph: 1,024 tokens at D 2048, H 5632. With less work sparse was seen to lose.
GRAPH_OPERATIONS = 7e10

# Calls between readings of a layer whose eager calls run dense: a reading takes as long as ten of them, and
# only a capture will want it.
_SELDOM = 1024

# More calls that nobody counts; then limits are looked up again, which tuning may have changed.
UNREAD = 63

# A block that is not gated has a slower down kernel: not measured with everything active.
_PLAIN_LIMIT = 0.5


def skips_eager_calls(args: FfnArgs) -> Skip:
    """Whether an eager call is better left to dense PyTorch, and how many more of its kind.

    Readings are the exception: now and then a call of a kind that a CUDA graph may want runs sparse.
    """
    if torch.cuda.is_current_stream_capturing():
        return RUN
    limit = _limit(args)
    if limit <= 0:
        return Skip(True, UNREAD, lambda calls: None)
    if _pays_eagerly(args):
        return RUN
    key = layer_key(args)
    if monitor.wants_reading(key, source_of(args.selector), _SELDOM):
        return RUN
    return Skip(True, monitor.calls_before_reading(key), partial(monitor.count_calls, key))


def choose(args: FfnArgs) -> tuple[bool, Hashable | None]:
    """(whether to run sparse, the key under which the monitor wants a reading of this call)."""
    limit = _limit(args)
    if limit <= 0:
        return False, None
    key = layer_key(args)
    share = monitor.known_share(key)
    fits = limit >= 1 or (share is not None and share <= limit)
    if torch.cuda.is_current_stream_capturing():
        return fits and monitor.has_run(key), None
    if limit < 1 or not _pays_eagerly(args):
        if monitor.takes_reading(key, source_of(args.selector)):
            return True, key
        return fits and _pays_eagerly(args), None
    return True, None


def layer_key(args: FfnArgs) -> Hashable:
    """A layer and a power of two of tokens."""
    bucket = 1 << (args.x.shape[0] - 1).bit_length()
    return args.x.device.index, _identity(source_of(args.selector)), args.selector.shape, bucket


def _identity(weight: Tensor) -> Hashable:
    # A parameter stays the same object where its memory comes and goes (FSDP); other tensors are often
    # views that are made for every call.
    return ("parameter", id(weight)) if type(weight) is Parameter else weight.data_ptr()


def operations(args: FfnArgs) -> int:
    """Of a dense forward pass."""
    matrices = 2 if args.gate is None else 3
    return 2 * matrices * args.x.shape[0] * args.selector.numel()


def _pays_eagerly(args: FfnArgs) -> bool:
    return operations(args) >= EAGER_OPERATIONS


def _limit(args: FfnArgs) -> float:
    """The share of active neurons up to which this call should run sparse; 0: never."""
    neurons, hidden = args.selector.shape
    if args.x.dtype == torch.float32:
        return 0.0
    tokens = args.x.shape[0]
    gated = args.gate is not None
    pays = _pays_eagerly(args)
    if not pays and not is_neuron_major(args.down):
        log_once(
            "running dense for few tokens: `down` is not neuron-major (down.mT contiguous), and transposing "
            "it would cost more than the sparsity saves"
        )
        return 0.0
    target = target_of(args.x.device)
    # The built-in limits hold for what was measured: Hopper's own kernels, which take whole steps of 64
    # features, with few tokens or with much work. Anything else has to be tuned.
    much = operations(args) >= GRAPH_OPERATIONS
    measured = target.hopper and hidden % 64 == 0 and (tokens <= FEW_TOKENS or much)
    limit = share_limit(target.name, measured, Shape(hidden, neurons, gated), tokens)
    if limit <= 0 and not target.hopper:
        log_once(
            f"running dense on {target.name}: where sparse pays there is not known; "
            f"`twell tune --hidden {hidden} --neurons {neurons}` measures it"
        )
    return limit if gated else min(limit, _PLAIN_LIMIT)
