"""Dense or sparse training, layer by layer: decided by how active a layer was lately, with hysteresis."""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

_MOST_LAYERS = 4096
_log = logging.getLogger("twell")


class TrainingState(NamedTuple):
    """How a layer trains now, on a GPU. (On a CPU every step decides anew.)

    layer:     what it is known by: its device, its parameter (or the address of its weights), its shape and
               its tokens per call (rounded up to a power of two).
    sparse:    whether its steps run on the active set.
    share:     the share of neurons that was active in a block of tokens when last looked at; None before.
    switches:  how often it has changed between dense and sparse.
    """

    layer: Hashable
    sparse: bool
    share: float | None
    switches: int


@dataclass
class _Layer:
    sparse: bool = False
    share: float | None = None
    switches: int = 0


_layers: OrderedDict[Hashable, _Layer] = OrderedDict()


def trains_sparse(key: Hashable, share: float | None, enter: float, leave: float) -> bool:
    """Whether layer `key` should train sparse: once its share is at most `enter`, until it is above `leave`.

    share: what is known now. None, before the first reading or after the weights have become other tensors,
           leaves things as they are.
    """
    layer = _layers.get(key)
    if layer is None:
        layer = _layers[key] = _Layer()
        if len(_layers) > _MOST_LAYERS:
            _layers.popitem(last=False)
    if share is None:
        return layer.sparse
    sparse = share <= (leave if layer.sparse else enter)
    layer.share = share
    if sparse != layer.sparse:
        layer.sparse = sparse
        layer.switches += 1
        name = "sparse" if sparse else "dense"
        _log.info("training switches to %s: %.1f%% of the neurons are active in %s", name, 100 * share, key)
    return sparse


def training_states() -> list[TrainingState]:
    """How every layer trains that automatic plans have decided about, in the order of their first steps."""
    return [TrainingState(key, layer.sparse, layer.share, layer.switches) for key, layer in _layers.items()]


def crowded_steps() -> int:
    """How many backward passes on GPUs took rounds, because more neurons were active than their workspace
    holds at once (a third of all): exact as ever, and slower. Waits for the devices.
    """
    module = sys.modules.get("twell.kernels.gpu.backward.crowded")  # imported with the first such pass
    return 0 if module is None else module.total()


def forget() -> None:
    """Drop every layer (tests)."""
    _layers.clear()
