"""The launches of a call, recorded once and repeated on other tensors of the same kinds.

A CUDA graph does this for fixed addresses and one number of tokens, and its inputs and outputs have to be
copied. A tape takes addresses and tokens anew with every call: nothing is copied, no tensor is kept alive,
and calls on several streams or from several threads do not meet. A launch takes the host 5 to 6 us.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import STREAM, Known, Maker, Tiled, Tokens, is_watched, recording
from .workspace import Piece

_MOST = 256  # tapes of one layer
_MOST_NUMBERS = 4096
_numbers: dict[int, int] = {}


class _Place(NamedTuple):
    """Where an argument lies: in which of the tape's tensors, so many bytes from its start."""

    tensor: int
    offset: int


class _View(NamedTuple):
    """A place, and the tensor that an interpreted kernel is given for it; block, by_tokens: of a `Tiled`."""

    place: _Place
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: list[int] | None
    by_tokens: bool


class _Launch(NamedTuple):
    """One launch; the addresses of steady tensors are among the values.

    pointers:  (place among the values, tensor, offset)
    maps:      the same, what makes the tensor map that goes there, and whether its rows are tokens
    tokens:    places of numbers of tokens
    """

    call: Callable[..., None]
    values: list
    pointers: list[tuple[int, int, int]]
    maps: list[tuple[int, int, int, Maker, bool]]
    tokens: list[int]


