"""Sparse or dense: what automatic plans do with a call, decided without waiting for the device."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ..._log import log_once
from ..args import FfnArgs
from . import monitor
from .limits import share_limit
from .operands import is_neuron_major
from .target import target_of

# Up to here the two-launch kernels run; beyond, the block path reuses weights better.
FEW_TOKENS = 64

# Launched one by one from Python, our kernels take the host longer than dense takes the GPU for fewer tokens
# (H200: 0.8 ms of launches against 0.5 ms of dense at 4,096 tokens). Inside a CUDA graph launches are free.
EAGER_TOKENS = 16384


def skips_eager_call(args: FfnArgs) -> bool:
    """Whether an eager call is better left to dense PyTorch; cheap enough to ask before every call."""
    tokens = args.x.shape[0]
    if tokens >= EAGER_TOKENS or torch.cuda.is_current_stream_capturing():
        return False
    return tokens > FEW_TOKENS or not (
        is_neuron_major(args.down) and monitor.wants_reading(layer_key(args), args.selector)
    )


def layer_key(args: FfnArgs) -> Hashable:
    """A layer and a power of two of tokens."""
    bucket = 1 << (args.x.shape[0] - 1).bit_length()
    return args.x.device.index, args.selector.data_ptr(), args.selector.shape, bucket


def choose(args: FfnArgs) -> tuple[bool, Hashable | None]:
    """(whether to run sparse, the key under which the monitor wants a reading of this call)."""
    tokens = args.x.shape[0]
    capturing = torch.cuda.is_current_stream_capturing()
    if tokens < EAGER_TOKENS and not is_neuron_major(args.down):
        log_once(
            f"running dense for fewer than {EAGER_TOKENS} tokens: `down` is not neuron-major "
            "(down.mT contiguous), and transposing it would cost more than the sparsity saves"
        )
        return False, None
    target = target_of(args.x.device)
    limit = share_limit(target.name, target.hopper, tokens)
    if limit <= 0 or (limit >= 1 and (capturing or tokens >= EAGER_TOKENS)):
        return limit >= 1, None
    key = layer_key(args)
    if capturing:  # nothing may be asked of the device now
        share = monitor.last_share(key)
        return share is None or share <= limit, None
    share = monitor.known_share(key)
    if monitor.takes_reading(key, args.selector):
        return True, key
    return tokens >= EAGER_TOKENS and (share is None or share <= limit), None
