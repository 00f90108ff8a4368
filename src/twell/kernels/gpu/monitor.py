"""How active each layer is, read from the device without ever waiting for it.

The sparse kernels count active neurons anyway. Now and then those counts are copied to the host behind the
kernels that wrote them; a later call picks them up if they have arrived. Automatic plans decide by the last
known share. Readings are due after 1, 2, 4, ... calls, then at a fixed interval. Layers are known by their
parameter or the address of their weights; another tensor at the same address starts anew.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable

import torch
from torch import Tensor

_MOST_LAYERS = 4096
LOOK_AGAIN = 64  # calls
_RESTLESS = 4  # times that every call brought a new tensor: casts of weights do, their address means more


class _Layer:
    """share: last reading. calls: since the owner came; after `next` of them a reading is due.
    pending: (counts on the host, their maximum)."""

    def __init__(self) -> None:
        self.share: float | None = None
        self.owner: weakref.ref[Tensor] | None = None
        self.calls = 0
        self.next = 1
        self.restless = 0
        self.due = False
        self.pending: tuple[Tensor, int] | None = None
        self.ran = False


_layers: OrderedDict[Hashable, _Layer] = OrderedDict()
_lock = threading.Lock()


def _layer(key: Hashable) -> _Layer:
    with _lock:
        layer = _layers.get(key)
        if layer is None:
            layer = _layers[key] = _Layer()
            if len(_layers) > _MOST_LAYERS:
                _layers.popitem(last=False)
        else:
            _layers.move_to_end(key)
        return layer


def known_share(key: Hashable) -> float | None:
    """The layer's last known share of active neurons, None before the first reading.

    Looks at host memory only, so it may be asked while a CUDA graph is being captured.
    """
    layer = _layer(key)
    if layer.pending is not None:
        counts, slots = layer.pending
        if bool((counts >= 0).all()):
            layer.share, layer.pending = float(counts.sum()) / slots, None
    return layer.share


def has_run(key: Hashable) -> bool:
    """Whether the layer has run sparse before: only then are its kernels loaded, as a capture needs them."""
    return _layer(key).ran


def wants_reading(key: Hashable, weight: Tensor, interval: int = LOOK_AGAIN) -> bool:
    """Count a call; True if it should run sparse and be read (`takes_reading` then says so once more).

    interval: calls between readings in the long run.
    """
    layer = _layer(key)
    if (layer.owner is None or layer.owner() is not weight) and layer.restless < _RESTLESS:
        layer.restless += layer.calls == 1
        layer.owner, layer.calls, layer.next, layer.share = weakref.ref(weight), 0, 1, None
        layer.pending = None
    layer.calls += 1
    if layer.calls >= layer.next:
        layer.next = min(2 * layer.calls, (layer.calls // interval + 1) * interval)
        known_share(key)  # a reading that has arrived makes room for the next
        layer.due = layer.pending is None
    return layer.due


def calls_before_reading(key: Hashable) -> int:
    """How many more calls come before the next reading is due."""
    layer = _layer(key)
    return max(layer.next - layer.calls - 1, 0)


def count_calls(key: Hashable, calls: int) -> None:
    """Calls that were made without asking `wants_reading`."""
    _layer(key).calls += calls


def takes_reading(key: Hashable, weight: Tensor) -> bool:
    """Whether a reading is due, counting the call if nobody asked before; the caller takes it."""
    layer = _layer(key)
    due = layer.due or wants_reading(key, weight)
    layer.due = False
    return due


def takes_due(key: Hashable) -> bool:
    """Whether `wants_reading` has asked for a reading of this call; the caller takes it."""
    layer = _layer(key)
    due, layer.due = layer.due, False
    return due


def note_run(key: Hashable, counts: Tensor | None = None, slots: int = 1) -> None:
    """The layer runs sparse now. counts: active neurons per block or tile, to be read; slots: if all were."""
    layer = _layer(key)
    layer.ran = True
    if counts is not None:
        # Counts are never negative: the reading has arrived when no -1 is left.
        host = torch.full(counts.shape, -1, dtype=counts.dtype, pin_memory=counts.is_cuda)
        host.copy_(counts, non_blocking=True)
        layer.pending = (host, slots)


def forget() -> None:
    """Drop every reading (tests)."""
    with _lock:
        _layers.clear()