class _Interpreted(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    arguments: list
    constants: dict[str, Any]


class Tape:
    """Launches that read and write `tensors` (None: not there) and nothing else.

    The first `steady` of them, weights mostly, are expected to stay where they are.
    sizes: of what has to be allocated for a call besides its results, in bytes; for those who play it.
    """

    def __init__(self, tensors: Sequence[Tensor | None], steady: int) -> None:
        self.sizes: tuple[int, ...] = ()
        self._steady = steady
        self._ranges = [_range(tensor) for tensor in tensors]
        self._complete = not _overlap(self._ranges)
        self._recorded: list[Any] = []
        self._known: list[Known] = []  # what is launched must stay loaded
        self._interpreted = False
        self._bound: tuple[list[int] | None, list[_Launch]] = (None, [])

    def add(
        self, known: Known | None, kernel: Any, grid: tuple[int, ...], arguments: Sequence, constants: dict
    ) -> None:
        """A launch that was made; known: None where Triton interprets."""
        if not self._complete:
            return
        if known is None:
            values = [self._view(argument) for argument in arguments]
            self._recorded.append(_Interpreted(kernel, grid, values, constants))
            return
        self._known.append(known)
        launch = known.prepare(grid, arguments)
        if len(_numbers) >= _MOST_NUMBERS:
            _numbers.clear()
        # Numbers that tapes of many layers have in common are one object: fewer to fetch from memory.
        launch.values[:] = [_numbers.setdefault(v, v) if type(v) is int else v for v in launch.values]
        pointers = [(place, *self._place(source)) for place, source in launch.pointers]
        maps = [(place, *self._place(source), *rest) for place, source, *rest in launch.maps]
        self._recorded.append(_Launch(launch.call, launch.values, pointers, maps, launch.tokens))

    @property
    def interpreted(self) -> bool:
        return self._interpreted

    def finish(self) -> bool:
        """Whether the tape can be played: all that launches were given is known."""
        self._ranges = []
        self._interpreted = bool(self._recorded) and isinstance(self._recorded[0], _Interpreted)
        return self._complete and bool(self._recorded)

    def play(self, tensors: Sequence[Tensor | None], stream: int, tokens: int | None = None) -> bool:
        """Launch again, on the current device and its current stream; whether that could be.

        tensors:  of the shapes, strides and dtypes of those that were recorded, but for the number of tokens.
        tokens:   that number, if it may be another one: one that takes the same tiles and grids.
        """
        if is_watched():
            return False
        if self._interpreted:
            self._interpret(tensors, tokens)
            return True
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        return self.play_at(addresses[: self._steady], addresses[self._steady :], stream, tokens)

    def play_at(
        self, steady: Sequence[int], moving: Sequence[int], stream: int, tokens: int | None = None
    ) -> bool:
        """`play` on addresses, where nobody watches, and Triton does not interpret."""
        for address in moving:
            if address & 15:  # kernels were compiled for aligned addresses
                return False
        bound, launches = self._bound
        if bound != steady:
            if any(address & 15 for address in steady):
                return False
            launches = self._bind(steady)
        for call, values, pointers, maps, counts in launches:
            values = values.copy()  # another thread may play this tape, too
            values[STREAM] = stream
            for place, tensor, offset in pointers:
                values[place] = moving[tensor] + offset
            for place, tensor, offset, make, by_tokens in maps:
                values[place] = make(moving[tensor] + offset, tokens if by_tokens else None)
            if tokens is not None:
                for place in counts:
                    values[place] = tokens
            call(*values)
        return True

    def _bind(self, steady: Sequence[int]) -> list[_Launch]:
        """Launches with the addresses of steady tensors filled in, for this call and the next; places count
        moving ones only."""
        launches, first = [], self._steady
        for call, values, pointers, maps, tokens in self._recorded:
            values = values.copy()
            for place, tensor, offset in pointers:
                if tensor < first:
                    values[place] = steady[tensor] + offset
            for place, tensor, offset, make, _ in maps:
                if tensor < first:
                    values[place] = make(steady[tensor] + offset, None)
            moving = [(place, number - first, *rest) for place, number, *rest in pointers if number >= first]
            moving_maps = [(place, number - first, *rest) for place, number, *rest in maps if number >= first]
            launches.append(_Launch(call, values, moving, moving_maps, tokens))
        self._bound = (list(steady), launches)
        return launches

    def _place(self, source: Tensor | Piece) -> _Place:
        address = source.data_ptr()
        for number, (start, end) in enumerate(self._ranges):
            if start <= address < end:
                return _Place(number, address - start)
        self._complete = False
        return _Place(0, 0)

    def _view(self, argument: Any) -> Any:
        block, by_tokens = None, False
        if isinstance(argument, Tiled):
            argument, block, by_tokens = argument.source, argument.block, argument.by_tokens
        if not hasattr(argument, "data_ptr"):
            return argument
        shape, strides = tuple(argument.shape), tuple(argument.stride())
        return _View(self._place(argument), argument.dtype, shape, strides, block, by_tokens)

    def _interpret(self, tensors: Sequence[Tensor | None], tokens: int | None) -> None:
        def real(argument: Any) -> Any:
            if isinstance(argument, Tokens):
                return int(argument) if tokens is None else tokens
            if not isinstance(argument, _View):
                return argument
            owner, start = tensors[argument.place.tensor], argument.place.offset
            storage, first = owner.untyped_storage(), owner.storage_offset() * owner.dtype.itemsize
            view = torch.empty(0, dtype=argument.dtype, device=owner.device)
            where = (first + start) // argument.dtype.itemsize
            shape = argument.shape
            if argument.block is None:  # a pointer
                return view.set_(storage, where, (1,), (1,))
            if argument.by_tokens and tokens is not None:
                shape = (tokens, *shape[1:])
            view.set_(storage, where, shape, argument.strides)
            return TensorDescriptor.from_tensor(view, argument.block)

        for kernel, grid, arguments, constants in self._recorded:
            kernel[grid](*map(real, arguments), **constants)


Tapes = dict[Hashable, Tape]


def replay(
    tapes: Tapes | None,
    kind: Hashable,
    tensors: Sequence[Tensor | None],
    device: torch.device,
    tokens: int | None,
) -> bool:
    """Play the tape of calls of this kind on `tensors`; whether there was one."""
    tape = tape_of(tapes, kind, device)
    return tape is not None and tape.play(tensors, stream_of(device), tokens)


def tape_of(tapes: Tapes | None, kind: Hashable, device: torch.device) -> Tape | None:
    """The tape of calls of this kind, where it may be played: what is captured is launched in full."""
    tape = None if tapes is None else tapes.get(kind)
    return None if tape is None or is_capturing(device) else tape


@contextmanager
def recorded(
    tapes: Tapes | None,
    kind: Hashable,
    tensors: Sequence[Tensor | None],
    steady: int,
    sizes: tuple[int, ...] = (),
) -> Iterator[None]:
    """Record the launches inside, to be replayed for calls of this kind; `tapes` None: do not.

    steady, sizes: see `Tape`.
    """
    device = next(tensor.device for tensor in tensors if tensor is not None)
    if tapes is None or is_capturing(device) or recording.tape is not None:
        yield
        return
    tape = recording.tape = Tape(tensors, steady)
    tape.sizes = sizes
    try:
        yield
    finally:
        recording.tape = None
    if tape.finish():
        if len(tapes) >= _MOST:
            tapes.clear()
        tapes[kind] = tape


def stream_of(device: torch.device) -> int:
    """The current one."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _range(tensor: Tensor | None) -> tuple[int, int]:
    """Its first address, and the first after it."""
    if tensor is None:
        return 0, 0
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.dtype.itemsize if tensor.numel() else start


def _overlap(ranges: list[tuple[int, int]]) -> bool:
    """Whether an address may belong to two of them: where it belongs next time would be a guess."""
    there = sorted((start, end) for start, end in ranges if end > start)
    return any(end > start for (_, end), (start, _) in pairwise(there))
