"""Gradients of a block from what its forward pass listed."""

from __future__ import annotations

import torch
from torch import Tensor

from ...problem import Existing, FfnArgs
from .backward_launches import Active, BackwardLaunches, Gradients, keeps_rest
from .operands import STEADY, Operands, prepare, readable
from .sizes import backward_rounds
from .tape import Tapes, recorded, stream_of, tape_of
from .workspace import kept_workspace, overflow_counter, zeros


def gpu_backward(
    args: FfnArgs,
    active: Active,
    grad_y: Tensor,
    grad_l1: Tensor | None,
    needed: FfnArgs,
    overflow: bool | None = None,
    into: Existing | None = None,
    tapes: Tapes | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of (x, up, down, gate, up_bias, down_bias, gate_bias); never waits for the device.

    grad_y:   [M, E].
    grad_l1:  [] or None.
    needed:   an `FfnArgs` of bools; a False entry gives None.
    overflow: whether more than a third of the neurons is expected to be active, if that is known; see
              `BackwardLaunches`.
    into:     needed gradients of up, down and gate to add to; the result then has None there.
    tapes:    launches of earlier calls of this layer, for later ones.
    """
    if args.x.is_cuda and args.x.device.index != torch.cuda.current_device():
        with torch.cuda.device(args.x.device):  # Triton launches on the current device
            return gpu_backward(args, active, grad_y, grad_l1, needed, overflow, into, tapes)
    operands = prepare(args)
    gated = args.gate is not None
    tensors = (*operands.weights, operands.x)
    gradients = _allocated(
        tensors, needed if into is None else needed._replace(up=False, down=False, gate=False)
    )
    if into is not None:
        gradients.add = True
        gradients.select, gradients.up = (into.gate, into.up) if gated else (into.up, None)
        gradients.down = None if into.down is None else into.down.mT
    grad_y = readable(grad_y)
    _run(operands, active, grad_y, grad_l1, gradients, overflow, tapes)
    if into is not None:
        gradients.select = gradients.up = gradients.down = None
    down = None if gradients.down is None else gradients.down.mT
    return _in_order(gradients, down, grad_y if needed.down_bias else None, gated)


def _allocated(tensors: tuple[Tensor | None, ...], needed: FfnArgs) -> Gradients:
    """tensors: weights as the kernels read them, and x."""
    select, up, down, select_bias, up_bias, _, x = tensors
    gated = up is not None

    def new(like: Tensor | None, wanted: bool) -> Tensor | None:
        return torch.empty_like(like) if wanted else None

    return Gradients(
        x=new(x, needed.x),
        select=new(select, needed.gate if gated else needed.up),
        up=new(up, gated and needed.up),
        down=new(down, needed.down),
        select_bias=new(select_bias, needed.gate_bias if gated else needed.up_bias),
        up_bias=new(up_bias, gated and needed.up_bias),
    )


def _in_order(
    gradients: Gradients, down: Tensor | None, summed: Tensor | None, gated: bool
) -> tuple[Tensor | None, ...]:
    """In the order of the operands. down: the gradient of `down`, [E, H]; summed: grad_y if `down_bias` has a
    gradient."""
    selects = gradients.select, gradients.select_bias
    ups = (gradients.up, gradients.up_bias) if gated else selects
    gate, gate_bias = selects if gated else (None, None)
    down_bias = None if summed is None else summed.reshape(-1, summed.shape[-1]).sum(0)
    return gradients.x, ups[0], down, gate, ups[1], down_bias, gate_bias


def _run(
    operands: Operands,
    active: Active,
    grad_y: Tensor,
    grad_l1: Tensor | None,
    gradients: Gradients,
    overflow: bool | None,
    tapes: Tapes | None,
) -> None:
    """Fill `gradients`: as an earlier backward of this kind did it, or for the first time."""
    step = operands.kind, operands.tokens, active.rows, overflow
    tensors = (*operands.weights, operands.x)
    saved = active.lists, active.counts
    if _replay(tapes, step, tensors, saved, grad_y, grad_l1, gradients, kept=False):
        return
    launches = BackwardLaunches(operands, active, grad_y, grad_l1, gradients, overflow)
    given = (operands.x, grad_y, active.lists, active.counts, grad_l1, *gradients.tensors)
    buffers = launches.rest, launches.cleared, launches.overflow_counter
    tensors = (*operands.weights, launches.workspace, *given, *buffers)
    with recorded(tapes, _kind(step, grad_l1, gradients), tensors, STEADY, launches.sizes):
        launches.run()


def replay_backward(
    tapes: Tapes,
    step: tuple,
    tensors: tuple[Tensor | None, ...],
    saved: tuple[Tensor, Tensor],
    grad_y: Tensor,
    grad_l1: Tensor | None,
    needed: FfnArgs,
) -> tuple[Tensor | None, ...] | None:
    """`gpu_backward` as an earlier one did it, or None.

    step:     kind of operands, tokens, tokens per block, `overflow`.
    tensors:  weights as the kernels read them (down neuron-major), and x [..., D], contiguous.
    saved:    lists and counts.
    """
    gradients = _allocated(tensors, needed)
    if not _replay(tapes, step, tensors, saved, grad_y, grad_l1, gradients, kept=True):
        return None
    return _in_order(gradients, gradients.down, grad_y if needed.down_bias else None, tensors[1] is not None)


def _replay(
    tapes: Tapes | None,
    step: tuple,
    tensors: tuple[Tensor | None, ...],
    saved: tuple[Tensor, Tensor],
    grad_y: Tensor,
    grad_l1: Tensor | None,
    gradients: Gradients,
    kept: bool,
) -> bool:
    """kept: whether it may take a workspace that is kept."""
    *weights, x = tensors
    device = x.device
    tape = tape_of(tapes, _kind(step, grad_l1, gradients), device)
    if tape is None:
        return False
    (_, tokens, rows, overflow), itemsize = step, x.dtype.itemsize
    gated = weights[1] is not None
    rounds = backward_rounds(tokens, weights[0].shape[0], rows, gated, itemsize, overflow)
    keeps = keeps_rest(x.dtype, gradients, overflow, rounds)
    space, cleared = tape.sizes
    buffers = (
        torch.empty_like(gradients.x) if keeps else None,
        zeros(device, cleared),
        overflow_counter(device),
    )
    given = (x, grad_y, *saved, grad_l1, *gradients.tensors)
    stream = stream_of(device)
    if kept:
        buffer = kept_workspace(device, device.index, stream, space)
    else:
        buffer = torch.empty(space, dtype=torch.uint8, device=device)
    return tape.play((*weights, buffer, *given, *buffers), stream)


def _kind(step: tuple, grad_l1: Tensor | None, gradients: Gradients) -> tuple:
    """The kind of a backward's tape."""
    dtypes = tuple(None if tensor is None else tensor.dtype for tensor in gradients.tensors)
    return "backward", step, None if grad_l1 is None else grad_l1.dtype, gradients.add, dtypes
