"""Eager training steps: the block and its backward as one autograd function, without the dispatcher.

    _Once            decided before it runs, or when it runs
    _Checkpointed    computed twice, maybe decided twice
    RepeatedStep     launches what an earlier step launched, both ways

Where somebody traces, transforms, watches or differentiates twice, the registered ops of `ops` run instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ._log import note_path
from ._observers import saving_observer
from .accumulation import accumulates_in_place
from .activations import Activation
from .backends import get_backend
from .kernels.dense import DenseActivations, dense_backward, dense_forward_keeping
from .layer_state import LayerState
from .ops import (
    OPERANDS,
    BackwardCall,
    Step,
    existing,
    gradients_of,
    integers,
    laid_out,
    needed_of,
    only_values_matter,
    train,
    without_the_op,
)
from .policy import decide_inside
from .prepared import Decided, Kinds, Prepared
from .problem import (
    Decision,
    FfnArgs,
    FfnOutput,
    Gradients,
    Saved,
    StepRepeat,
    Tensors,
    flattened,
    unflattened,
)


class _Step(torch.autograd.Function):
    """A step and its backward, both as its `_Once` has it."""

    @staticmethod
    def forward(ctx, way: _Once, *tensors: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        output, saved = way.forward(tensors)
        ctx.way = way
        ctx.save_for_backward(*tensors, *saved)
        ctx.set_materialize_grads(False)
        if output.firing is not None:
            ctx.mark_non_differentiable(output.firing)
        return tuple(output)

    @staticmethod
    def backward(ctx, grad_y: Tensor | None, grad_l1: Tensor | None, _grad_firing: None) -> Gradients:
        needed = needed_of(ctx.needs_input_grad[1:], grad_y, grad_l1)
        if not any(needed):
            return None, *(None,) * OPERANDS
        saved = ctx.saved_tensors  # once: checkpoints hand them out once
        return None, *ctx.way.gradients(BackwardCall(saved, grad_y, grad_l1, needed))


class _Once:
    """A step with a decision that reaches its backward as it is."""

    def __init__(self, decision: Decision, activation: Activation, record: bool) -> None:
        self.decision, self.activation, self.record = decision, activation, record
        self._open = _is_open(decision)

    @property
    def step(self) -> Step:
        decision = self.decision
        return Step(self.activation.spec, decision.block_rows, decision.backend, decision)

    def forward(self, tensors: Tensors) -> tuple[FfnOutput, Sequence[Tensor | None]]:
        """The output, and what to save besides the operands."""
        args = FfnArgs(*tensors, self.activation)
        if self._open:
            self._decide(args)
        output, saved = train(args, self.decision, self.record)
        saved.lists._twell_decision = self.decision
        return output, saved

    def gradients(self, call: BackwardCall) -> Gradients:
        """The operands' gradients; call.saved: the operands, and what `forward` gave."""
        step = self.step
        if self._open:
            # Unknown hooks may have computed it again, decided otherwise: its tensors know, or nobody.
            step = step._replace(decision=getattr(call.saved[-2], "_twell_decision", None))
        return _eager_gradients(step, call)

    def _decide(self, args: FfnArgs) -> None:
        path, rows, backend, layer = *self.decision[:3], self.decision.layer
        self.decision = decide_inside(
            args, path, rows, backend, training=True, record=self.record, layer=layer
        )


class _Checkpointed(_Once):
    """A step inside a checkpoint, which is computed twice and may be decided twice: both ways save tensors
    of the same shapes, stand-ins where there is nothing, so that dense steps compute nothing a third time.
    A stand-in has one element, expanded; that tells which way went last."""

    def forward(self, tensors: Tensors) -> tuple[FfnOutput, Sequence[Tensor | None]]:
        args = FfnArgs(*tensors, self.activation)
        self._decide(args)
        decision, tokens, neurons = self.decision, args.x.shape[0], args.up.shape[0]
        if decision.path == "dense":
            output, kept = dense_forward_keeping(args, self.record, decision.reason)
            sizes = get_backend(decision.backend).training.sizes(tokens, neurons, decision.block_rows)
            saved = Saved(*(integers(args.x, 1).expand(size) for size in sizes))
        else:
            output, saved = train(args, decision, self.record)
            stand_in = args.x.new_empty(1, 1).expand(tokens, neurons)
            kept = DenseActivations(stand_in, None if args.gate is None else stand_in)
        return output, (*saved, *kept)

    def gradients(self, call: BackwardCall) -> Gradients:
        *saved, pre, up = call.saved
        ran_dense = _is_stand_in(saved[-2])
        if ran_dense == _is_stand_in(pre):
            raise RuntimeError("a checkpoint handed back copies of what a sparse training step saved")
        if not ran_dense:
            step = self.step._replace(decision=self.decision._replace(path="block"))
            return _eager_gradients(step, call._replace(saved=saved))
        args = FfnArgs(*saved[:OPERANDS], self.activation)
        # Second derivatives need the operands, which are connected to whatever they came from.
        kept = None if torch.is_grad_enabled() else DenseActivations(pre, up)
        note_path("dense", args.x, args.up.shape[0], "backward", "as its forward")
        needed = FfnArgs(*call.needed, None)
        return laid_out(dense_backward(args, call.grad_y, call.grad_l1, needed, kept), args.down)


