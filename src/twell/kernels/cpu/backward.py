"""The backward pass on the CPU, computed on the active (token, neuron) pairs only.

One dense product remains, the selector's: it says which pairs are active. Everything else is a number per
pair: up values and gradients of hidden values are sampled dot products, the gradient of x sums weight rows
per token, and the gradients of the weights sum rows of x and of grad_y per neuron.

A skipped pair contributes an exact zero, so, as in the forward, a NaN or Inf that meets only inactive neurons
goes no further; one that meets an active neuron reaches its gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..._log import note_path
from ..._observers import operations_are_observed
from ...activations import Activation, largest_at_most
from ...problem import Decision, FfnArgs, Gradients, Saved, are_plain, is_trained
from ..dense import dense_backward
from .csr import RowPattern, RowSums, sampled_dot
from .weights import site_of

CHUNK_TOKENS = 2048  # bounds the memory; M 2048, D 1024, H 4096, 1% active: chunks of 512 cost 18% more


def cpu_backward(
    args: FfnArgs, saved: Saved, decision: Decision, grad_y: Tensor, grad_l1: Tensor | None, needed: FfnArgs
) -> Gradients:
    """Gradients of (x, up, down, gate, up_bias, down_bias, gate_bias), as `dense_backward` defines them.

    saved:     empty; the backward finds the active pairs by itself.
    decision:  "row" computes on the active pairs, "dense" does not. Backend "dense" runs `dense_backward` as
               it is, and so do operations that are observed or differentiated again.

    16-bit operands are computed in float32 and rounded once, except on CPUs that multiply 16-bit matrices in
    hardware.
    """
    tensors = (*args[:-1], grad_y)
    more_than_values = operations_are_observed() or not are_plain(tensors) or is_trained(tensors)
    if decision.backend == "dense" or more_than_values:
        return dense_backward(args, grad_y, grad_l1, needed)
    site = site_of(args)
    dtype = wide = args.x.dtype
    if site.low_precision and not site.native_16_bit:
        # bf16, D 512, H 2048, 8 / 16 / 256 tokens, dense: 84 / 157 / 2,604 ms, in float32 7 / 7 / 66.
        wide = torch.float32
    with torch.autocast("cpu", enabled=False):
        args = FfnArgs(*(None if t is None else t.to(wide) for t in args[:-1]), args.activation)
        note_path(decision.path, args.x, args.up.shape[0], "backward", decision.reason)
        backward = dense_backward if decision.path == "dense" else _sparse_backward
        gradients = backward(args, grad_y.to(wide), grad_l1, needed)
    return tuple(None if gradient is None else gradient.to(dtype) for gradient in gradients)


def _sparse_backward(args: FfnArgs, grad_y: Tensor, grad_l1: Tensor | None, needed: FfnArgs) -> Gradients:
    """`dense_backward` on the active pairs, in float32 or float64; bias gradients come in float64."""
    tokens = args.x.shape[0]
    neuron_major = args.down.mT.is_contiguous()
    grad_y = grad_y.contiguous()
    args = args._replace(
        x=args.x.contiguous(),
        up=args.up.contiguous(),
        down=args.down.mT.contiguous().mT,
        gate=None if args.gate is None else args.gate.contiguous(),
    )
    l1_step = None if grad_l1 is None else (grad_l1 / tokens).to(grad_y.dtype)
    grad_x = torch.empty_like(args.x) if needed.x else None
    sums: list[Tensor | None] = [None] * 5
    chunks = -(-tokens // CHUNK_TOKENS)
    for index in range(chunks):
        rows = slice(tokens * index // chunks, tokens * (index + 1) // chunks)
        pairs = _Pairs(args._replace(x=args.x[rows]), grad_y[rows], l1_step)
        if grad_x is not None:
            grad_x[rows] = pairs.grad_x()
        parts = pairs.weight_sums(needed)
        sums = [new if old is None else old.add_(new) for old, new in zip(sums, parts, strict=True)]
    up, down, gate, up_bias, gate_bias = sums
    if down is not None:
        down = down.mT if neuron_major else down.mT.contiguous()
    down_bias = grad_y.sum(0) if needed.down_bias else None
    return grad_x, up, down, gate, up_bias, down_bias, gate_bias


class _Pairs:
    """The active pairs of one chunk of tokens, ordered by neuron, with their values and gradients.

    args: contiguous x [m, D] and neuron-major weights; grad_y [m, D] contiguous.
    Ordered by neuron, each weight row is read once and only the chunk's tokens are read repeatedly. Dot
    products of 512 tokens, 10% active, by neuron / by token: D 4096, H 11008 159 / 394 ms; D 1024, H 4096
    14 / 19.
    """

    def __init__(self, args: FfnArgs, grad_y: Tensor, l1_step: Tensor | None) -> None:
        activation = args.activation
        pre = torch.mm(args.selector, args.x.mT)
        if args.selector_bias is not None:
            pre += args.selector_bias.unsqueeze(1)
        active = active_pairs(pre, activation)
        pattern = RowPattern.of(active, int(torch.count_nonzero(active)))
        pre = pre.view(-1).index_select(0, pattern.flat)
        self._args, self._grad_y, self._pattern = args, grad_y, pattern
        self._neurons = pattern.flat // max(args.x.shape[0], 1)

        activated = activation(pre)
        self._hidden, up, factor = activated, None, None
        if args.gate is not None:
            up = sampled_dot(args.up, args.x, pattern, pattern.columns)
            if args.up_bias is not None:
                up += args.up_bias.index_select(0, self._neurons)
            factor = activation.factor(up)
            self._hidden = activated * factor
        grad_hidden = sampled_dot(args.down.mT, grad_y, pattern, pattern.columns)
        if l1_step is not None:
            grad_hidden += self._hidden.sign() * l1_step
        if up is None:
            self._grad_up, self._grad_gate = activation.backward(grad_hidden, pre), None
        else:
            self._grad_up = activation.factor_backward(grad_hidden * activated, up)
            self._grad_gate = activation.backward(grad_hidden * factor, pre)

    def grad_x(self) -> Tensor:
        """[m, D]: sums per token, so the pairs are sorted by token first."""
        args, (neurons, tokens) = self._args, self._pattern.shape
        flat, order = torch.sort(self._pattern.columns * neurons + self._neurons)
        pattern = RowPattern(flat, torch.Size((tokens, neurons)))
        sums = RowSums(pattern.offsets)
        grad_x = sums.of(args.up, pattern.columns, self._grad_up.index_select(0, order))
        if args.gate is not None:
            grad_x += sums.of(args.gate, pattern.columns, self._grad_gate.index_select(0, order))
        return grad_x

    def weight_sums(self, needed: FfnArgs) -> tuple[Tensor | None, ...]:
        """Summed over these tokens: up [H, D], down [H, D], gate [H, D], up_bias [H], gate_bias [H]."""
        sums, columns = RowSums(self._pattern.offsets), self._pattern.columns

        def total(values: Tensor) -> Tensor:
            # Float64 costs next to nothing here, and a neuron may be active for every token. The outer cast:
            # bincount of no pairs returns integers.
            return torch.bincount(self._neurons, values.double(), self._pattern.shape[0]).double()

        gated = self._grad_gate is not None
        return (
            sums.of(self._args.x, columns, self._grad_up) if needed.up else None,
            sums.of(self._grad_y, columns, self._hidden) if needed.down else None,
            sums.of(self._args.x, columns, self._grad_gate) if gated and needed.gate else None,
            total(self._grad_up) if needed.up_bias else None,
            total(self._grad_gate) if gated and needed.gate_bias else None,
        )


def active_pairs(pre: Tensor, activation: Activation) -> Tensor:
    """bool, shaped like `pre`; a NaN counts as active."""
    return (pre <= largest_at_most(activation.threshold, pre.dtype)).logical_not_()
