"""The registered ops that every sparse backend runs behind; `twell.functional` is the public face.

    torch.ops.twell.ffn             the block
    torch.ops.twell.ffn_train       the block, with what its backward wants saved
    torch.ops.twell.ffn_backward    gradients of the block from that

They take tokens flattened to [M, D] and a resolved plan. With `record`, the first two also return the L1
value and per-neuron firing counts, else empty tensors. Their derivatives are reverse-mode; a tensor that
carries a tangent of forward-mode differentiation is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._errors import reject
from ._observers import operations_are_observed
from .accumulation import existing_gradients
from .activations import Activation
from .backends import get_backend
from .kernels.dense import dense_backward
from .layer_state import LayerState, layer_of
from .policy import decide_backward, decide_inside
from .prepared import IN_GRAPH, Decided, PreparedDense, PreparedSparse
from .problem import (
    Decision,
    Existing,
    FfnArgs,
    FfnOutput,
    Gradients,
    Saved,
    are_plain,
    is_trained,
    source_of,
)

_SIGNATURE = (
    "Tensor x, Tensor up, Tensor down, Tensor? gate, Tensor? up_bias, Tensor? down_bias, Tensor? gate_bias"
)
OPERANDS = 7
_STAND_IN_OUTPUTS = 64  # a number of outputs that every kernel takes
_PLAN = "str activation, str path, int block_rows, str backend"
_library = torch.library.Library("twell", "DEF")
_library.define(f"ffn({_SIGNATURE}, {_PLAN}, bool record) -> (Tensor, Tensor, Tensor)")
_library.define(f"ffn_train({_SIGNATURE}, {_PLAN}, bool record) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
_library.define(
    f"ffn_backward(Tensor? grad_y, Tensor? grad_l1, {_SIGNATURE}, Tensor lists, Tensor counts, "
    "str activation, int block_rows, str backend, bool[] needed) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def args_of(tensors: tuple[Tensor | None, ...], activation: str) -> FfnArgs:
    args = FfnArgs(*tensors, _activation(activation))
    args.activation.check_gated(args.gate is not None)
    return args


_activation = lru_cache(maxsize=256)(Activation.parse)  # one object for all calls, as `_plan`


def _refuse_tangents(tensors: list[Tensor | None]) -> None:
    """Eager calls run dense in forward mode; a graph that was compiled without it must not drop a tangent."""
    if forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            reject(
                "a tensor of torch.ops.twell",
                "a tangent of forward-mode differentiation",
                "tensors without tangents; twell.ffn, compiled inside of the dual level, differentiates them",
            )


def _forward(*inputs) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, activation, path, block_rows, backend, record = inputs
    _refuse_tangents(tensors)
    args, kernels = args_of(tensors, activation), get_backend(backend)
    layer = layer_of(source_of(args.selector))
    repeats = kernels.repeat is not None and not record
    if repeats:
        prepared = layer.prepared.get((args.x.shape, IN_GRAPH))
        plan = _plan(path, block_rows, backend)
        output = None if prepared is None else prepared.run(args[:-1], args.activation, plan, layer)
        if output is not None:
            return output.y, *_no_statistics(args.x)
    decision = decide_inside(args, path, block_rows, backend, training=False, record=record, layer=layer)
    y, l1, firing = kernels.forward(args, decision, record)
    if repeats and decision.ahead and not is_trained(args[:-1]):
        _prepare(Decided(args[:-1], args.activation, plan, decision), args, layer)
    return (y, l1, firing) if record else (y, *_no_statistics(args.x))


def _prepare(decided: Decided, args: FfnArgs, layer: LayerState) -> None:
    """Later calls of the op like this one, which has just run, decide nothing again."""
    decision, prepared = decided.decision, None
    if decision.path == "dense":
        prepared = PreparedDense(decided, tuned=False)
    elif args.x.is_contiguous():
        repeat = get_backend(decision.backend).repeat(args, decision, True)
        prepared = None if repeat is None else PreparedSparse(decided, repeat)
    if prepared is not None:
        layer.keep_prepared(args.x.shape, IN_GRAPH, prepared)


@lru_cache(maxsize=256)
def _plan(*plan: str | int) -> tuple[str | int, ...]:
    """One object for all calls with this plan: prepared calls know theirs by its identity."""
    return plan


def _train_forward(*inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *tensors, activation, path, block_rows, backend, record = inputs
    _refuse_tangents(tensors)
    args = args_of(tensors, activation)
    decision = decide_inside(args, path, block_rows, backend, training=True, record=record)
    output, saved = train(args, decision, record)
    # A compiled graph carries tensors only; this one is ours, and stays the same object until the backward.
    saved.lists._twell_decision = decision
    statistics = (output.l1, output.firing) if record else _no_statistics(args.x)
    return output.y, *statistics, *saved


def train(args: FfnArgs, decision: Decision, record: bool) -> tuple[FfnOutput, Saved]:
    kernels = get_backend(decision.backend)
    if kernels.training is not None:
        return kernels.training.forward(args, decision, record)
    return kernels.forward(args, decision, record), Saved(*(integers(args.x, 0) for _ in range(2)))


def _fake(x: Tensor, up: Tensor, down: Tensor, *rest) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty(x.shape[0], down.shape[0])
    record = rest[-1]
    if not record:
        return y, *_no_statistics(x)
    l1 = x.new_empty((), dtype=_statistics_dtype(x))
    return y, l1, x.new_empty(up.shape[0], dtype=torch.int64)


def _train_fake(x: Tensor, up: Tensor, *rest) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    block_rows, backend = rest[-3], rest[-2]
    training = get_backend(backend).training
    sizes = (0, 0) if training is None else training.sizes(x.shape[0], up.shape[0], block_rows)
    return *_fake(x, up, *rest), *(integers(x, size) for size in sizes)


def _no_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(0, dtype=_statistics_dtype(x)), x.new_empty(0, dtype=torch.int64)


def integers(x: Tensor, size: int) -> Tensor:
    return x.new_empty(size, dtype=torch.int32)


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _gradients(*inputs) -> tuple[Tensor, ...]:
    """The gradients as the op returns them: empty where one is not needed."""
    grad_y, grad_l1, *tensors, lists, counts, activation, block_rows, backend, needed = inputs
    _refuse_tangents([grad_y, grad_l1, *tensors])
    args = args_of(tensors, activation)
    step = Step(activation, block_rows, backend, getattr(lists, "_twell_decision", None))
    found = _backward(step, args, Saved(lists, counts), grad_y, grad_l1, FfnArgs(*needed, None))
    return tuple(args.x.new_empty(0) if gradient is None else gradient for gradient in found)


class Step(NamedTuple):
    """A forward as its backward knows it, besides tensors; decision: None where nothing could tell."""

    activation: str
    block_rows: int
    backend: str
    decision: Decision | None


class BackwardCall(NamedTuple):
    """What autograd hands to a backward.

    saved:   operands, lists and counts.
    needed:  which operands get a gradient.
    """

    saved: Sequence[Tensor | None]
    grad_y: Tensor | None
    grad_l1: Tensor | None
    needed: list[bool]

    @property
    def tensors(self) -> Sequence[Tensor | None]:
        return *self.saved, self.grad_y, self.grad_l1


def _backward(
    step: Step,
    args: FfnArgs,
    saved: Saved,
    grad_y: Tensor | None,
    grad_l1: Tensor | None,
    wanted: FfnArgs,
    *into: Existing,
) -> Gradients:
    """The backend's own backward, the gradient of `down` laid out like `down`; grad_y None: the output has no
    part in the loss."""
    kernels, down = get_backend(step.backend), args.down
    if kernels.training is None:
        return laid_out(dense_backward(args, grad_y, grad_l1, wanted), down)
    if grad_y is None:
        args, grad_y = _without_output(args)
    decision = decide_backward(args, step.block_rows, step.backend, step.decision)
    return laid_out(kernels.training.backward(args, saved, decision, grad_y, grad_l1, wanted, *into), down)


def _without_output(args: FfnArgs) -> tuple[FfnArgs, Tensor]:
    """The block with zeros in the place of `down`, and of grad_y: an Inf in the real one times a gradient
    of 0 would be NaN, where autograd never multiplies the two."""
    tokens, neurons = args.x.shape[0], args.up.shape[0]
    down = args.up.new_zeros(neurons, _STAND_IN_OUTPUTS).mT
    return args._replace(down=down, down_bias=None), args.x.new_zeros(tokens, _STAND_IN_OUTPUTS)


def laid_out(gradients: Gradients, down: Tensor) -> Gradients:
    """`gradients`, with the gradient of `down` laid out like `down`."""
    grad_down = gradients[2]
    if grad_down is None:
        return gradients
    grad_down = grad_down.mT.contiguous().mT if down.mT.is_contiguous() else grad_down.contiguous()
    return (*gradients[:2], grad_down, *gradients[3:])


def _fake_gradients(*inputs) -> tuple[Tensor, ...]:
    _grad_y, _grad_l1, *tensors, _lists, _counts, _activation, _block_rows, _backend, needed = inputs
    found = []
    for place, (tensor, wanted) in enumerate(zip(tensors, needed, strict=True)):
        if not wanted or tensor is None:
            found.append(tensors[0].new_empty(0))
        elif place == 2 and tensor.mT.is_contiguous():
            found.append(tensor.new_empty(tensor.shape[1], tensor.shape[0]).mT)
        else:
            found.append(tensor.new_empty(tensor.shape))
    return tuple(found)


def _save(ctx, inputs, output) -> None:
    """For `ffn`, and for `ffn_train`, which also gives lists and counts."""
    *tensors, activation, _path, block_rows, backend, record = inputs
    _y, _l1, *not_differentiable = output
    ctx.save_for_backward(*tensors, *output[3:])
    ctx.activation, ctx.block_rows, ctx.backend, ctx.record = activation, block_rows, backend, record
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*not_differentiable)


def needed_of(wanted: Sequence[bool], grad_y: Tensor | None, grad_l1: Tensor | None) -> list[bool]:
    """Which operands get a gradient: as stock autograd has it, only y gives one to `down` and `down_bias`."""
    needed = FfnArgs(*wanted, None)
    if grad_y is None:
        needed = needed._replace(down=False, down_bias=False)
    return [wanted and (grad_y is not None or grad_l1 is not None) for wanted in needed[:-1]]


def _differentiate(ctx, grad_y: Tensor | None, grad_l1: Tensor | None, *_rest) -> Gradients:
    """`ffn` saves no lists and computes densely, from traceable operations that a compiled backward fuses;
    `ffn_train` computes from its lists."""
    no_plan = (None,) * 5  # the arguments after the operands
    grad_l1 = grad_l1 if ctx.record else None
    needed = needed_of(ctx.needs_input_grad[:OPERANDS], grad_y, grad_l1)
    if not any(needed):
        return *(None,) * OPERANDS, *no_plan
    saved = ctx.saved_tensors  # once: checkpoints hand them out once
    if len(saved) == OPERANDS:
        args = args_of(saved, ctx.activation)
        return *dense_backward(args, grad_y, grad_l1, FfnArgs(*needed, args.activation)), *no_plan
    step = Step(ctx.activation, ctx.block_rows, ctx.backend, getattr(saved[-2], "_twell_decision", None))
    return *gradients_of(step, BackwardCall(saved, grad_y, grad_l1, needed)), *no_plan


def gradients_of(step: Step, call: BackwardCall) -> Gradients:
    """The operands' gradients, from the op unless they are added to existing ones."""
    into = existing(step, call)
    if into is not None:
        return without_the_op(step, call, into)
    tell_flop_counters()
    plan = step.activation, step.block_rows, step.backend
    found = backward_op(call.grad_y, call.grad_l1, *call.saved, *plan, call.needed)
    return tuple(gradient if wanted else None for gradient, wanted in zip(found, call.needed, strict=True))