Holds = Callable[[Tensors], bool]


class RepeatedStep(_Once):
    """A step that launches what an earlier one launched, both ways; x [..., D] gives y [..., E].

    holds: whether operands are still of the kinds that were recorded, for the backward.
    """

    def __init__(
        self, decision: Decision, activation: Activation, record: bool, repeat: StepRepeat, holds: Holds
    ) -> None:
        super().__init__(decision, activation, record)
        self._repeat, self._holds = repeat, holds

    def forward(self, tensors: Tensors) -> tuple[FfnOutput, Sequence[Tensor | None]]:
        x, found = tensors[0], self._repeat.forward(*tensors)
        if found is not None:
            note_path(self.decision.path, x, tensors[1].shape[0], reason=self.decision.reason)
            return found
        args = FfnArgs(flattened(x), *tensors[1:], self.activation)
        output, saved = train(args, self.decision, self.record)
        return output._replace(y=unflattened(output.y, x)), saved

    def gradients(self, call: BackwardCall) -> Gradients:
        found = self._replayed(call)
        if found is not None:
            return found
        (x, *others), grad_y, *_ = call
        flat = flattened(x)
        if grad_y is not None:
            grad_y = grad_y.reshape(flat.shape[0], -1)
        grad_x, *found = _eager_gradients(self.step, call._replace(saved=(flat, *others), grad_y=grad_y))
        return None if grad_x is None else grad_x.view(x.shape), *found

    def _replayed(self, call: BackwardCall) -> Gradients | None:
        """The gradients, launched as an earlier backward of this kind was; None where there is more to it."""
        saved, grad_y, grad_l1, needed = call
        if grad_y is None or accumulates_in_place() or torch.is_grad_enabled():
            return None
        tensors, kept = saved[:OPERANDS], Saved(*saved[OPERANDS:])
        # Weights may have been laid out in another way since, and hooks may hand back anything.
        if not only_values_matter(call.tensors) or not self._holds(tensors):
            return None
        found = self._repeat.backward(tensors, kept, grad_y, grad_l1, FfnArgs(*needed, None))
        if found is not None:
            decision = self.decision
            decision.layer.note("backward", decision.path, decision.reason, decision.reading)
            note_path(decision.path, saved[0], saved[1].shape[0], "backward", decision.reason)
        return found


def _is_open(decision: Decision) -> bool:
    """Whether the step decides when it runs."""
    return decision.path == "auto" and get_backend(decision.backend).rules == "gpu"


def _is_stand_in(tensor: Tensor) -> bool:
    return tensor.stride(-1) == 0


def _eager_gradients(step: Step, call: BackwardCall) -> Gradients:
    """Through the op only where somebody differentiates this, transforms it, or looks."""
    if torch.is_grad_enabled() or not only_values_matter(call.tensors):
        if step.decision is not None:
            call.saved[-2]._twell_decision = step.decision
        return gradients_of(step, call)
    into = existing(step, call)
    return without_the_op(step, call, *(() if into is None else (into,)))


def run_training_step(args: FfnArgs, decision: Decision, record: bool) -> FfnOutput:
    """An eager step on a sparse path, with its backward; or one that decides when it runs."""
    checkpointed = _is_open(decision) and saving_observer() == "checkpoint"
    way = (_Checkpointed if checkpointed else _Once)(decision, args.activation, record)
    return run_step(way, args[:-1])


def run_step(way: _Once, tensors: Tensors) -> FfnOutput:
    return FfnOutput(*_Step.apply(way, *tensors))


class PreparedStep(Prepared):
    """Training steps that launch what was launched before."""

    def __init__(self, decided: Decided, repeat: StepRepeat, record: bool) -> None:
        super().__init__(decided, Kinds(decided.tensors))
        self._repeat, self._record = repeat, record
        # Without the layer, which this belongs to: it would not be freed at once.
        self._decision = decided.decision._replace(read=False, layer=None)

    def _note(self, layer: LayerState) -> None:
        layer.ran["forward"] = self._outcome  # its backward is the same one again

    def _compute(self, tensors: Tensors, layer: LayerState) -> FfnOutput:
        decision = self._decision._replace(layer=layer)
        step = decision, self._activation, self._record
        return run_step(RepeatedStep(*step, self._repeat, self._operands.hold), tensors)
