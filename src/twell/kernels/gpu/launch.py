"""Kernel launches without Triton's look at every argument: that takes longer than small kernels run.

The first launch of a kind goes through Triton, which compiles and returns the compiled kernel; later ones
call that directly, as Triton itself does in the end. A `Tape` that is being recorded hears of every launch.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from .workspace import Piece

if TYPE_CHECKING:
    from .tape import Tape

_MOST = 4096
_compiled: dict[Hashable, Known] = {}
_kinds: dict[Hashable, int] = {}
_numbers = itertools.count()


class Source(Protocol):
    """What a kernel is given for a pointer: a tensor, or a piece of a workspace."""

    dtype: torch.dtype
    shape: Sequence[int]

    def data_ptr(self) -> int: ...

    def stride(self) -> tuple[int, ...]: ...


class Tiled(NamedTuple):
    """A source that a kernel reads or writes in tiles, through a tensor descriptor.

    layout: Gluon's; None for Triton's own kernels.
    by_tokens: whether its rows are the tokens of the call; see `Tokens`.
    """

    source: Source
    block: list[int]
    layout: Any = None
    by_tokens: bool = False


class Tokens(int):
    """The number of tokens of a call, which a kernel is given: a `Tape` may be played for another one."""


class _Recording(threading.local):
    tape: Tape | None = None


class _Around(threading.local):
    steady: bool = False


recording, _around = _Recording(), _Around()


@contextmanager
def steady_weights() -> Iterator[None]:
    """Inside, no kernel that is captured right before a call writes the weights of that call. It may fetch
    them while that kernel still runs: other kernels are waited for first, one by one."""
    before, _around.steady = _around.steady, True
    try:
        yield
    finally:
        _around.steady = before


def weights_are_steady() -> bool:
    """Only while a graph is captured: a launch that is repeated later may follow any kernel."""
    return _around.steady and torch.cuda.is_current_stream_capturing()


def kind_number(kind: Hashable) -> int:
    """A number for a long kind: hashing it once for a call instead of once for every launch.

    No number is given twice, whatever other threads do, or hold.
    """
    if len(_kinds) >= _MOST:
        _kinds.clear()
    return _kinds.setdefault(kind, next(_numbers))


def launch(
    kind: Hashable,
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple,
    constants: dict[str, Any],
    **options: int | bool,
) -> None:
    """Launch `kernel` on the current device and stream.

    kind:       everything that decides which compiled kernel it is: two launches of a kernel may share a kind
                only if their arguments agree in types, in alignment to 16 bytes and in the values of integers
                (but for those that the kernel does not specialise on), and constants and options are the
                same. The device is added here.
    arguments:  in the order of the kernel's signature, which ends with the constants in their order.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
    key = kernel.__name__, kind, device
    known = _compiled.get(key)
    if known is None or is_watched():
        real = [through_triton(argument) for argument in arguments]
        compiled = kernel[grid](*real, **constants, **options)
        if isinstance(compiled, CompiledKernel):
            if len(_compiled) >= _MOST:
                _compiled.clear()
            known = _compiled[key] = Known(compiled, constants)
    else:
        known.prepare(grid, arguments).launch(torch._C._cuda_getCurrentRawStream(device))
    if recording.tape is not None:
        recording.tape.add(known, kernel, grid, arguments, {**constants, **options})


def is_watched() -> bool:
    """Whether a profiler wants to hear of launches; Triton tells it."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def through_triton(argument: Any) -> Any:
    """`argument` as Triton's front door takes it."""
    if isinstance(argument, Tiled):
        source = through_triton(argument.source)
        if argument.layout is None:
            return TensorDescriptor.from_tensor(source, argument.block)
        from triton.experimental.gluon.nvidia import hopper  # other devices need no Gluon

        return hopper.TensorDescriptor.from_tensor(source, argument.block, argument.layout)
    if isinstance(argument, Tokens):
        return int(argument)
    return argument.tensor() if isinstance(argument, Piece) else argument


STREAM = 3  # its place among the values of a launch, in all versions


Maker = Callable[[int, int | None], Any]  # from an address, and a number of rows if not its own, to a map