def tell_flop_counters() -> None:
    """Tell running flop counters what the ops count as, before they meet one."""
    if (
        "torch.utils.flop_counter" in sys.modules
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack()
    ):
        from .flops import tell_active_counters  # not before: it imports Triton

        tell_active_counters()


def existing(step: Step, call: BackwardCall) -> Existing | None:
    """Gradients to add to, if that is asked for, the backend can, and nobody looks for the op."""
    training = get_backend(step.backend).training
    if training is None or not training.adds or not only_values_matter(call.tensors):
        return None
    args = args_of(call.saved[:OPERANDS], step.activation)
    return existing_gradients(args, FfnArgs(*call.needed, None))


def only_values_matter(tensors: Sequence[Tensor | None]) -> bool:
    """Whether nobody observes, and all are plain tensors (batches of gradients have no storage)."""
    return (
        not operations_are_observed()
        and are_plain(tensors)
        and all(t is None or torch._C._has_storage(t) for t in tensors)
    )


def without_the_op(step: Step, call: BackwardCall, *into: Existing) -> Gradients:
    """The backward without the op, which must not change what it is given."""
    (*tensors, lists, counts), grad_y, grad_l1, needed = call
    _refuse_tangents([grad_y, grad_l1, *tensors])
    args = args_of(tensors, step.activation)
    return _backward(step, args, Saved(lists, counts), grad_y, grad_l1, FfnArgs(*needed, None), *into)


