"""The GPU backend: which kernels run a call."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._errors import reject
from ..._log import note_path
from ...activations import largest_at_most
from ...problem import Decision, FfnArgs, FfnOutput
from ..dense import dense_forward, dense_forward_keeping
from .block import BlockRun, blocks_kind, run_blocks, tokens_to_play
from .decode import decode_kind, run_decode
from .launch import is_watched, launch
from .operands import Operands, is_readable, prepare
from .sizes import DECODE_TOKENS, DEFAULT_ROWS, cdiv
from .tape import Tape, Tapes
from .triton.statistics import count_unions
from .workspace import kept_workspace

_COUNTED = 64  # neurons of one program that counts
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
        return _dense(args, decision, record)
    check_block_rows(args, decision.block_rows)
    if decision.path == "row":
        return _row(args, decision)
    return _block(args, decision, record)


def check_block_rows(args: FfnArgs, block_rows: int) -> None:
    accepted = _BLOCK_ROWS if args.x.is_cuda else _INTERPRETED_ROWS
    if block_rows not in accepted:
        reject("block_rows", block_rows, f"one of {accepted} on a GPU (0: the default)")


def _dense(args: FfnArgs, decision: Decision, record: bool) -> FfnOutput:
    """A call that is read counts what its own gate activates."""
    if not decision.read:
        return dense_forward(args, record, reason=decision.reason)
    output, kept = dense_forward_keeping(args, record, decision.reason)
    (tokens, neurons), pre = kept.pre.shape, kept.pre
    rows = DECODE_TOKENS if tokens <= DECODE_TOKENS else DEFAULT_ROWS
    grid = cdiv(neurons, _COUNTED), cdiv(tokens, rows)
    counts = pre.new_empty(grid[::-1], dtype=torch.int32)
    threshold = largest_at_most(args.activation.threshold, pre.dtype)
    constants = {"ROWS": rows, "NEURONS": _COUNTED}
    launch(
        (pre.dtype, neurons, rows), count_unions, grid, (pre, counts, tokens, neurons, threshold), constants
    )
    decision.reading.take(counts, grid[1] * neurons)
    return output


def _block(args: FfnArgs, decision: Decision, record: bool) -> FfnOutput:
    operands, tapes = prepare(args), tapes_of(decision)
    few = is_decode(operands.tokens, decision) and not record
    note_path("decode" if few else "block", args.x, operands.neurons, reason=decision.reason)
    if few:
        run = run_decode(operands, tapes)
        output, slots = FfnOutput(run.y), run.slots
    else:
        run = run_blocks(operands, decision.block_rows, record, tapes=tapes)
        output = output_of(run, operands)
        slots = run.counts.shape[0] * operands.neurons
    if decision.read:
        decision.reading.take(run.counts.tensor(), slots)
    return output


class GpuRepeat:
    """A call whose launches were recorded; see `Repeat`. Leading dimensions of x may be others, as long as
    its number of tokens is in the same `bucket`.

    path: "decode" or "block".
    """

    def __init__(
        self, tape: Tape, args: FfnArgs, path: str, told: bool, only: int | None, inside: bool
    ) -> None:
        """told: whether the tape is told the number of tokens; only: the one it may be, None: any; inside:
        see `gpu_repeat`."""
        self._tape, self.path, self._told, self._only = tape, path, told, only
        (self._space,) = tape.sizes
        self._inside = inside
        self._device, self._gated = args.x.device, args.gate is not None
        self._index = self._device.index
        biased = any(bias is not None for bias in (args.up_bias, args.down_bias, args.gate_bias))
        self._in_full = biased or not self._gated or tape.interpreted
        self._outputs = args.down.shape[0]

    def __call__(self, x, up, down, gate, up_bias, down_bias, gate_bias) -> Tensor | None:
        """y [..., E] of x [..., D], or None where it has to be run in full; not while a graph is captured."""
        index, tape, stream = self._index, self._tape, 0
        if index is not None:
            if torch._C._cuda_getDevice() != index:  # launches go to the current device
                return None
            stream = torch._C._cuda_getCurrentRawStream(index)
        if is_watched():
            return None
        shape = x.shape
        y = torch.empty_like(x) if shape[-1] == self._outputs else x.new_empty((*shape[:-1], self._outputs))
        tokens = x.numel() // shape[-1]
        if self._only is not None and tokens != self._only:
            return None
        if not self._told:
            tokens = None
        if self._inside:
            buffer = torch.empty(self._space, dtype=torch.uint8, device=self._device)
        else:
            buffer = kept_workspace(self._device, index, stream, self._space)
        if not self._gated:
            gate, up, gate_bias, up_bias = up, None, up_bias, None
        if self._in_full:
            tensors = gate, up, down, gate_bias, up_bias, down_bias, buffer, x, y
            return y if tape.play(tensors, stream, tokens) else None
        steady = [gate.data_ptr(), up.data_ptr(), down.data_ptr(), 0, 0, 0, buffer.data_ptr()]
        return y if tape.play_at(steady, (x.data_ptr(), y.data_ptr()), stream, tokens) else None


def gpu_repeat(args: FfnArgs, decision: Decision, inside: bool) -> GpuRepeat | None:
    """How a call that has just run is run again; None where its operands had to be copied, or nothing was
    recorded.

    inside: whether the op of a compiled graph was called, which may gather its allocations in a pool.
    """
    if decision.path != "block" or decision.layer is None or not are_readable(args):
        return None
    operands = prepare(args)
    tokens, rows = operands.tokens, decision.block_rows
    if is_decode(tokens, decision):
        path, kind, told, only = "decode", decode_kind(operands), True, None
    else:
        path, kind = "block", blocks_kind(operands, rows, record=False, keep=False)
        told = tokens_to_play(operands, rows) is not None
        # Numbers of tokens in a bucket have the same blocks, if blocks have the usual size.
        only = None if told and rows in (0, DEFAULT_ROWS) else tokens
    tape = decision.layer.tapes.get(kind)
    return None if tape is None else GpuRepeat(tape, args, path, told, only, inside)


def are_readable(args: FfnArgs) -> bool:
    """Whether the kernels read the operands themselves, and no copies."""
    return all(map(is_readable, args._replace(down=args.down.mT)[:-1]))


def is_current(device: torch.device) -> bool:
    """Whether launches go there."""
    return device.type != "cuda" or torch._C._cuda_getDevice() == device.index


def is_decode(tokens: int, decision: Decision) -> bool:
    return tokens <= DECODE_TOKENS and decision.block_rows == 0


def tapes_of(decision: Decision) -> Tapes | None:
    return None if decision.layer is None else decision.layer.tapes


def output_of(run: BlockRun, operands: Operands) -> FfnOutput:
    if run.statistics is None:
        return FfnOutput(run.y)
    return FfnOutput(run.y, run.statistics.l1(operands.tokens), run.statistics.firing)


def _row(args: FfnArgs, decision: Decision) -> FfnOutput:
    from .row.run import run_rows

    note_path("row", args.x, args.up.shape[0], reason=decision.reason)
    return FfnOutput(run_rows(prepare(args)))
