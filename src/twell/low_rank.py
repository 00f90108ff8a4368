"""LoRA on a block whose frozen weights stay sparse.

A block with low-rank terms is a block with a few more features and outputs:

    x'    = [x, A_gate x, A_up x]
    gate' = [W_gate, s B_gate, 0]       up' = [W_up, 0, s B_up]       down' = [W_down; A_down]
    y'    = block of x', gate', up', down'            y = y'[:E] + s B_down y'[E:]

so every kernel runs it as it is, and the terms are where they belong: inside the activation. Weights are not
copied. Each is stored in a room: [neurons, more columns than it has], and every call writes the adapters'
matrices, B or A of `down`, into the columns behind it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.functional import pad
from torch.utils.weak import WeakIdKeyDictionary

from .problem import PLAIN
from .projections import Projection, Term, base_of, has_weight, is_lora, is_plain, terms_of

# Rooms are this many columns wide, or a multiple: Hopper's kernels take whole steps of 64, others of 8.
_STEP = {"cuda": 64}
_STEP_ELSEWHERE = 8

# Storage -> the `LowRank` that writes into it, weakly. Copies, moved weights and newly loaded ones have other
# storages: nothing is known of those, and they get rooms of their own.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


class Adapted(NamedTuple):
    """A block with low-rank terms, as `run_ffn` takes it.

    tensors:  x', up', down', gate', up_bias, down_bias, gate_bias.
    outputs:  E, without those that were added.
    terms:    of `down`, each with its first column in y'.
    """

    tensors: tuple[Tensor | None, ...]
    outputs: int
    terms: list[tuple[Term, int]]

    def finish(self, y: Tensor) -> Tensor:
        """y' [..., E'] -> y [..., E]."""
        if y.shape[-1] == self.outputs:
            return y
        result = y[..., : self.outputs]
        for term, first in self.terms:
            result = result + term.expand(y[..., first : first + term.rank])
        return result.to(y.dtype).contiguous()


class LowRank:
    """The rooms of a block's weights, and what is written there. Belongs to one `SparseMLP`."""

    def __init__(self) -> None:
        self._features = self._outputs = 0  # columns of the rooms; 0: no rooms
        self._written = _Contents()
        self._token: weakref.ref[_Token] | None = None
        self._lock = threading.Lock()  # another thread finds the rooms filled, not half

    def prepare(
        self, x: Tensor, gate: Projection | None, up: Projection, down: Projection, shift: float = 0.0
    ) -> Adapted | str:
        """The block with the terms that are active now; or why its own modules must run.

        x:      [..., D].
        shift:  what is subtracted before the activation.
        """
        reason = _why_observed()
        if reason is not None:
            return reason
        selectors = [up] if gate is None else [up, gate]
        found = _weights_of(selectors, last=False), _weights_of([down], last=True)
        for weights in found:
            if isinstance(weights, str):
                return weights
        reason = _why_unsuitable(x, [weight.parameter for weights in found for weight in weights.values()])
        if reason is not None:
            return reason
        device = x.device.type
        with self._lock:
            inputs = _Side(list(found[0].values()), self._features, device, last=False)
            outputs = _Side(list(found[1].values()), self._outputs, device, last=True)
            if x.shape[-1] != inputs.own:
                return f"x has {x.shape[-1]} features, the block {inputs.own}"
            reason = self._fill(inputs, outputs)
        if reason is not None:
            return reason

        x = _widened(x, inputs)
        up_bias, *gate_bias = [
            _bias(projection, inputs, shift if projection is selectors[-1] else 0.0)
            for projection in selectors
        ]
        down_bias = base_of(down.module).bias
        if down_bias is not None and outputs.size:
            down_bias = pad(down_bias, (0, outputs.size - outputs.own))
        readers = [_Reader.of(p, side) for p, side in ((up, inputs), (down, outputs), (gate, inputs)) if p]
        columns, biases = [*inputs.columns, *outputs.columns], [up_bias, down_bias, *gate_bias]
        if _trains_only(biases, [x, *(column.matrix for column in columns)]):
            return "nothing but biases is trained"
        rooms = self._connected(x, columns, readers)
        x, up_room, down_room, *gate_room = rooms
        operands = x, up_room, down_room.mT, *(gate_room or [None]), up_bias, down_bias
        terms = [(column.term, column.first) for column in outputs.columns]
        return Adapted((*operands, *(gate_bias or [None])), outputs.own, terms)

    def release(self, gate: Projection | None, up: Projection, down: Projection) -> None:
        """Store weights without rooms again: nothing is added to them any more."""
        for projections, last in (([up] if gate is None else [up, gate], False), ([down], True)):
            for projection in projections:
                weight = _Weight.of(projection, (), last)
                if self._owns(weight.parameter):
                    parameter = weight.parameter
                    parameter.data = weight.by_neuron(weight.by_neuron(parameter.data).contiguous())
        self._features = self._outputs = 0
        self._written = _Contents()

    def _fill(self, inputs: _Side, outputs: _Side) -> str | None:
        """Make the rooms and write into them; or why not."""
        columns = [*inputs.columns, *outputs.columns]
        contents = _Contents(columns)
        pending = self._token is not None and self._token() is not None
        if pending and columns and not contents.same_as(self._written):
            return "a backward with other adapters, or with earlier values of these, is still to come"
        for side in (inputs, outputs):
            for weight in side.weights if side.size else ():
                if not self._has_room(weight, side.size) and not self._lay_out(weight, side):
                    return "its weights serve another block or process too, or a CUDA graph is being captured"
        self._features, self._outputs = inputs.size, outputs.size
        with torch.no_grad():
            # Without terms, what a backward to come will read stays; x' has zeros for it.
            if (columns or not pending) and not contents.same_as(self._written):
                for side in (inputs, outputs):
                    side.clear()
                self._written = contents
            self._written.write(columns)
        return None

    def _has_room(self, weight: _Weight, size: int) -> bool:
        return weight.by_neuron(weight.parameter).stride() == (size, 1) and self._owns(weight.parameter)

    def _owns(self, parameter: Tensor) -> bool:
        owner = _owners.get(parameter.untyped_storage())
        return owner is not None and owner() is self

    def _lay_out(self, weight: _Weight, side: _Side) -> bool:
        parameter = weight.parameter
        owner = _owners.get(parameter.untyped_storage())
        if owner is not None and owner() not in (None, self):
            return False
        if parameter.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        if not parameter.is_cuda and parameter.is_shared():
            return False
        with torch.inference_mode(False), torch.no_grad():
            stored = weight.by_neuron(parameter.data)
            room = stored.new_zeros(stored.shape[0], side.size)
            room[:, : side.own] = stored
            # Through .data: optimisers and tied modules keep the same Parameter.
            parameter.data = weight.by_neuron(room[:, : side.own])
        _owners[parameter.untyped_storage()] = weakref.ref(self)
        self._written = _Contents()
        return True

    def _connected(self, x: Tensor, columns: list[_Column], readers: list[_Reader]) -> list[Tensor]:
        """x' and what `readers` read, in the graph of the adapters' matrices if there is one."""
        matrices = [column.matrix for column in columns]
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in (x, *matrices)):
            return [x, *(reader.read() for reader in readers)]
        token = None if self._token is None else self._token()
        if token is None:
            token = _Token()
            self._token = weakref.ref(token)
        return list(_Rooms.apply(_Step(self, self._written, columns, readers), token, x, *matrices))