def _save_for_second(ctx, inputs, output) -> None:
    grad_y, grad_l1, *tensors, _lists, _counts, activation, _block_rows, _backend, needed = inputs
    ctx.save_for_backward(grad_y, grad_l1, *tensors)
    ctx.activation, ctx.needed = activation, needed
    ctx.set_materialize_grads(False)


def _second(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Second and higher derivatives: dense, through autograd."""
    further = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases: derivatives with respect to them stay connected to whatever the operands came from.
        saved = [None if t is None else t.view_as(t) for t in ctx.saved_tensors]
        wanted = ctx.needs_input_grad[: len(saved)]
        grad_y, grad_l1, *tensors = saved
        args = args_of(tensors, ctx.activation)
        found = dense_backward(args, grad_y, grad_l1, FfnArgs(*ctx.needed, args.activation))
        # A gradient may not depend on what is differentiated: `down_bias`'s depends on grad_y alone.
        pairs = [
            (gradient, weight)
            for gradient, weight in zip(found, grads, strict=True)
            if gradient is not None and gradient.requires_grad and weight is not None
        ]
        inputs = [t for t, w in zip(saved, wanted, strict=True) if w]
        results: tuple[Tensor | None, ...] = (None,) * len(inputs)
        if pairs and inputs:
            outputs, weights = zip(*pairs, strict=True)
            results = torch.autograd.grad(outputs, inputs, weights, create_graph=further, allow_unused=True)
    left = iter(results)
    return (*(next(left) if w else None for w in wanted), None, None, None, None, None, None)


_library.impl("ffn", _forward, "CompositeExplicitAutograd")
_library.impl("ffn_train", _train_forward, "CompositeExplicitAutograd")
_library.impl("ffn_backward", _gradients, "CompositeExplicitAutograd")
torch.library.register_fake("twell::ffn", _fake, lib=_library)
torch.library.register_fake("twell::ffn_train", _train_fake, lib=_library)
torch.library.register_fake("twell::ffn_backward", _fake_gradients, lib=_library)
torch.library.register_autograd("twell::ffn", _differentiate, setup_context=_save, lib=_library)
torch.library.register_autograd("twell::ffn_train", _differentiate, setup_context=_save, lib=_library)
torch.library.register_autograd("twell::ffn_backward", _second, setup_context=_save_for_second, lib=_library)

ffn_op = torch.ops.twell.ffn.default
train_op = torch.ops.twell.ffn_train.default
backward_op = torch.ops.twell.ffn_backward.default
