"""Backward kernels that add straight to existing weight gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .problem import Existing, FfnArgs

_users = 0  # open `accumulate_in_place` blocks; not per thread, since backwards run in their own threads


@contextmanager
def accumulate_in_place() -> Iterator[None]:
    """Let sparse backwards on a GPU add weight gradients straight to an existing `weight.grad`.

        for batch in batches[:-1]:
            with twell.accumulate_in_place():
                loss_of(batch).backward()

    Autograd would write each gradient and then add it. This saves that memory and traffic and, with
    `weight.grad_dtype = torch.float32` on 16-bit weights (torch 2.10 or later), the rounding in between.

    Autograd still handles a first gradient, steps that run dense, biases, weights with hooks, weights that
    were cast or otherwise derived, and every weight of a block whose `down` is not neuron-major. It also
    handles streams other than the device's default, where it knows who waits for whom. `torch.autograd.grad`
    and `.backward(inputs=...)` leave the `.grad` of other weights alone. Wrappers that wait for gradients to
    pass through autograd (DDP outside of `no_sync`, FSDP) do not see these.
    """
    global _users
    _users += 1
    try:
        yield
    finally:
        _users -= 1


def accumulates_in_place() -> bool:
    """Whether an `accumulate_in_place` block is open."""
    return _users > 0


def existing_gradients(args: FfnArgs, needed: FfnArgs) -> Existing | None:
    """The gradients to add to; None unless every weight that needs one has one."""
    if not _users or torch.is_grad_enabled() or not _on_default_stream(args.x):
        return None
    wanted = [place for place in ("up", "down", "gate") if getattr(needed, place)]
    try:
        wanted = [place for place in wanted if _is_accumulated(getattr(args, place))]
    except (RuntimeError, ValueError):  # `autograd.grad` runs, or this is no trained leaf: autograd does it
        return None
    found = {place: _gradient_of(getattr(args, place), place == "down") for place in wanted}
    dtypes = {None if gradient is None else gradient.dtype for gradient in found.values()}
    if len(dtypes) != 1 or dtypes <= {None} or not dtypes <= {torch.float32, args.x.dtype}:
        return None
    # A weight used in two places has one gradient, and two products would add to it at the same time.
    if len({gradient.data_ptr() for gradient in found.values()}) != len(found):
        return None
    return Existing(*(found.get(place) for place in Existing._fields))


def _on_default_stream(x: Tensor) -> bool:
    return not x.is_cuda or torch.cuda.current_stream(x.device) == torch.cuda.default_stream(x.device)


def _is_accumulated(weight: Tensor) -> bool:
    """Whether the running backward adds to this leaf's `.grad`; raises if it only returns the gradient."""
    if not weight.is_leaf:
        raise ValueError("no leaf")
    return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(weight).node)


def _gradient_of(weight: Tensor, transposed: bool) -> Tensor | None:
    """`weight.grad` if kernels can add to it and nobody needs it to pass through autograd."""
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return None
    gradient = weight.grad
    if type(gradient) is not Tensor or gradient.is_sparse or gradient.device != weight.device:
        return None
    if gradient.requires_grad:  # made with create_graph: others may still differentiate it
        return None
    view = gradient.mT if transposed else gradient
    # The kernels read 16 bytes at a time.
    fits = view.is_contiguous() and view.data_ptr() % 16 == 0
    return gradient if fits else None
