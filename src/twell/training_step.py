"""Eager training steps: the block and its backward as autograd functions, without the dispatcher.

    one step             decided before it runs, or when it runs
    inside a checkpoint  computed twice, maybe decided twice
    repeated             launches what an earlier step launched, both ways

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
from .ops import (
    OPERANDS,
    Step,
    args_of,
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
from .problem import Decision, FfnArgs, FfnOutput, Gradients, Saved, StepRepeat


class _TrainingStep(torch.autograd.Function):
    """`ffn_train` for eager steps that nobody watches: without the dispatcher, and with a decision that
    reaches the backward as it is."""

    @staticmethod
    def forward(
        ctx, decision: Decision, activation: Activation, record: bool, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        args = FfnArgs(*tensors, activation)
        ctx.open = _is_open(decision)
        if ctx.open:
            decision = _decide_again(args, decision, record)
        output, saved = train(args, decision, record)
        saved.lists._twell_decision = decision
        ctx.save_for_backward(*tensors, *saved)
        _keep(ctx, decision, activation, output)
        return tuple(output)

    @staticmethod
    def backward(
        ctx, grad_y: Tensor | None, grad_l1: Tensor | None, _grad_firing: None
    ) -> tuple[Tensor | None, ...]:
        def gradients(saved: Sequence[Tensor | None], needed: list[bool]) -> Gradients:
            step = ctx.step
            if ctx.open:
                # Unknown hooks may have computed it again, decided otherwise: its tensors know, or nobody.
                step = step._replace(decision=getattr(saved[-2], "_twell_decision", None))
            return _eager_gradients(step, saved, grad_y, grad_l1, needed)

        return _differentiate(ctx, grad_y, grad_l1, gradients)


class _CheckpointedStep(torch.autograd.Function):
    """A step inside a checkpoint, which is computed twice and may be decided twice: both ways save tensors
    of the same shapes, stand-ins where there is nothing, so that dense steps compute nothing a third time.
    A stand-in has one element, expanded; that tells which way went last."""

    @staticmethod
    def forward(
        ctx, decision: Decision, activation: Activation, record: bool, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        args = FfnArgs(*tensors, activation)
        decision = _decide_again(args, decision, record)
        tokens, neurons = args.x.shape[0], args.up.shape[0]
        if decision.path == "dense":
            output, kept = dense_forward_keeping(args, record, decision.reason)
            sizes = get_backend(decision.backend).training.sizes(tokens, neurons, decision.block_rows)
            saved = Saved(*(integers(args.x, 1).expand(size) for size in sizes))
        else:
            output, saved = train(args, decision, record)
            stand_in = args.x.new_empty(1, 1).expand(tokens, neurons)
            kept = DenseActivations(stand_in, None if args.gate is None else stand_in)
        ctx.save_for_backward(*tensors, *saved, *kept)
        _keep(ctx, decision, activation, output)
        return tuple(output)

    @staticmethod
    def backward(
        ctx, grad_y: Tensor | None, grad_l1: Tensor | None, _grad_firing: None
    ) -> tuple[Tensor | None, ...]:
        def gradients(everything: Sequence[Tensor | None], needed: list[bool]) -> Gradients:
            *saved, pre, up = everything
            ran_dense = _is_stand_in(saved[-2])
            if ran_dense == _is_stand_in(pre):
                raise RuntimeError("a checkpoint handed back copies of what a sparse training step saved")
            if not ran_dense:
                step = ctx.step._replace(decision=ctx.step.decision._replace(path="block"))
                return _eager_gradients(step, saved, grad_y, grad_l1, needed)
            args = args_of(saved[:OPERANDS], ctx.step.activation)
            # For second derivatives from the operands, which are connected to whatever they came from.
            kept = None if torch.is_grad_enabled() else DenseActivations(pre, up)
            note_path("dense", args.x, args.up.shape[0], "backward", "as its forward")
            return laid_out(dense_backward(args, grad_y, grad_l1, FfnArgs(*needed, None), kept), args.down)

        return _differentiate(ctx, grad_y, grad_l1, gradients)


_OWN = 3  # arguments of the two before their tensors


def _differentiate(
    ctx,
    grad_y: Tensor | None,
    grad_l1: Tensor | None,
    gradients: Callable[[Sequence[Tensor | None], list[bool]], Gradients],
) -> Gradients:
    """What the backward of a step returns; gradients: (saved, needed) -> those of its operands."""
    needed = needed_of(ctx.needs_input_grad[_OWN:], grad_y, grad_l1)
    if not any(needed):
        return (None,) * (_OWN + OPERANDS)
    saved = ctx.saved_tensors  # once: checkpoints hand them out once
    return *(None,) * _OWN, *gradients(saved, needed)


def _is_open(decision: Decision) -> bool:
    """Whether it is to be taken when the step runs."""
    return decision.path == "auto" and get_backend(decision.backend).rules == "gpu"


def _decide_again(args: FfnArgs, decision: Decision, record: bool) -> Decision:
    plan = decision.path, decision.block_rows, decision.backend
    return decide_inside(args, *plan, training=True, record=record, layer=decision.layer)


def _keep(ctx, decision: Decision, activation: Activation, output: FfnOutput) -> None:
    ctx.step = Step(activation.spec, decision.block_rows, decision.backend, decision)
    ctx.set_materialize_grads(False)
    if output.firing is not None:
        ctx.mark_non_differentiable(output.firing)


def _is_stand_in(tensor: Tensor) -> bool:
    return tensor.stride(-1) == 0


def _eager_gradients(
    step: Step,
    saved: Sequence[Tensor | None],
    grad_y: Tensor | None,
    grad_l1: Tensor | None,
    needed: list[bool],
) -> Gradients:
    """Through the op only where somebody differentiates this, transforms it, or looks."""
    if torch.is_grad_enabled() or not only_values_matter((*saved, grad_y, grad_l1)):
        if step.decision is not None:
            saved[-2]._twell_decision = step.decision
        return gradients_of(step, saved, grad_y, grad_l1, needed)
    into = existing(step, [*saved, grad_y, grad_l1], needed)
    more = () if into is None else (into,)
    return without_the_op(step, saved, grad_y, grad_l1, needed, *more)


def run_training_step(args: FfnArgs, decision: Decision, record: bool) -> FfnOutput:
    """An eager step on a sparse path, with its backward; or one that decides when it runs."""
    checkpointed = _is_open(decision) and saving_observer() == "checkpoint"
    step = _CheckpointedStep if checkpointed else _TrainingStep
    return FfnOutput(*step.apply(decision, args.activation, record, *args[:-1]))


class _RepeatedStep(torch.autograd.Function):
    """A step that launches what an earlier one launched, both ways; x may have leading dimensions."""

    @staticmethod
    def forward(
        ctx,
        repeat: StepRepeat,
        holds: Callable[[Sequence[Tensor | None]], bool],
        decision: Decision,
        activation: Activation,
        record: bool,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, found = tensors[0], repeat.forward(*tensors)
        if found is None:
            flat = FfnArgs(x.reshape(-1, x.shape[-1]), *tensors[1:], activation)
            output, saved = train(flat, decision, record)
            y = torch.ops.aten._unsafe_view(output.y, (*x.shape[:-1], output.y.shape[-1]))
            found = output._replace(y=y), saved
        else:
            note_path(decision.path, x, tensors[1].shape[0], reason=decision.reason)
        output, saved = found
        ctx.save_for_backward(*tensors, *saved)
        ctx.repeat, ctx.holds = repeat, holds
        _keep(ctx, decision, activation, output)
        return tuple(output)

    @staticmethod
    def backward(
        ctx, grad_y: Tensor | None, grad_l1: Tensor | None, _grad_firing: None
    ) -> tuple[Tensor | None, ...]:
        needed = needed_of(ctx.needs_input_grad[_REPEATED:], grad_y, grad_l1)
        nothing = (None,) * _REPEATED
        if not any(needed):
            return (*nothing, *(None,) * OPERANDS)
        x, *others = saved = ctx.saved_tensors
        found = _repeated_gradients(ctx, saved, grad_y, grad_l1, FfnArgs(*needed, None))
        if found is not None:
            return (*nothing, *found)
        flat = x.reshape(-1, x.shape[-1])
        if grad_y is not None:
            grad_y = grad_y.reshape(flat.shape[0], -1)
        grad_x, *found = _eager_gradients(ctx.step, (flat, *others), grad_y, grad_l1, needed)
        return (*nothing, None if grad_x is None else grad_x.view(x.shape), *found)


def _repeated_gradients(
    ctx, saved: Sequence[Tensor | None], grad_y: Tensor | None, grad_l1: Tensor | None, needed: FfnArgs
) -> Gradients | None:
    """As an earlier backward of this kind was run; None where there is more to it."""
    if grad_y is None or accumulates_in_place() or torch.is_grad_enabled():
        return None
    tensors, kept = saved[:OPERANDS], Saved(*saved[OPERANDS:])
    # Weights may have been laid out in another way since, and hooks may hand back anything.
    if not only_values_matter((*saved, grad_y, grad_l1)) or not ctx.holds(tensors):
        return None
    decision, x, up = ctx.step.decision, saved[0], saved[1]
    found = ctx.repeat.backward(tensors, kept, grad_y, grad_l1, needed)
    if found is not None:
        decision.layer.note("backward", decision.path, decision.reason, decision.reading)
        note_path(decision.path, x, up.shape[0], "backward", decision.reason)
    return found


_REPEATED = 5  # arguments of it before its tensors


def repeat_training_step(
    repeat: StepRepeat,
    holds: Callable[[Sequence[Tensor | None]], bool],
    decision: Decision,
    activation: Activation,
    record: bool,
    *tensors: Tensor | None,
) -> FfnOutput:
    """An eager step on (x [..., D], ...), as one of its kind was run before; y [..., E].

    holds: whether operands are still of the kinds that were recorded, for the backward.
    """
    return FfnOutput(*_RepeatedStep.apply(repeat, holds, decision, activation, record, *tensors))
