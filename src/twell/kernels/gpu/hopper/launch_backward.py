"""Launches the backward's kernels for compute capability 9.0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..launch import launch
from ..sizes import cdiv
from .launch_block import layout, tiled
from .products import PRODUCTS_DEPTH, PRODUCTS_STAGES, gather_products_hopper
from .sums import SUMS_DEPTH, SUMS_STAGES, SUMS_WIDTH, gathered_sums_hopper
from .weight_gradients import FREQUENT_DEPTH, FREQUENT_STAGES, FREQUENT_WIDTH, frequent_weights_hopper

if TYPE_CHECKING:
    from ..backward_launches import BackwardLaunches


def launch_products(
    launches: BackwardLaunches, grid: tuple[int], arguments: tuple, constants: dict[str, object]
) -> None:
    chunk = launches.tiles.chunk
    own = {"W_LAYOUT": layout(chunk, PRODUCTS_DEPTH, launches.operands.x.dtype), "STAGES": PRODUCTS_STAGES}
    launch(launches.kind, gather_products_hopper, grid, arguments, constants | own, num_warps=4)


def launch_inputs(launches: BackwardLaunches, turn: int) -> None:
    operands, rows, out = launches.operands, launches.active.rows, launches.gradients.x
    tiles = launches.blocks * cdiv(operands.features, SUMS_WIDTH)
    arguments = (
        tiled(launches.pool.viewed(launches.planes * launches.rows, rows), [SUMS_DEPTH, rows]),
        launches.pool,
        tiled(out, [rows // 2, SUMS_WIDTH]),
        out,
        operands.select,
        operands.up if launches.gated else operands.select,
        out,
        launches.active.lists,
        launches.spans,
        launches.blocks,
        operands.tokens,
        operands.neurons,
        operands.features,
        0,
        launches.rows,
    )
    constants = {
        "PLANES": launches.planes - 1,
        "SPANS": 1,
        "PACKED": True,
        "HAS_BIAS": False,
        "LATER": int(turn > 0),
        "W_LAYOUT": layout(SUMS_DEPTH, SUMS_WIDTH, operands.x.dtype),
        "STAGES": SUMS_STAGES,
    }
    grid = (min(launches.gpu.processors, tiles),)
    launch((launches.kind, turn > 0), gathered_sums_hopper, grid, arguments, constants, num_warps=4)


def launch_frequent(launches: BackwardLaunches) -> None:
    operands, neurons, planes = launches.operands, launches.tiles.neurons, launches.wanted
    wide = max(operands.features, operands.outputs)
    most = cdiv(operands.neurons, neurons) * cdiv(wide, FREQUENT_WIDTH) * len(planes)
    arguments = (
        tiled(operands.x, [FREQUENT_DEPTH, FREQUENT_WIDTH]),
        tiled(launches.grad_y, [FREQUENT_DEPTH, FREQUENT_WIDTH]),
        launches.pool,
        launches.places,
        launches.frequent_list,
        launches.how_many,
        *launches.targets(),
        launches.blocks,
        operands.neurons,
        operands.features,
        operands.outputs,
        launches.rows,
        sum(plane << (4 * number) for number, plane in enumerate(planes)),
    )
    constants = {
        "MATRICES": len(planes),
        "NEURONS": neurons,
        "V_LAYOUT": layout(neurons, FREQUENT_DEPTH, operands.x.dtype),
        "STAGES": FREQUENT_STAGES,
        "ADD": launches.gradients.add,
    }
    grid = (min(launches.gpu.processors, most),)
    launch(launches.kind, frequent_weights_hopper, grid, arguments, constants, num_warps=4)
