"""Launchers of the Hopper variants, for `BackwardStages`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..hopper import layout, tiled
from ..hopper_gathered_sums import gathered_sums_hopper
from ..hopper_products import gather_products_hopper
from ..launch import launch
from ..numbers import cdiv
from .hopper_weights import frequent_weights_hopper

if TYPE_CHECKING:
    from .stages import BackwardStages

_DEPTH = 64
_WIDTH = 256
_PRODUCT_STAGES, _WEIGHT_STAGES = 6, 4  # what fits
_INPUT_STAGES = 3  # what fits beside its output tile


def launch_products(
    stages: BackwardStages, grid: tuple[int], arguments: tuple, constants: dict[str, object]
) -> None:
    chunk = stages.tiles.chunk
    own = {"W_LAYOUT": layout(chunk, _DEPTH, stages.operands.x.dtype), "STAGES": _PRODUCT_STAGES}
    launch(stages.kind, gather_products_hopper, grid, arguments, constants | own, num_warps=4)


def launch_inputs(stages: BackwardStages, turn: int) -> None:
    operands, rows, out = stages.operands, stages.active.rows, stages.gradients.x
    tiles = stages.blocks * cdiv(operands.features, _WIDTH)
    arguments = (
        tiled(stages.pool.viewed(stages.planes * stages.rows, rows), [_DEPTH, rows]),
        tiled(out, [rows // 2, _WIDTH]),
        out,
        operands.select,
        operands.up,
        out,
        stages.active.lists,
        stages.spans,
        stages.blocks,
        operands.tokens,
        operands.neurons,
        operands.features,
        0,
        stages.rows,
    )
    constants = {
        "PLANES": 2,
        "SPANS": 1,
        "HAS_BIAS": False,
        "LATER": int(turn > 0),
        "W_LAYOUT": layout(_DEPTH, _WIDTH, operands.x.dtype),
        "STAGES": _INPUT_STAGES,
    }
    grid = (min(stages.target.processors, tiles),)
    launch((stages.kind, turn > 0), gathered_sums_hopper, grid, arguments, constants, num_warps=4)


def launch_frequent(stages: BackwardStages) -> None:
    operands, neurons, planes = stages.operands, stages.tiles.neurons, stages.wanted
    wide = max(operands.features, operands.outputs)
    most = cdiv(operands.neurons, neurons) * cdiv(wide, _WIDTH) * len(planes)
    arguments = (
        tiled(operands.x, [_DEPTH, _WIDTH]),
        tiled(stages.grad_y, [_DEPTH, _WIDTH]),
        stages.pool,
        stages.places,
        stages.frequent_list,
        stages.how_many,
        *stages.targets(),
        stages.blocks,
        operands.neurons,
        operands.features,
        operands.outputs,
        stages.rows,
        sum(plane << (4 * number) for number, plane in enumerate(planes)),
    )
    constants = {
        "MATRICES": len(planes),
        "NEURONS": neurons,
        "V_LAYOUT": layout(neurons, _DEPTH, operands.x.dtype),
        "STAGES": _WEIGHT_STAGES,
        "ADD": stages.gradients.add,
    }
    grid = (min(stages.target.processors, most),)
    launch(stages.kind, frequent_weights_hopper, grid, arguments, constants, num_warps=4)
