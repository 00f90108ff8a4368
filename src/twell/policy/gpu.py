"""Sparse or dense on a GPU, by the work of a call and by how active its layer is, without waiting for it."""

from __future__ import annotations

import torch

from .._log import log_once
from ..crossover import Shape, share_limit, training_limit
from ..kernels.gpu.device import gpu_of
from ..kernels.gpu.sizes import (
    DECODE_TOKENS,
    DEFAULT_ROWS,
    out_of_reach,
    out_of_reach_of_training,
    whole_blocks,
)
from ..layer_state import LOOK_AGAIN_INFERENCE, LayerState
from ..problem import AHEAD, Decision, FfnArgs

# 768 tokens at D 2048, H 5632. Between decode and this much work, sparse lost.
BLOCK_OPERATIONS = 5.3e10

# With less work, transposing `down` costs a large part of what sparsity saves.
TRANSPOSE_OPERATIONS = 5e11

# Training steps with less work stay dense: 1,024 tokens at D 2048, H 5632, where a step that is waited for is
# 1.13x as fast as dense, and most of its time is the host's.
TRAINING_OPERATIONS = 7e10

# Training turns sparse at up to `_ENTER` active neurons (of a block's union), and dense again above `_LEAVE`.
# GPU time on an H200, D 2048, H 5632, 1,024 to 4,096 tokens: 1.02x to 1.34x at 0.49, 0.85x to 1.12x at 0.63.
# `twell tune --training` measures where another GPU, or another shape, should enter.
_ENTER, _LEAVE = 0.5, 0.55

# Blocks without a gate have less to skip: from so many tokens on, up to which share sparse pays. H200, D 2048
# and 3072 (`gpu-plain` in docs/kernels.md): 8,192 tokens 1.17x to 1.25x at 0.68, 1.00x to 1.04x at 0.95;
# 2,048 tokens 1.13x to 1.27x at 0.5, 0.95x to 1.14x at 0.68. One token gains 1.09x at 0.3.
_PLAIN_LIMITS = {1: 0.4, DECODE_TOKENS + 1: 0.5, 8192: 0.8}

_FLOAT32 = (
    "in float32, for which GPUs have no exact tensor cores, sparse kernels gain nothing; cast the model to "
    "bfloat16"
)
_READ = "a reading: now and then a call measures how active the layer is"


def decide_inference(args: FfnArgs, block_rows: int, layer: LayerState) -> Decision:
    """Decide a call with an automatic plan. The first of a kind runs sparse to be read, if that may pay;
    later readings ride along with whatever runs."""
    reason = why_out_of_reach(args, training=False)
    limit = 0.0
    if reason is None:
        limit, reason = _limit(args)
    if limit <= 0:
        return Decision("dense", 0, "dense", reason, ahead=AHEAD, layer=layer)
    reading = layer.reading(args.selector, args.x.shape[0], training=False)
    seen = reading.known()
    share = seen[0]
    fits = limit >= 1 or (share is not None and share <= limit)
    known = _known(share, limit)
    block = Decision("block", block_rows, "gpu", known, reading=reading, layer=layer, known=seen)
    dense = Decision("dense", 0, "dense", known, reading=reading, layer=layer, known=seen)
    if torch.cuda.is_current_stream_capturing():
        if not fits:
            return dense
        if not reading.ran:
            return dense._replace(reason="captured before it ever ran sparse: warm it up before capturing")
        return block
    if limit >= 1:
        reading.ran = True
        return block._replace(ahead=AHEAD)
    due, first = reading.is_due(LOOK_AGAIN_INFERENCE), not reading.ran
    if fits or (due and first):
        reading.ran = True
        ahead = reading.calls_ahead if fits else 0
        return block._replace(reason=known if fits else _READ, read=due, ahead=ahead)
    if due:
        return dense._replace(backend="gpu", read=True)  # the backend counts what its own gate activates
    return dense._replace(ahead=reading.calls_ahead)


def decide_training(args: FfnArgs, block_rows: int, layer: LayerState, hooked: bool) -> Decision:
    """Decide a training step with an automatic plan, and count it.

    hooked: whether hooks see what the step saves. A checkpoint computes the step again and wants the same
    saved: "auto" then decides inside, where either path saves the same.
    """
    enter, why_not = _training_limit(args)
    leave = enter * _LEAVE / _ENTER
    dense = Decision("dense", block_rows, "dense", why_not or "", layer=layer)
    if dense.reason:
        return dense._replace(ahead=AHEAD)
    if hooked:
        return Decision("auto", block_rows, "gpu", "inside a checkpoint", layer=layer)
    reading = layer.reading(args.selector, args.x.shape[0], training=True)
    capturing = torch.cuda.is_current_stream_capturing()
    due = not capturing and reading.is_due()
    seen = reading.known()
    neurons, features = args.selector.shape
    name = f"D {features}, H {neurons}, {args.x.shape[0]:,} tokens on {args.x.device}"
    sparse = reading.trains_sparse(enter, leave, name)
    reason = _READ if due else _known(seen[0], leave if sparse else enter)
    ahead = 0 if capturing else reading.calls_ahead
    if due or sparse:
        block = Decision("block", block_rows, "gpu", reason, reading=reading, layer=layer, known=seen)
        return block._replace(read=due, ahead=ahead if sparse else 0)
    return dense._replace(reason=reason, reading=reading, ahead=ahead, known=seen)


