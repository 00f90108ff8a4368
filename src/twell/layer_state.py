"""What is known of a layer: how active it is, how it trains, what ran last and why, and its prepared calls.

A `SparseMLP` owns its state. Bare `ffn` calls and the registered ops find theirs by the weight that selects
neurons (the gate's, or `up` without one): by its storage and its place there, weakly, so that a layer that is
freed takes what was known of it along.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

# Calls between readings of a layer, in the long run: reading one costs the host as much as a few calls.
LOOK_AGAIN_TRAINING = 64  # training steps
LOOK_AGAIN_INFERENCE = 256
_MOST_PREPARED = 64  # shapes of x per layer; beyond, all are prepared again
_NEVER = 1 << 62  # calls
_log = logging.getLogger("twell")


class Reading:
    """How active a layer is in calls of one kind, read from the device without ever waiting for it.

    The sparse kernels count active neurons anyway. Now and then a call copies those counts to the host behind
    the kernels that wrote them; a later call picks them up if they have arrived. A reading is due after 1, 2,
    4, ... calls, then at a fixed interval.

    pace:      stretches the calls between readings. Each layer has its own, else all layers of a model would
               be read in the same step, and that step would be slow.
    version:   counts the readings that were looked at.
    ran:       whether the layer has run sparse before: only then are its kernels loaded, as a capture needs.
    sparse:    whether training steps run on the active set.
    switches:  how often that has changed.
    """

    def __init__(self, pace: float = 1.0) -> None:
        self._pace = pace
        self._share: float | None = None
        # Counts on the host, and their sum if all were active; `_arriving` shows them until they are there.
        self._host: Tensor | None = None
        self._slots = 0
        self._arriving: np.ndarray | None = None
        self._calls, self._next = 0, 1
        self.ran = self.sparse = False
        self.switches = self.version = 0

    @classmethod
    def given(cls, share: float | None) -> Reading:
        """A share that was measured elsewhere, None where it was not: no call is ever read."""
        reading = cls()
        reading._share, reading._next = share, _NEVER
        return reading

    @property
    def share(self) -> float | None:
        """The last known share of active neurons (in blocks of tokens), None before the first reading.

        Looks at host memory only, so it may be asked while a CUDA graph is being captured.
        """
        arriving = self._arriving
        if arriving is not None:
            counts = arriving.copy()  # another thread may begin the next reading meanwhile
            if (counts >= 0).all():
                self._share, self._arriving = float(counts.sum()) / self._slots, None
                self.version += 1
        return self._share

    def known(self) -> tuple[float | None, int]:
        """The share, and the version that it belongs to."""
        while True:
            share, version = self.share, self.version
            if share is self._share and version == self.version:
                return share, version

    @property
    def has_news(self) -> bool:
        """Whether counts arrive at this moment, or have arrived and were not looked at."""
        # Counts are never negative: the reading has arrived when no -1 is left.
        arriving = self._arriving
        return arriving is not None and arriving[-1] >= 0

    def is_due(self, interval: int = LOOK_AGAIN_TRAINING) -> bool:
        """Count a call; whether it should be read.

        interval: calls between readings in the long run.
        """
        self._calls += 1
        if self._calls < self._next:
            return False
        self._next = self._calls + max(round(min(self._calls, interval) * self._pace), 1)
        _ = self.share  # a reading that has arrived makes room for the next
        return self._arriving is None

    @property
    def calls_ahead(self) -> int:
        """How many more calls come before the next reading is due."""
        return max(self._next - self._calls - 1, 0)

    def count(self, calls: int) -> None:
        """Calls that were made without asking `is_due`."""
        self._calls += calls

    def take(self, counts: Tensor, slots: int) -> None:
        """Read `counts`, active neurons per block or tile; slots: their sum if all were active."""
        counts = counts.flatten()
        if self._host is None or self._host.shape != counts.shape:
            with torch.inference_mode(False):  # else it could not be used again outside of that mode
                pinned = counts.is_cuda
                self._host = torch.empty(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=pinned)
        arriving = self._host.numpy()
        arriving.fill(-1)
        self._host.copy_(counts, non_blocking=True)
        self._slots, self._arriving = slots, arriving

    def trains_sparse(self, enter: float, leave: float, layer: str) -> bool:
        """Whether steps should run sparse: once the share is at most `enter`, until it is above `leave`.

        layer: what a log line calls it.
        """
        share = self.share
        if share is not None and (share <= (leave if self.sparse else enter)) != self.sparse:
            self.sparse = not self.sparse
            self.switches += 1
            name = "sparse" if self.sparse else "dense"
            _log.info(
                "training switches to %s: %.1f%% of the neurons are active in %s", name, 100 * share, layer
            )
        return self.sparse


def _next_pace() -> float:
    """From 0.75 to 1.25: multiples of the golden ratio, without their whole parts, lie far apart."""
    return 0.75 + 0.5 * (next(_paces) * (5**0.5 - 1) / 2 % 1)


class Kind(NamedTuple):
    """Calls that share a reading.

    tokens: rounded up to a power of two.
    """

    training: bool
    device: torch.device
    tokens: int


class Outcome(NamedTuple):
    """A decision for a call: its path, why, and the reading it went by.

    share:  the share of active neurons that was known then.
    order:  counts all outcomes.
    """

    path: str
    reason: str
    reading: Reading | None
    share: float | None
    order: int


class LayerState:
    """What is known of one layer.

    prepared:  by the shape of x, and its mode if that is not 0, what later calls may repeat without deciding
               again (`Prepared`).
    buckets:   the same for calls with other numbers of tokens, by bucket (`kernels.gpu.sizes.bucket`).
    tapes:     by kind of call, launches that later ones repeat (`kernels.gpu.tape`).
    ran:       by phase ("forward", "backward"), what was decided last.
    size:      neurons and features, once known.
    """

    def __init__(self) -> None:
        self._readings: dict[Kind, Reading] = {}
        self._expected: dict[int, float] | None = None
        self.prepared: dict[Hashable, Any] = {}
        self.buckets: dict[Hashable, Any] = {}
        self.tapes: dict[Hashable, Any] = {}
        self.ran: dict[str, Outcome] = {}
        self.size: tuple[int, int] | None = None
        _alive[next(_serial)] = self

    def note(
        self, phase: str, path: str, reason: str, reading: Reading | None = None, share: float | None = None
    ) -> None:
        """Note a decision; a forward begins a step, whose backward is yet to come."""
        if phase == "forward":
            self.ran.pop("backward", None)
        self.ran[phase] = Outcome(path, reason, reading, share, next(_serial))

    def reading(self, weight: Tensor, tokens: int, training: bool) -> Reading:
        """The reading for calls with this many tokens; weight: the one that selects neurons, [H, D]."""
        kind = Kind(training, weight.device, 1 << max(tokens - 1, 0).bit_length())
        found = self._readings.get(kind)
        if found is None:
            self.size = tuple(weight.shape)
            if training or self._expected is None:
                found = Reading(_next_pace())
            else:
                found = Reading.given(self._expected_share(kind.tokens))
            self._readings[kind] = found
        return found

    def expect(self, shares: Mapping[int, float]) -> None:
        """Go by these shares of active neurons, by number of tokens, in place of readings in inference.

        For engines whose first calls, on made-up input, are captured in CUDA graphs for good: what those
        calls read says nothing about text. A number of tokens takes the share of the next larger one, those
        beyond the largest take its share. Without any, only calls that pay however active the layer is run
        sparse.
        """
        self._expected = dict(shares)
        self._readings = {kind: reading for kind, reading in self._readings.items() if kind.training}
        self.prepared, self.buckets = {}, {}

    def _expected_share(self, tokens: int) -> float | None:
        sizes = sorted(self._expected)
        return next(
            (self._expected[s] for s in sizes if s >= tokens), self._expected[sizes[-1]] if sizes else None
        )

    def readings(self) -> dict[Kind, Reading]:
        return dict(self._readings)

    def keep_prepared(self, shape: torch.Size, mode: int, call: Any, bucket: Hashable = None) -> None:
        """call: for calls of this shape and mode, and of this bucket if there is one."""
        if bucket is not None:
            if len(self.buckets) >= _MOST_PREPARED:
                self.buckets = {}
            self.buckets[bucket, mode] = call
        kind = (shape, mode) if mode else shape
        before = self.prepared.pop(kind, None)
        if before is not None:
            before.settle()
        if len(self.prepared) >= _MOST_PREPARED:
            dropped, self.prepared = self.prepared, {}
            for other in dropped.values():
                other.settle()
        self.prepared[kind] = call

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerState:
        return LayerState()  # a copy is another layer

    def __reduce__(self) -> tuple[type[LayerState], tuple[()]]:
        return LayerState, ()


_serial = itertools.count()
_paces = itertools.count()
_alive: weakref.WeakValueDictionary[int, LayerState] = weakref.WeakValueDictionary()

# Storage -> entries by place. A storage is one object for all tensors that share it: views and aliases that
# are made for every call find what is known. (A weak reference to a tensor would forbid `swap_tensors`.)
_by_storage: WeakIdKeyDictionary = WeakIdKeyDictionary()

_IN_A_ROW = 4


class _Entry:
    """lookups: how often it was found; a list, since it may outlive the entry. shared: whether all
    temporaries share the state."""

    def __init__(self, state: LayerState, shared: bool) -> None:
        self.state, self.shared, self.lookups = state, shared, [0]


class _Temporaries:
    """Weights that are made for every call, as casts inside a compiled graph are. Weights of one kind share a
    state, since nothing tells their layers apart."""

    def __init__(self) -> None:
        self._state = LayerState()
        self._last: weakref.ref | None = None
        self._last_lookups: list[int] = []
        self._in_a_row = 0

    def entry_for(self, storage: torch.UntypedStorage) -> _Entry:
        """A new weight's entry: a state of its own, unless several before it lived for one call each."""
        if self._last is not None:
            one_call = self._last() is None and self._last_lookups == [1]
            self._in_a_row = self._in_a_row + 1 if one_call else 0
        shared = self._in_a_row >= _IN_A_ROW
        entry = _Entry(self._state if shared else LayerState(), shared)
        self._last, self._last_lookups = weakref.ref(storage), entry.lookups
        return entry


