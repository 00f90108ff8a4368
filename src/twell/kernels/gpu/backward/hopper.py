"""Launchers of the Hopper variants, for `BackwardStages`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..hopper import describe, layout
from ..numbers import cdiv
from .hopper_inputs import input_gradient_hopper
from .hopper_products import gather_products_hopper
from .hopper_weights import frequent_weights_hopper

if TYPE_CHECKING:
    from .stages import BackwardStages

_DEPTH = 64
_WIDTH = 256
_PRODUCT_STAGES, _WEIGHT_STAGES = 6, 4
_INPUT_STAGES = 3  # what fits beside its output tile


def launch_products(stages: BackwardStages) -> None:
    operands, rows, chunk = stages.operands, stages.active.rows, stages.tiles.chunk
    most = stages.blocks * stages.chunks_per_round * stages.planes
    gather_products_hopper[(min(stages.target.processors, most),)](
        describe(operands.x, [rows, _DEPTH]),
        describe(stages.grad_y, [rows, _DEPTH]),
        operands.select,
        operands.down,
        operands.up if stages.gated else operands.select,
        operands.pointer(operands.select_bias),
        operands.pointer(operands.up_bias),
        stages.pool,
        stages.active.lists,
        stages.work,
        stages.counter,
        operands.features,
        operands.outputs,
        stages.rows,
        HAS_SELECT_BIAS=operands.select_bias is not None,
        HAS_UP_BIAS=operands.up_bias is not None,
        MATRICES=stages.planes,
        CHUNK=chunk,
        W_LAYOUT=layout([chunk, _DEPTH], operands.x.dtype),
        STAGES=_PRODUCT_STAGES,
        num_warps=4,
    )


def launch_inputs(stages: BackwardStages, turn: int) -> None:
    operands, rows, out = stages.operands, stages.active.rows, stages.gradients.x
    tiles = stages.blocks * cdiv(operands.features, _WIDTH)
    input_gradient_hopper[(min(stages.target.processors, tiles),)](
        describe(stages.pool.view(-1, rows), [_DEPTH, rows]),
        describe(out, [rows // 2, _WIDTH]),
        out,
        operands.select,
        operands.up,
        stages.active.lists,
        stages.spans,
        stages.blocks,
        operands.tokens,
        operands.features,
        stages.rows,
        LATER=int(turn > 0),
        W_LAYOUT=layout([_DEPTH, _WIDTH], operands.x.dtype),
        STAGES=_INPUT_STAGES,
        num_warps=4,
    )


def launch_frequent(stages: BackwardStages, planes: list[int]) -> None:
    operands, gradients, neurons = stages.operands, stages.gradients, stages.tiles.neurons
    wide = max(operands.features, operands.outputs)
    most = cdiv(operands.neurons, neurons) * cdiv(wide, _WIDTH) * len(planes)
    some = next(g for g in (gradients.select, gradients.down, gradients.up) if g is not None)
    frequent_weights_hopper[(min(stages.target.processors, most),)](
        describe(operands.x, [_DEPTH, _WIDTH]),
        describe(stages.grad_y, [_DEPTH, _WIDTH]),
        stages.pool,
        stages.places,
        stages.frequent_list,
        stages.how_many,
        some if gradients.select is None else gradients.select,
        some if gradients.down is None else gradients.down,
        some if gradients.up is None else gradients.up,
        stages.blocks,
        operands.neurons,
        operands.features,
        operands.outputs,
        stages.rows,
        sum(plane << (4 * number) for number, plane in enumerate(planes)),
        MATRICES=len(planes),
        NEURONS=neurons,
        V_LAYOUT=layout([neurons, _DEPTH], operands.x.dtype),
        STAGES=_WEIGHT_STAGES,
        num_warps=4,
    )
