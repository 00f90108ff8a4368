"""Launchers of the Hopper variants, with the signatures of the portable ones in `blocks`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .hopper_select import select_blocks_hopper
from .hopper_up import up_blocks_hopper

_NEURONS, _DEPTH, _STAGES = 256, 64, 4
_ELEMENT = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def _layout(shape: list[int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(shape, _ELEMENT[dtype])


def _describe(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, block, _layout(block, tensor.dtype))


def launch_select(operands, x, workspace, target, tiles) -> None:
    work = triton.cdiv(x.shape[0], tiles.rows) * triton.cdiv(operands.neurons, _NEURONS)
    select_blocks_hopper[(min(target.processors, work),)](
        _describe(x, [tiles.rows, _DEPTH]),
        _describe(operands.select, [_NEURONS, _DEPTH]),
        operands.pointer(operands.select_bias),
        workspace.values,
        workspace.active,
        workspace.counter,
        x.shape[0],
        operands.neurons,
        operands.features,
        operands.threshold,
        HAS_BIAS=operands.select_bias is not None,
        PLAIN=operands.plain,
        SQUARE=operands.square,
        STAGES=_STAGES,
        num_warps=4,
    )


def launch_up(operands, x, workspace, target, tiles) -> None:
    most = triton.cdiv(x.shape[0], tiles.rows) * triton.cdiv(operands.neurons, _NEURONS)
    up_blocks_hopper[(min(target.processors, most),)](
        _describe(x, [tiles.rows, _DEPTH]),
        operands.up,
        operands.pointer(operands.up_bias),
        workspace.values,
        workspace.hidden,
        workspace.lists,
        workspace.counts,
        workspace.work,
        workspace.counter,
        operands.neurons,
        operands.features,
        triton.cdiv(operands.neurons, _NEURONS),
        HAS_BIAS=operands.up_bias is not None,
        CHUNK=_NEURONS,
        W_LAYOUT=_layout([_NEURONS, _DEPTH], x.dtype),
        STAGES=_STAGES,
        num_warps=4,
    )
