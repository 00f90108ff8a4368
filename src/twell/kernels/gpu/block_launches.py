"""The four kernels of the block path, launched one by one on a workspace they share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .device import Gpu, gpu_of
from .launch import Tiled, Tokens, kind_number, launch
from .operands import Operands, element_bytes
from .sizes import READ_AHEAD, cdiv, power_of_two
from .tiles import BlockTiles, block_tiles
from .triton.products import up_blocks
from .triton.select import list_active, select_blocks
from .triton.sums import gathered_sums
from .workspace import Part, Piece, buffer_sizes, carve


@dataclass(frozen=True)
class Workspace:
    """What the kernels hand to each other; see `select`, `lists` and `up` for the layouts.

    P is H rounded up to whole chunks of up; `hidden` is `values` itself if the block is not gated.
    buffer: what all of it lies in, but for lists and counts that outlive the call; bytes: that it needs.
    """

    buffer: Tensor
    bytes: int
    values: Piece  # dtype [B, H, rows]
    hidden: Piece  # dtype [B * P, rows]
    active: Piece  # uint8 [B, H]
    lists: Piece | Tensor  # int32 [B * H and a chunk more]
    counts: Piece | Tensor  # int32 [B]
    work: Piece  # int32 [B * P / chunk]
    counter: Piece  # int32 [1]


class BlockLaunches:
    """select, list, up and down for slabs of up to `tokens` tokens; portable or Hopper kernels."""

    def __init__(self, operands: Operands, tokens: int, rows: int) -> None:
        """rows: tokens per block, 0 for the default."""
        self.operands = operands
        self.gpu: Gpu = gpu_of(operands.x.device)
        self.tiles: BlockTiles = block_tiles(
            self.gpu, operands.x.dtype, operands.tokens, operands.neurons, rows
        )
        self.hopper = _hopper_fits(operands, self.gpu, self.tiles)
        self.chunk = self.tiles.up_chunk
        if self.hopper:  # imported here: other devices need no Gluon
            from .hopper.products import UP_CHUNK

            self.chunk = UP_CHUNK
        self.chunks = cdiv(operands.neurons, self.chunk)
        self.workspace = self._allocate(tokens)
        self.kept = False  # whether lists outlive the call
        self.kind = kind_number((operands.kind, self.tiles, self.hopper))  # see `launch`

    @property
    def gated(self) -> bool:
        return self.operands.up is not None

    def blocks(self, tokens: int) -> int:
        return cdiv(tokens, self.tiles.rows)

    def list_into(self, lists: Tensor, counts: Tensor) -> None:
        """Have `list` leave its results there, for someone who wants them after the next slab."""
        self.workspace = replace(self.workspace, lists=lists, counts=counts)
        self.kept = True

    def select(self, x: Tensor) -> None:
        """active and values of the slab x [m, D]."""
        if self.hopper:
            from .hopper.launch_block import launch_select

            return launch_select(self, x)
        operands, tiles = self.operands, self.tiles
        work = self.blocks(x.shape[0]) * cdiv(operands.neurons, tiles.select_neurons)
        arguments = self.select_arguments(
            Tiled(x, [tiles.rows, tiles.select_depth], by_tokens=True),
            Tiled(operands.select, [tiles.select_neurons, tiles.select_depth]),
        )
        constants = {
            "HAS_BIAS": operands.select_bias is not None,
            "PLAIN": operands.plain,
            "SQUARE": operands.square,
            "NEURONS": tiles.select_neurons,
            "ROWS": tiles.rows,
            "DEPTH": tiles.select_depth,
        }
        options = {"num_warps": tiles.select_warps, "num_stages": tiles.select_stages}
        grid = (min(self.gpu.processors, work),)
        return launch(self.kind, select_blocks, grid, arguments, constants, **options)

    def select_arguments(self, x: Tiled, select: Tiled) -> tuple:
        operands, workspace = self.operands, self.workspace
        return (
            x,
            select,
            operands.pointer(operands.select_bias),
            workspace.values,
            workspace.active,
            workspace.counter,
            Tokens(x.source.shape[0]),
            operands.neurons,
            operands.features,
            operands.threshold,
        )

    def list(self, tokens: int) -> None:
        """lists, counts and work items from active; select has set the counter to 0."""
        workspace, neurons = self.workspace, self.operands.neurons
        arguments = (
            workspace.active,
            workspace.lists,
            workspace.counts,
            workspace.work,
            workspace.counter,
            neurons,
            self.chunks,
        )
        fill = READ_AHEAD if self.kept else 0
        constants = {"CHUNK": self.chunk, "WIDTH": power_of_two(neurons), "FILL": fill}
        launch((self.kind, fill), list_active, (self.blocks(tokens),), arguments, constants, num_warps=8)

    def up(self, x: Tensor) -> None:
        """hidden from values; nothing to do if the block is not gated."""
        if not self.gated:
            return None
        if self.hopper:
            from .hopper.launch_block import launch_up

            return launch_up(self, x)
        operands, tiles = self.operands, self.tiles
        most = self.blocks(x.shape[0]) * self.chunks
        arguments = self.up_arguments(Tiled(x, [tiles.rows, tiles.up_depth], by_tokens=True))
        constants = {
            "HAS_BIAS": operands.up_bias is not None,
            "CLAMP_UP": operands.clamp_up,
            "CHUNK": self.chunk,
            "ROWS": tiles.rows,
            "DEPTH": tiles.up_depth,
        }
        options = {"num_warps": tiles.up_warps, "num_stages": tiles.up_stages}
        grid = (min(self.gpu.processors * tiles.up_programs, most),)
        return launch(self.kind, up_blocks, grid, arguments, constants, **options)

    def up_arguments(self, x: Tiled) -> tuple:
        operands, workspace = self.operands, self.workspace
        return (
            x,
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
            self.chunks,
        )

    def down(self, y: Tensor) -> None:
        """y [m, E] of the slab from hidden."""
        operands, tiles, workspace = self.operands, self.tiles, self.workspace
        if self.hopper and tiles.rows == 128 and operands.outputs % 64 == 0:
            from .hopper.launch_block import launch_down

            return launch_down(self, y)
        hidden = workspace.hidden
        across = cdiv(operands.outputs, tiles.down_width)
        arguments = (
            hidden,
            Tiled(hidden, [tiles.down_depth, tiles.rows]) if self.gated else hidden,
            y,
            y,
            operands.down,
            operands.down,
            operands.pointer(operands.down_bias),
            workspace.lists,
            workspace.counts,
            workspace.counts,
            Tokens(y.shape[0]),
            operands.neurons,
            operands.outputs,
            self.chunks * self.chunk,
            0,
        )
        constants = {
            "PLANES": 1,
            "SPANS": 0,
            "PACKED": self.gated,
            "HAS_BIAS": operands.down_bias is not None,
            "LATER": 0,
            "HAS_REST": False,
            "OVERFLOWED_ONLY": False,
            "WIDTH": tiles.down_width,
            "ROWS": tiles.rows,
            "DEPTH": tiles.down_depth,
        }
        options = {"num_warps": tiles.down_warps, "num_stages": tiles.down_stages}
        grid = (self.blocks(y.shape[0]) * across,)
        return launch(self.kind, gathered_sums, grid, arguments, constants, **options)

    def _allocate(self, tokens: int) -> Workspace:
        blocks, neurons, rows = self.blocks(tokens), self.operands.neurons, self.tiles.rows
        dtype, integers = self.operands.x.dtype, torch.int32
        hidden: tuple[Part, ...] = ()
        if self.gated:
            hidden = (((blocks * self.chunks * self.chunk, rows), dtype),)
        parts = (
            ((blocks, neurons, rows), dtype),
            ((blocks, neurons), torch.uint8),
            # The Hopper kernels read a whole chunk ahead without asking where a list ends.
            ((blocks * neurons + READ_AHEAD,), integers),
            ((blocks,), integers),
            ((blocks * self.chunks,), integers),
            ((1,), integers),
            *hidden,
        )
        buffer, pieces = carve(self.operands.x.device, parts)
        values, active, lists, counts, work, counter, *packed = pieces
        hidden = packed[0] if packed else values
        return Workspace(buffer, *buffer_sizes(parts), values, hidden, active, lists, counts, work, counter)


def _hopper_fits(operands: Operands, gpu: Gpu, tiles: BlockTiles) -> bool:
    """16-bit types, whole steps of depth, and enough tokens for the large tiles."""
    return (
        gpu.hopper
        and element_bytes(operands.x.dtype) == 2
        and operands.features % 64 == 0
        and tiles.rows in (64, 128)
        and tiles.select_neurons == 256
    )