class Values(NamedTuple):
    """One launch: what is called, with which values, and where addresses go.

    pointers:  (place, source)
    maps:      (place, source, what makes the tensor map that goes there, whether its rows are tokens)
    tokens:    places of numbers of tokens
    """

    call: Callable[..., None]
    values: list
    pointers: list[tuple[int, Source]]
    maps: list[tuple[int, Source, Maker, bool]]
    tokens: list[int]

    def launch(self, stream: int) -> None:
        values = self.values
        values[STREAM] = stream
        for place, source in self.pointers:
            values[place] = source.data_ptr()
        for place, source, make, _ in self.maps:
            values[place] = make(source.data_ptr(), None)
        self.call(*values)


class Known:
    """A compiled kernel, and how it is called without Triton's front door."""

    __slots__ = ("_call", "_compiled", "_constants", "_head", "_maps")

    def __init__(self, compiled: CompiledKernel, constants: dict[str, Any]) -> None:
        self._compiled, run = compiled, compiled.run  # which unloads its function when it is freed
        function, metadata = compiled.function, compiled.packed_metadata
        hooks = (None, None, None)
        self._constants = list(constants.values())
        self._call, self._head, self._maps = run, [function, metadata, *hooks], None
        described = getattr(compiled.metadata, "tensordesc_meta", None) or []
        raw = _raw_launcher(run)
        if raw is not None:
            scratch = (None, None)
            options = run.launch_cooperative_grid, run.launch_pdl
            self._call, self._head = raw, [function, *options, *scratch, metadata, *hooks]
            self._maps = [_map_maker(meta) for meta in described]

    def prepare(self, grid: tuple[int, ...], arguments: Sequence) -> Values:
        """The launch, all but its stream and addresses."""
        x, y, z = (*grid, 1, 1)[:3]
        values = [x, y, z, 0, *self._head]
        pointers, maps, tokens = [], [], []
        for argument in arguments:
            kind = type(argument)
            if kind is int or kind is float:
                values.append(argument)
            elif kind is Tokens:
                tokens.append(len(values))
                values.append(int(argument))
            elif kind is Tiled:
                source, by_tokens = argument.source, argument.by_tokens
                maps.append((len(values), source, self._maker(argument, len(maps)), by_tokens))
                values.append(None)
                if self._maps is not None:
                    if by_tokens:
                        tokens.append(len(values))
                    values += source.shape
                    values += source.stride()
            else:
                pointers.append((len(values), argument))
                values.append(None)
        values += self._constants
        return Values(self._call, values, pointers, maps, tokens)

    def _maker(self, tiled: Tiled, number: int) -> Maker:
        shape, strides = list(tiled.source.shape), list(tiled.source.stride())
        if self._maps is not None:
            return self._maps[number](shape, strides)
        dtype, block, layout = tiled.source.dtype, tiled.block, tiled.layout

        def make(address: int, rows: int | None) -> _Described:
            base = _Address(address, dtype)
            return _Described(base, shape if rows is None else [rows, *shape[1:]], strides, block, layout)

        return make


@dataclass(slots=True)
class _Address:
    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@dataclass(slots=True)
class _Described:
    """A tensor descriptor as Triton's launchers read it; its own check again what was checked before. (Not a
    tuple: launchers take those for several arguments.)"""

    base: _Address
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: Any
    padding: str = "zero"
    round_f32_to_tf32: bool = False


def _raw_launcher(run: Any) -> BuiltinFunctionType | None:
    """The function in C that `run` calls in the end, where that is known: in Triton 3.6.

    Around it Triton makes tensor maps of all descriptors anew, in Python, for every launch.
    """
    if not triton.__version__.startswith("3.6.") or run.global_scratch_size or run.profile_scratch_size:
        return None
    launch = run.launch
    if not isinstance(launch, BuiltinFunctionType):
        cells = zip(launch.__code__.co_freevars, launch.__closure__ or (), strict=True)
        launch = {name: cell.cell_contents for name, cell in cells}.get("launcher")
    return launch if isinstance(launch, BuiltinFunctionType) else None


def _map_maker(meta: dict[str, Any]) -> Callable[[list[int], list[int]], Maker]:
    """(shape, strides) -> what makes tensor maps, for a descriptor as it was compiled."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    fill = triton.runtime.driver.active.utils.fill_tma_descriptor
    kind = meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], meta["block_size"]

    def of_shape(shape: list[int], strides: list[int]) -> Maker:
        def make(address: int, rows: int | None) -> Any:
            return fill(address, *kind, shape if rows is None else [rows, *shape[1:]], strides, 0)

        return make

    return of_shape
