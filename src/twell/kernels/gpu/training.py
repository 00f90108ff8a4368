"""Training on the GPU: a sparse forward that keeps which neurons were active, and the backward from that.

Nothing else is saved: lists of active neurons take 4 bytes per neuron and block of tokens, 3 MB for 16,384
tokens of 5,632 neurons. For the listed neurons the backward computes activations again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..._log import note_path
from ...layer_state import Reading
from ...problem import Decision, Existing, FfnArgs, FfnOutput, Gradients, Saved, Tensors
from ..dense import dense_backward, dense_forward
from .backward import gpu_backward, replay_backward
from .backward_launches import Active
from .block import blocks_kind, empty_statistics, run_blocks, tokens_sums, tokens_to_play
from .forward import are_readable, check_block_rows, is_current, output_of, tapes_of
from .operands import Operands, prepare, readable
from .sizes import DEFAULT_ROWS, list_sizes
from .tape import Tape, stream_of
from .workspace import kept_workspace

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
    overflow = _expects_overflow(decision.reading)
    # Hooks may hand back copies that are not aligned as the kernels expect.
    active = Active(readable(saved.lists), readable(saved.counts), decision.block_rows or DEFAULT_ROWS)
    return gpu_backward(args, active, grad_y, grad_l1, needed, overflow, into, tapes_of(decision))


class GpuStepRepeat:
    """A step whose launches were recorded; see `StepRepeat`."""

    def __init__(
        self, tape: Tape, args: FfnArgs, operands: Operands, decision: Decision, record: bool
    ) -> None:
        self._tape, self._kind, self._tapes = tape, operands.kind, decision.layer.tapes
        (self._space,) = tape.sizes
        self._rows, self._reading = decision.block_rows or DEFAULT_ROWS, decision.reading
        self._device, self._gated, self._outputs = args.x.device, args.gate is not None, args.down.shape[0]
        self._tokens, self._neurons = operands.tokens, operands.neurons
        self._played = tokens_to_play(operands, self._rows)
        self._sizes = list_sizes(operands.tokens, operands.neurons, self._rows)
        # The number of sums of magnitudes, where they are recorded.
        self._sums = tokens_sums(operands, self._rows) if record else None

    def forward(self, x: Tensor, *weights: Tensor | None) -> tuple[FfnOutput, Saved] | None:
        device = self._device
        if not is_current(device):
            return None
        stream = stream_of(device)
        y = x.new_empty((*x.shape[:-1], self._outputs))
        lists, counts = (x.new_empty(size, dtype=torch.int32) for size in self._sizes)
        results = (y, lists, counts)
        if self._sums is not None:
            statistics = empty_statistics(self._neurons, self._sums, device)
            results = (*results, statistics.firing, statistics.sums)
        buffer = kept_workspace(device, device.index, stream, self._space)
        if not self._tape.play((*self._read(*weights), buffer, x, *results), stream, self._played):
            return None
        saved = Saved(lists, counts)
        if self._sums is None:
            return FfnOutput(y), saved
        return FfnOutput(y, statistics.l1(self._tokens), statistics.firing), saved

    def backward(
        self, tensors: Tensors, saved: Saved, grad_y: Tensor, grad_l1: Tensor | None, needed: FfnArgs
    ) -> Gradients | None:
        if not is_current(self._device) or not grad_y.is_contiguous():
            return None
        return replay_backward(
            self._tapes,
            (self._kind, self._tokens, self._rows, _expects_overflow(self._reading)),
            (*self._read(*tensors[1:]), tensors[0]),
            saved,
            grad_y,
            grad_l1,
            needed,
        )

    def _read(self, up, down, gate, up_bias, down_bias, gate_bias) -> tuple[Tensor | None, ...]:
        """Weights in the order in which the kernels read them."""
        if self._gated:
            return gate, up, down, gate_bias, up_bias, down_bias
        return up, None, down, up_bias, None, down_bias


def gpu_step_repeat(args: FfnArgs, decision: Decision, record: bool) -> GpuStepRepeat | None:
    """How a step whose forward has just run is run again; None where its operands had to be copied, or
    nothing was recorded."""
    if decision.path != "block" or decision.layer is None or not are_readable(args):
        return None
    operands = prepare(args)
    tape = decision.layer.tapes.get(blocks_kind(operands, decision.block_rows, record, keep=True))
    return None if tape is None else GpuStepRepeat(tape, args, operands, decision, record)


def _expects_overflow(reading: Reading | None) -> bool | None:
    share = None if reading is None else reading.share
    return None if share is None else share > _CROWDED


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
