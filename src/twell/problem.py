"""What a call is: its operands, what was decided for it, and what every implementation of it returns."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .activations import Activation
from .layer_state import LayerState, Reading

PLAIN = (Tensor, torch.nn.Parameter)  # tensors without behaviour of their own
Tensors = tuple[Tensor | None, ...]  # x, up, down, gate, up_bias, down_bias, gate_bias


def are_plain(tensors: Tensors) -> bool:
    """Whether none is of a subclass, which may know F.linear and nothing else."""
    return all(tensor is None or type(tensor) in PLAIN for tensor in tensors)


def is_trained(tensors: Tensors) -> bool:
    """Whether autograd records what is done to them."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def flattened(x: Tensor) -> Tensor:
    """x [..., D] as [M, D]."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def unflattened(y: Tensor, x: Tensor) -> Tensor:
    """y [M, E] with x's leading dimensions."""
    if x.dim() == 2:
        return y
    shape = *x.shape[:-1], y.shape[-1]
    if torch.jit.is_tracing():  # other leading sizes must work
        return y.reshape(shape)
    # As `linear` does it: an output that autograd takes for a view would lose hooks to in-place operations.
    return torch.ops.aten._unsafe_view(y, shape)


def cast_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in another dtype, with a reference to `tensor`."""
    cast = tensor.to(dtype)
    if cast is not tensor and not torch.compiler.is_compiling():
        cast._twell_source = tensor
    return cast


def source_of(tensor: Tensor) -> Tensor:
    """The tensor that `cast_of` cast, or `tensor` itself: a cast lives for one call, a layer for longer."""
    return getattr(tensor, "_twell_source", tensor)


class FfnArgs(NamedTuple):
    """The operands of one block, tokens flattened. Weights are in `nn.Linear` layout, any strides.

    x [M, D]; up, gate [H, D]; down [D, H]; up_bias, gate_bias [H]; down_bias [D].
    `gate` is None for a non-gated block.
    """

    x: Tensor
    up: Tensor
    down: Tensor
    gate: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    gate_bias: Tensor | None
    activation: Activation

    @property
    def selector(self) -> Tensor:
        """[H, D]: the projection whose activation decides which neurons are active."""
        return self.up if self.gate is None else self.gate

    @property
    def selector_bias(self) -> Tensor | None:
        return self.up_bias if self.gate is None else self.gate_bias


# Calls that repeat a settled decision before everything is checked again: tuning may change limits.
AHEAD = 255


class ChunkRule(Protocol):
    """How the CPU backend finishes a chunk of tokens once it has seen their activations."""

    def choose(self, activated: Tensor) -> tuple[str, str]:
        """ "row", "block" or "dense", and why, from a look at a few tokens; activated [m, H]."""

    def still_pays(self, path: str, active: Tensor, count: int, block_rows: int) -> bool:
        """Whether `path` also pays for the whole chunk; active: bool [m, H] with `count` True entries."""


class Decision(NamedTuple):
    """How one call runs, and why. `policy` takes it; backends carry it out.

    path:        "dense", "row" or "block"; "auto": chunk by chunk, as `chunks` says (CPU), or when a
                 checkpointed step runs (GPU).
    block_rows:  tokens per block of the block path; 0: the backend's default.
    backend:     the name of the one that runs it.
    reason:      for people.
    ahead:       how many more calls like this one may run the same way without asking again; `reading` is
                 told how many did.
    reading:     how active the layer is in calls of this kind, as far as known.
    read:        whether this call should read how active the layer is.
    layer:       the layer's state.
    known:       the share of active neurons that this went by, and the version of its reading.
    """

    path: str
    block_rows: int
    backend: str
    reason: str
    ahead: int = 0
    reading: Reading | None = None
    read: bool = False
    chunks: ChunkRule | None = None
    layer: LayerState | None = None
    known: tuple[float | None, int] = (None, 0)


class FfnOutput(NamedTuple):
    """y [M, D]; when recorded, l1 [] (mean over tokens of sum |h|) and firing int64 [H]."""

    y: Tensor
    l1: Tensor | None = None
    firing: Tensor | None = None


class Saved(NamedTuple):
    """Int32 tensors that a training step's forward hands to its backward, besides the operands; their sizes
    follow from the shapes alone. On GPUs the active neurons of every block of tokens; empty where the
    backward finds out by itself."""

    lists: Tensor
    counts: Tensor


Gradients = Tensors  # of the operands, in their order


class Repeat(Protocol):
    """A call that has run, to be run again on operands of the same shapes, strides and types.

    path: what ran, as `recorded_paths` names it.
    """

    path: str

    def __call__(self, *tensors: Tensor | None) -> Tensor | None:
        """y [..., E] of (x [..., D], up, ...); None where it has to be run in full."""


class StepRepeat(Protocol):
    """`Repeat` for a training step."""

    def forward(self, *tensors: Tensor | None) -> tuple[FfnOutput, Saved] | None:
        """The output of (x [..., D], up, ...), and what to save; None where it has to be run in full."""

    def backward(
        self, tensors: Tensors, saved: Saved, grad_y: Tensor, grad_l1: Tensor | None, needed: FfnArgs
    ) -> Gradients | None:
        """The gradients of all operands; grad_y [..., E]."""


class Existing(NamedTuple):
    """Gradients of weights that a backward adds to: of one dtype, [H, D] contiguous, down's [E, H] with
    contiguous columns; None where none is needed."""

    up: Tensor | None
    down: Tensor | None
    gate: Tensor | None