@lru_cache(maxsize=256)
def _temporaries(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> _Temporaries:
    return _Temporaries()


def layer_of(weight: Tensor) -> LayerState:
    """The state of the layer whose neurons `weight` [H, D] selects."""
    storage = weight.untyped_storage()
    places = _by_storage.get(storage)
    if places is None:
        places = _by_storage[storage] = {}
    place = weight.storage_offset(), weight.shape, weight.stride()
    entry = places.get(place)
    if entry is None:
        if type(weight) is Parameter:
            entry = _Entry(LayerState(), shared=False)
        else:
            entry = _temporaries(weight.shape, weight.dtype, weight.device).entry_for(storage)
        places[place] = entry
    entry.lookups[0] += 1
    if entry.shared and entry.lookups[0] > 1:  # it stays, after all
        entry.state, entry.shared = LayerState(), False
    return entry.state


def known_layer(weight: Tensor) -> LayerState | None:
    """The state of this weight's layer; None where nothing is known."""
    places = _by_storage.get(weight.untyped_storage()) or {}
    entry = places.get((weight.storage_offset(), weight.shape, weight.stride()))
    return None if entry is None else entry.state


class TrainingState(NamedTuple):
    """How a layer trains now, on a GPU. (On a CPU every step decides again.)

    layer:     its size, tokens per call (rounded up to a power of two) and device.
    sparse:    whether its steps run on the active set.
    share:     the share of neurons that was active in a block of tokens when last looked at; None before.
    switches:  how often it has changed between dense and sparse.
    """

    layer: str
    sparse: bool
    share: float | None
    switches: int


def training_states() -> list[TrainingState]:
    """How every layer trains that automatic plans have decided about, in the order of their first steps."""
    found = []
    for _, state in sorted(_alive.items()):
        for kind, reading in state.readings().items():
            if kind.training:
                neurons, features = state.size
                layer = f"D {features}, H {neurons}, {kind.tokens:,} tokens on {kind.device}"
                found.append(TrainingState(layer, reading.sparse, reading.share, reading.switches))
    return found