def row_or_block(args: FfnArgs, decision: Decision, training: bool, record: bool) -> Decision:
    """The row path, the paper's, where it can run, else the block path."""
    if training:
        log_once("training on the block path instead of 'row', which has no backward of its own")
        return decision._replace(path="block", reason="not 'row': it has no backward of its own")
    reason = None
    if args.x.dtype == torch.float32:
        reason = "its words hold 16-bit values, not float32"
    elif record:
        reason = "statistics come from the block path"
    if reason is None:
        return decision
    log_once(f"running the block path instead of 'row': {reason}")
    return decision._replace(path="block", block_rows=0, reason=f"not 'row': {reason}")


def why_out_of_reach(args: FfnArgs, training: bool, rows: int = DEFAULT_ROWS) -> str | None:
    """Why the kernels cannot run this call, on blocks of `rows` tokens; logged if there is work."""
    reason = out_of_reach_of_training(args, rows) if training else out_of_reach(args)
    if reason is not None and args.x.shape[0] and args.up.shape[0] and args.down.shape[0]:
        log_once(f"{'training' if training else 'running'} dense: {reason}")
    return reason


def why_not_float32() -> str:
    """Why automatic plans run float32 dense; logged."""
    log_once(f"running dense: {_FLOAT32}")
    return _FLOAT32


def operations(args: FfnArgs) -> int:
    """Floating-point operations of a dense forward, counting the tokens that pad whole blocks."""
    matrices = 2 if args.gate is None else 3
    return 2 * matrices * whole_blocks(args.x.shape[0]) * args.selector.numel()


def _known(share: float | None, limit: float) -> str:
    if limit >= 1:
        return "this many tokens run sparse however active the layer is"
    if share is None:
        return "not known yet how active the layer is"
    return f"{share:.1%} of the neurons active in a block of tokens, sparse pays up to {limit:.0%}"


def _limit(args: FfnArgs) -> tuple[float, str]:
    """The share of active neurons up to which this call runs sparse; if 0, never, and why."""
    neurons, hidden = args.selector.shape
    if args.x.dtype == torch.float32:
        return 0.0, why_not_float32()
    tokens = whole_blocks(args.x.shape[0])
    gated = args.gate is not None
    if operations(args) < TRANSPOSE_OPERATIONS and not args.down.mT.is_contiguous():
        reason = (
            "`down` is not neuron-major (down.mT contiguous), and transposing it would cost more than the "
            "sparsity saves"
        )
        log_once(f"running dense for few tokens: {reason}")
        return 0.0, reason
    gpu = gpu_of(args.x.device)
    # The built-in limits hold for what was measured: Hopper's kernels, which take whole steps of 64 features,
    # in decode or with much work. Anything else needs tuning.
    much = operations(args) >= BLOCK_OPERATIONS
    measured = gpu.hopper and hidden % 64 == 0 and (tokens <= DECODE_TOKENS or much)
    limit = share_limit(gpu.name, measured, Shape(hidden, neurons, gated), tokens)
    if limit <= 0 and not gpu.hopper:
        reason = (
            f"sparse was not measured on {gpu.name}; "
            f"`twell tune --hidden {hidden} --neurons {neurons}` measures it"
        )
        log_once(f"running dense: {reason}")
        return 0.0, reason
    reason = f"sparse was not measured for {tokens:,} tokens at D {hidden}"
    if tokens > DECODE_TOKENS and not much:
        reason = f"{tokens:,} tokens are too little work for the block path, and too many for decode"
    if not gated:
        limit = min(limit, max(share for least, share in _PLAIN_LIMITS.items() if least <= tokens))
    return limit, reason


def _training_limit(args: FfnArgs) -> tuple[float, str | None]:
    """The share of active neurons up to which a training step turns sparse; or why none does.

    Without tuning, sparse training was measured for Hopper's kernels, with enough work to hide the launches.
    """
    x = args.x
    if x.dtype == torch.float32:
        return 0.0, why_not_float32()
    reason = why_out_of_reach(args, training=True)
    if reason is not None:
        return 0.0, reason
    gpu = gpu_of(x.device)
    neurons, hidden = args.selector.shape
    tuned = training_limit(gpu.name, Shape(hidden, neurons, args.gate is not None), x.shape[0])
    if tuned is not None:
        return tuned, None if tuned > 0 else f"sparse steps of {x.shape[0]:,} tokens were slower when tuned"
    if operations(args) < TRAINING_OPERATIONS:
        return 0.0, "so few tokens take less time than their launches"
    if not gpu.hopper:
        reason = (
            f"sparse training was not measured on {gpu.name}; "
            f"`twell tune --training --hidden {hidden} --neurons {neurons}` measures it"
        )
        log_once(f"training dense: {reason}")
        return 0.0, reason
    if x.shape[1] % 64 or args.down.shape[0] % 64:
        return 0.0, "Hopper's kernels take whole steps of 64 features"
    return _ENTER, None