class _Weight(NamedTuple):
    """A weight of a block.

    transposed:  whether it is stored with neurons in its second dimension.
    terms:       what is added to its projection.
    """

    module: nn.Module
    parameter: nn.Parameter
    bias: Tensor | None
    transposed: bool
    terms: tuple[Term, ...]

    @classmethod
    def of(cls, projection: Projection, terms: tuple[Term, ...], last: bool) -> _Weight:
        base = base_of(projection.module)
        transposed = projection.linear == last
        return cls(projection.module, base._parameters["weight"], base.bias, transposed, terms)

    def by_neuron(self, tensor: Tensor) -> Tensor:
        """From how it is stored to [neurons, ...], or back."""
        return tensor.mT if self.transposed else tensor


class _Side:
    """The weights that read x', or the one that makes y'.

    own:      columns of a weight.
    size:     of its room, 0 if none is needed.
    columns:  of the adapters' matrices in the rooms.
    """

    def __init__(self, weights: list[_Weight], before: int, device: str, last: bool) -> None:
        self.weights = weights
        self.own = weights[0].by_neuron(weights[0].parameter).shape[1]
        self.columns: list[_Column] = []
        first = self.own
        for weight in weights:
            for term in weight.terms:
                self.columns.append(_Column(self, weight, term, first, last))
                first += term.rank
        step = _STEP.get(device, _STEP_ELSEWHERE)
        self.size = max(before, -(-first // step) * step) if before or self.columns else 0

    def room(self, weight: _Weight) -> Tensor:
        """[neurons, size]; without a room, the weight."""
        if not self.size:
            return weight.by_neuron(weight.parameter)
        rows = weight.by_neuron(weight.parameter).shape[0]
        return weight.parameter.data.as_strided((rows, self.size), (self.size, 1))

    def clear(self) -> None:
        """Zeros in all columns but the weights' own."""
        for weight in self.weights if self.size else ():
            self.room(weight)[:, self.own :].zero_()


class _Column:
    """The matrix of an adapter in a room: B, [neurons, rank], or A of `down`, [rank, neurons].

    first: where its columns begin.
    """

    __slots__ = ("first", "last", "matrix", "scaling", "side", "term", "weight")

    def __init__(self, side: _Side, weight: _Weight, term: Term, first: int, last: bool) -> None:
        self.side, self.weight, self.term, self.first, self.last = side, weight, term, first, last
        self.matrix = term.first.weight if last else term.second.weight
        self.scaling = 1.0 if last else term.scaling

    def write(self) -> None:
        matrix = self.matrix.detach()
        torch.mul(matrix.mT if self.last else matrix, self.scaling, out=self._in(self.side.room(self.weight)))

    def gradient(self, read: list[tuple[slice | None, Tensor]]) -> Tensor | None:
        """That of the matrix; read: which neurons of the room were read, and the gradients of those."""
        if not read:
            return None
        rows, gradient = read[0]
        # A new tensor in any case, which does not keep the gradient of the room alive.
        if rows is None:
            total = self._in(gradient).to(self.matrix.dtype) * self.scaling
        else:
            total = torch.zeros_like(self.matrix)
            for rows, gradient in read:
                total[rows] = self._in(gradient).to(self.matrix.dtype) * self.scaling
        return total.mT if self.last else total

    def _in(self, room: Tensor) -> Tensor:
        return room[:, self.first : self.first + self.term.rank]


class _Contents:
    """What is written in the rooms: of each matrix itself, its version, and where."""

    def __init__(self, columns: Iterable[_Column] = ()) -> None:
        self._matrices = [(column.matrix, column.weight.module) for column in columns]
        self._values = [(column.matrix._version, column.first, column.scaling) for column in columns]
        self._copies: list[Tensor | None] = [None] * len(self._matrices)

    def write(self, columns: list[_Column]) -> None:
        """In every call: some optimisers change a matrix without changing its version. On a CPU values are
        compared first: at H 4096, rank 16, that takes 0.05 ms, writing into rows far apart 1.7 ms."""
        for place, column in enumerate(columns):
            matrix = column.matrix.detach()
            if matrix.device.type != "cpu":
                column.write()
            elif not _equal(matrix, self._copies[place]):
                column.write()
                self._copies[place] = matrix.clone()

    def same_as(self, other: _Contents) -> bool:
        return self._values == other._values and all(
            matrix is its and module is the_others
            for (matrix, module), (its, the_others) in zip(self._matrices, other._matrices, strict=True)
        )


class _Reader(NamedTuple):
    """An operand of the block: a room, or some of its neurons."""

    weight: _Weight
    side: _Side
    rows: slice | None

    @classmethod
    def of(cls, projection: Projection, side: _Side) -> _Reader:
        weight = next(weight for weight in side.weights if weight.module is projection.module)
        return cls(weight, side, projection.rows)

    def read(self) -> Tensor:
        room = self.side.room(self.weight)
        return room if self.rows is None else room[self.rows]


class _Token:
    """Held by every graph whose backward will read the rooms as they are."""

    __slots__ = ("__weakref__",)


class _Step(NamedTuple):
    low_rank: LowRank
    contents: _Contents
    columns: list[_Column]
    readers: list[_Reader]


class _Rooms(torch.autograd.Function):
    """x', *matrices -> x' and what the readers read."""

    @staticmethod
    def forward(ctx, step: _Step, token: _Token, x: Tensor, *matrices: Tensor) -> tuple[Tensor, ...]:
        ctx.step, ctx.token = step, token
        ctx.set_materialize_grads(False)
        rooms = [reader.read().detach() for reader in step.readers]
        trained = {column.weight.module for column in step.columns if column.matrix.requires_grad}
        frozen = [
            room
            for reader, room in zip(step.readers, rooms, strict=True)
            if reader.weight.module not in trained
        ]
        x = x.view_as(x)
        ctx.mark_non_differentiable(*frozen, *([] if ctx.needs_input_grad[2] else [x]))
        return x, *rooms

    @staticmethod
    def backward(ctx, grad_x: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        step = ctx.step
        if not step.contents.same_as(step.low_rank._written):
            raise RuntimeError(
                "adapters of a sparse block were changed or switched between a forward and a second backward"
            )
        ctx.token = None  # the rooms may change from here on
        found = []
        for column, needed in zip(step.columns, ctx.needs_input_grad[3:], strict=True):
            read = [
                (reader.rows, gradient)
                for reader, gradient in zip(step.readers, grads, strict=True)
                if needed and gradient is not None and reader.weight is column.weight
            ]
            found.append(column.gradient(read))
        return None, None, grad_x, *found


def _weights_of(projections: Iterable[Projection], last: bool) -> dict[nn.Module, _Weight] | str:
    """By module, each once, or why its own forward must run."""
    weights: dict[nn.Module, _Weight] = {}
    for projection in projections:
        module = projection.module
        if module in weights:
            continue
        base, terms = base_of(module), ()
        if not is_plain(base) or not has_weight(base):
            return "a projection is not a plain nn.Linear (wrapped, parametrised, patched or hooked)"
        if is_lora(module):
            terms = terms_of(module)
            if isinstance(terms, str):
                return terms
        weights[module] = _Weight.of(projection, terms, last)
    return weights


def _why_observed() -> str | None:
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return "adapters are compiled or traced"
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "inside a torch.func transform or forward-mode differentiation"
    return None


def _why_unsuitable(x: Tensor, weights: Sequence[Tensor]) -> str | None:
    dtype, device = weights[0].dtype, weights[0].device
    if type(x) not in PLAIN or not x.dim():
        return "x is no plain tensor [..., D]"
    if any(weight.requires_grad for weight in weights):
        return "a weight under the adapters is trained, too"
    if any(weight.dtype != dtype or weight.device != device for weight in weights):
        return "weights of several dtypes or devices"
    if x.device != device or device.type == "meta":
        return f"x is on {x.device}, the weights are on {device}"
    if x.dtype != dtype and not torch.is_autocast_enabled(device.type):
        return f"x is {x.dtype}, the weights are {dtype}"
    return None


def _equal(matrix: Tensor, copy: Tensor | None) -> bool:
    return copy is not None and copy.dtype == matrix.dtype and torch.equal(copy, matrix)


def _trains_only(some: Sequence[Tensor | None], others: Sequence[Tensor]) -> bool:
    """Whether a graph would hold some of `some`, and none of `others`."""
    return (
        torch.is_grad_enabled()
        and any(tensor is not None and tensor.requires_grad for tensor in some)
        and not any(tensor.requires_grad for tensor in others)
    )


def _widened(x: Tensor, side: _Side) -> Tensor:
    """x' [..., size]: x, what the adapters reduce it to, and zeros."""
    if not side.size:
        return x
    parts = [x, *(column.term.reduce(x).to(x.dtype) for column in side.columns)]
    left = side.size - sum(part.shape[-1] for part in parts)
    if left:
        parts.append(x.new_zeros(*x.shape[:-1], left))
    return torch.cat(parts, dim=-1)


def _bias(projection: Projection, side: _Side, shift: float) -> Tensor | None:
    """[H]: that of the projection and those of its adapters, less `shift`."""
    weight = _Reader.of(projection, side).weight
    bias, dtype = weight.bias, weight.parameter.dtype
    for term in weight.terms:
        if term.second.bias is not None:
            added = term.second.bias * term.scaling
            bias = added if bias is None else bias + added
    if bias is not None:
        bias = (bias if projection.rows is None else bias[projection.rows]).to(dtype)
        return bias - shift if shift else bias
    if not shift:
        return None
    neurons = _Reader.of(projection, side).read().shape[0]
    return weight.parameter.new_full((neurons,), -shift)
