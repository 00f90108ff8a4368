"""The backward pass on the active set, launched kernel by kernel; portable or Hopper kernels.

    plan_rounds       which listed neurons of which blocks go into the pool when
    gather_products   their pre-activations, up values and gradients of hidden activations
    count_tokens, order_neurons     how often each neuron fired: frequent or rare
    combine           hidden activations and gradients of pre-activations and up values
    gathered_sums     grad_x
    frequent_weights  gradients of the weights of frequent neurons: dense products over all tokens
    rare_weights      gradients of the other weights: token by token

With few tokens, or where more than a third of the neurons is expected to be active, the pool has room for all
neurons in all blocks, and there is one round. Else it has room for a third of them. Whatever is listed goes
into round 0 if it is less than that; else three rounds take a third of the neurons each. The device decides
which: all rounds are always launched, and later ones usually find nothing to do. They take all their neurons
for frequent, which needs fewer launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .device import Gpu, gpu_of
from .launch import Source, Tiled, kind_number, launch
from .operands import Operands, element_bytes
from .sizes import backward_rounds, cdiv, planes_of, power_of_two
from .tiles import backward_tiles
from .triton.combine import combine
from .triton.products import gather_products
from .triton.schedule import count_tokens, order_neurons, plan_rounds
from .triton.sums import gathered_sums
from .triton.weight_gradients import bias_sums, frequent_weights, rare_weights
from .workspace import Part, buffer_sizes, carve, overflow_counter

# A neuron that fires for fewer than one token in RARE is rare: its tokens one by one cost less than a
# dense product over all (a third of a microsecond of the device per neuron and 16,384 tokens). Up to six
# times as often is a matter of what fills the device; see `order_neurons`.
RARE = 256
_CANDIDATES = 6
_COUNT_NEURONS, _COUNT_BLOCKS = 32, 128
_PER_PROCESSOR = 8  # programs of kernels that go element by element


@dataclass(frozen=True)
class Active:
    """The active neurons of each block as the forward pass listed them.

    lists int32 [B * H or more]: block b's neurons, ascending, from b * H; counts int32 [B]; rows: tokens per
    block.
    """

    lists: Tensor
    counts: Tensor
    rows: int


@dataclass
class Gradients:
    """The wanted gradients, allocated; the others None. Weights neuron-major: select, up [H, D], down [H, E].

    add: whether gradients of weights are added to what their tensors hold; they then share a dtype.
    """

    x: Tensor | None
    select: Tensor | None
    up: Tensor | None
    down: Tensor | None
    select_bias: Tensor | None
    up_bias: Tensor | None
    add: bool = False

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.x, self.select, self.up, self.down, self.select_bias, self.up_bias


def keeps_rest(dtype: torch.dtype, gradients: Gradients, overflow: bool | None, rounds: int) -> bool:
    """Whether what rounding takes from grad_x is added in the next round."""
    return gradients.x is not None and dtype != torch.float32 and overflow is not False and rounds > 1


class BackwardLaunches:
    """One backward pass; `run` fills the gradients."""

    def __init__(
        self,
        operands: Operands,
        active: Active,
        grad_y: Tensor,
        grad_l1: Tensor | None,
        gradients: Gradients,
        overflow: bool | None = None,
    ) -> None:
        """overflow: whether more than a third of the neurons is expected to be active; None: nobody knows.

        Where it is not expected and happens all the same, grad_x is rounded once per round.
        """
        self.rounds = backward_rounds(
            operands.tokens,
            operands.neurons,
            active.rows,
            operands.up is not None,
            element_bytes(operands.x.dtype),
            overflow,
        )
        self.overflow_counter = overflow_counter(operands.x.device)
        keeps = keeps_rest(operands.x.dtype, gradients, overflow, self.rounds)
        self.rest = torch.empty_like(gradients.x) if keeps else None
        self.operands, self.active, self.grad_y, self.grad_l1 = operands, active, grad_y, grad_l1
        self.gradients = gradients
        self.gpu: Gpu = gpu_of(operands.x.device)
        self.tiles = backward_tiles(self.gpu, operands.x.dtype)
        self.hopper = self._hopper_fits()
        self.blocks = cdiv(operands.tokens, active.rows)
        self.chunks_per_round = cdiv(cdiv(operands.neurons, self.tiles.chunk), self.rounds)
        self.limit = max(operands.tokens // RARE, 1)
        # Planes of the pool that the gradient of a weight needs.
        weights = {0: gradients.down, 1: gradients.select, 2: gradients.up}
        self.wanted = tuple(plane for plane, target in weights.items() if target is not None)
        # What decides which compiled kernels run; see `launch`.
        kind = (
            operands.kind,
            operands.tokens,
            active.rows,
            self.hopper,
            self.rounds,
            self.wanted,
            gradients.add,
            self.targets()[0].dtype,
        )
        self.kind = kind_number(kind)
        self._allocate()

    @property
    def gated(self) -> bool:
        return self.operands.up is not None

    @property
    def planes(self) -> int:
        return planes_of(self.gated)

    @property
    def _tiled(self) -> Callable[[Source, list[int]], Tiled]:
        if self.hopper:
            from .hopper.launch_block import tiled

            return tiled
        return Tiled

    @property
    def rows(self) -> int:
        """Rows in a plane of the pool."""
        return self.blocks * self.chunks_per_round * self.tiles.chunk

    def run(self) -> None:
        self.plan()
        for turn in range(self.rounds):
            self.enter(turn)
            sorted_out = bool(self.wanted) and turn == 0
            self.products()
            if sorted_out:
                self.order()
            self.combine(sorted_out)
            if self.gradients.x is not None:
                self.inputs(turn)
            if self.wanted:
                self.frequent()
            if sorted_out:
                self.rare()
            self.biases()

    def plan(self) -> None:
        arguments = (
            self.active.lists,
            self.active.counts,
            self.all_spans,
            self.all_work,
            self.counters,
            self.all_bounds,
            self.all_frequent,
            self.overflow_counter,
            self.blocks,
            self.operands.neurons,
            self.chunks_per_round,
            self.all_spans.shape[1],
            self.all_work.shape[1],
            self.all_frequent.shape[1],
        )
        constants = {
            "ROUNDS": self.rounds,
            "CHUNK": self.tiles.chunk,
            "WIDTH": power_of_two(self.operands.neurons),
            "BLOCKS": power_of_two(self.blocks),
        }
        launch(self.kind, plan_rounds, (self.blocks,), arguments, constants, num_warps=8)

    def enter(self, turn: int) -> None:
        """Work on round `turn` from here on."""
        self.counter, self.how_many = self.counters.row(2 * turn), self.counters.row(2 * turn + 1)
        self.spans, self.work = self.all_spans.row(turn), self.all_work.row(turn)
        self.bounds, self.frequent_list = self.all_bounds.row(turn), self.all_frequent.row(turn)

    def products(self) -> None:
        operands, tiles, rows = self.operands, self.tiles, self.active.rows
        tiled = self._tiled
        arguments = (
            tiled(operands.x, [rows, tiles.depth]),
            tiled(self.grad_y, [rows, tiles.depth]),
            operands.select,
            operands.down,
            operands.up if self.gated else operands.select,
            operands.pointer(operands.select_bias),
            operands.pointer(operands.up_bias),
            self.pool,
            self.places,
            self.active.lists,
            self.work,
            self.counter,
            operands.tokens,
            operands.neurons,
            operands.features,
            operands.outputs,
            self.rows,
            operands.threshold,
        )
        constants = {
            "HAS_SELECT_BIAS": operands.select_bias is not None,
            "HAS_UP_BIAS": operands.up_bias is not None,
            "MATRICES": self.planes,
            "CHUNK": tiles.chunk,
        }
        grid = (min(self.gpu.processors, self.blocks * self.chunks_per_round * self.planes),)
        if self.hopper:
            from .hopper.launch_backward import launch_products

            return launch_products(self, grid, arguments, constants)
        constants |= {"ROWS": rows, "DEPTH": tiles.depth}
        options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        return launch(self.kind, gather_products, grid, arguments, constants, **options)

    def order(self) -> None:
        neurons = self.operands.neurons
        arguments = (self.places, self.before, self.firing, self.blocks, neurons)
        constants = {"NEURONS": _COUNT_NEURONS, "GROUP": _COUNT_BLOCKS}
        launch(self.kind, count_tokens, (cdiv(neurons, _COUNT_NEURONS),), arguments, constants)
        width = self.tiles.width
        if self.hopper:
            from .hopper.weight_gradients import FREQUENT_WIDTH

            width = FREQUENT_WIDTH
        wide = max(self.operands.features, self.operands.outputs)
        arguments = (
            self.firing,
            self.bounds,
            self.frequent_list,
            self.how_many,
            self.offsets,
            neurons,
            self.operands.tokens,
            self.limit,
            self.gpu.processors,
            cdiv(wide, width) * len(self.wanted),
        )
        constants = {"NEURONS": self.tiles.neurons, "CANDIDATES": _CANDIDATES, "WIDTH": power_of_two(neurons)}
        launch(self.kind, order_neurons, (1,), arguments, constants, num_warps=16)

    def combine(self, rare: bool) -> None:
        """rare: whether `order` has said which neurons are."""
        operands, tiles = self.operands, self.tiles
        arguments = (
            self.pool,
            self.pool if self.grad_l1 is None else self.grad_l1,
            self.before,
            self.offsets,
            self.rare_tokens,
            self.rare_values,
            self.active.lists,
            self.work,
            self.counter,
            operands.tokens,
            operands.neurons,
            self.rows,
            operands.threshold,
        )
        constants = {
            "HAS_L1": self.grad_l1 is not None,
            "GATED": self.gated,
            "SQUARE": operands.square,
            "CLAMP_UP": operands.clamp_up,
            "RARE": rare,
            "CHUNK": tiles.chunk,
            "ENTRIES": tiles.entries,
            "ROWS": self.active.rows,
        }
        most = self.blocks * self.chunks_per_round * (tiles.chunk // tiles.entries)
        grid = (min(self.gpu.processors * _PER_PROCESSOR, most),)
        kernel = combine
        if self.hopper:
            from .hopper.combine import combine_hopper as kernel
        kind = (
            self.kind,
            rare,
            self.grad_l1 is not None and (self.grad_l1.dtype, self.grad_l1.data_ptr() % 16),
        )
        launch(kind, kernel, grid, arguments, constants, num_warps=4)

    def inputs(self, turn: int) -> None:
        """Hopper's kernel keeps no rest, so it leaves overflow blocks to the portable one."""
        by_hopper = self.hopper and self.active.rows == 128
        if by_hopper and (turn == 0 or self.rest is None):
            from .hopper.launch_backward import launch_inputs

            launch_inputs(self, turn)
            if self.rest is None:
                return
        operands, tiles, rows = self.operands, self.tiles, self.active.rows
        arguments = (
            self.pool,
            Tiled(self.pool.viewed(self.planes * self.rows, rows), [tiles.depth, rows]),
            self.gradients.x,
            self.gradients.x if self.rest is None else self.rest,
            operands.select,
            operands.up if self.gated else operands.select,
            self.pool,
            self.active.lists,
            self.spans,
            self.active.counts,
            operands.tokens,
            operands.neurons,
            operands.features,
            0,
            self.rows,
        )
        constants = {
            "PLANES": self.planes - 1,
            "SPANS": 1,
            "PACKED": True,
            "HAS_BIAS": False,
            "LATER": int(turn > 0),
            "HAS_REST": self.rest is not None,
            "OVERFLOWED_ONLY": by_hopper and turn == 0,
            "WIDTH": tiles.width,
            "ROWS": rows,
            "DEPTH": tiles.depth,
        }
        grid = (self.blocks * cdiv(operands.features, tiles.width),)
        options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        kind = (self.kind, turn > 0, self.rest is not None, by_hopper)
        launch(kind, gathered_sums, grid, arguments, constants, **options)

    def frequent(self) -> None:
        if self.hopper and self.active.rows == 128:
            from .hopper.launch_backward import launch_frequent

            launch_frequent(self)
            return
        operands, tiles, rows = self.operands, self.tiles, self.active.rows
        wide = max(operands.features, operands.outputs)
        arguments = (
            Tiled(operands.x, [rows, tiles.width]),
            Tiled(self.grad_y, [rows, tiles.width]),
            self.pool,
            self.places,
            self.frequent_list,
            self.how_many,
            *self.targets(),
            self.blocks,
            operands.neurons,
            operands.features,
            operands.outputs,
            self.rows,
        )
        for first, matrices in _runs(self.wanted):
            constants = {
                "FIRST": first,
                "MATRICES": matrices,
                "NEURONS": tiles.neurons,
                "WIDTH": tiles.width,
                "ROWS": rows,
                "ADD": self.gradients.add,
            }
            most = cdiv(operands.neurons, tiles.neurons) * cdiv(wide, tiles.width) * matrices
            grid = (min(self.gpu.processors, most),)
            options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
            launch((self.kind, first), frequent_weights, grid, arguments, constants, **options)

    def rare(self) -> None:
        operands, tiles = self.operands, self.tiles
        arguments = (
            operands.x,
            self.grad_y,
            self.rare_tokens,
            self.rare_values,
            self.firing,
            self.offsets,
            self.bounds,
            *self.targets(),
            operands.features,
            operands.outputs,
        )
        constants = {
            "HAS_SELECT": 1 in self.wanted,
            "HAS_DOWN": 0 in self.wanted,
            "HAS_UP": 2 in self.wanted,
            "WIDTH": tiles.rare_width,
            "AHEAD": tiles.ahead,
            "ADD": self.gradients.add,
        }
        across = cdiv(max(operands.features, operands.outputs), tiles.rare_width)
        grid = (min(self.gpu.processors * tiles.rare_programs, operands.neurons), across)
        launch(self.kind, rare_weights, grid, arguments, constants, num_warps=tiles.rare_warps)

    def biases(self) -> None:
        neurons = self.operands.neurons
        for plane, target in ((1, self.gradients.select_bias), (2, self.gradients.up_bias)):
            if target is not None:
                arguments = (
                    self.pool,
                    self.places,
                    self.bounds,
                    target,
                    self.blocks,
                    neurons,
                    self.rows,
                    plane,
                )
                constants = {"NEURONS": self.tiles.entries, "ROWS": self.active.rows}
                grid = (cdiv(neurons, self.tiles.entries),)
                launch((self.kind, plane), bias_sums, grid, arguments, constants)

    def targets(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of select, down and up; another of them where a kernel is told that there is none."""
        gradients = self.gradients
        targets = (gradients.select, gradients.down, gradients.up)
        wanted = [target for target in targets if target is not None]
        other = wanted[0] if wanted else self.operands.select
        return tuple(other if target is None else target for target in targets)

    def _allocate(self) -> None:
        blocks, neurons, device = self.blocks, self.operands.neurons, self.operands.x.device
        dtype = self.operands.x.dtype
        # Places, and two counters for every round, 16 bytes apart: all zeros before the first kernel.
        cleared = numbers(blocks * neurons), numbers(2 * self.rounds, 4)
        # The most tokens that all rare neurons fire for together.
        capacity = neurons * self.limit * _CANDIDATES
        parts = (
            ((self.planes, self.rows, self.active.rows), dtype),
            # One row for each round, in multiples of 16 bytes.
            numbers(self.rounds, cdiv(blocks * 3, 4) * 4),
            numbers(self.rounds, cdiv(blocks * self.chunks_per_round * 3, 4) * 4),
            numbers(self.rounds, 4),
            # The Hopper kernels read a whole tile of neurons without asking where the list ends.
            numbers(self.rounds, cdiv(neurons + 256, 4) * 4),
            numbers(neurons),
            numbers(neurons),
            numbers(blocks * neurons),
            numbers(capacity),
            ((capacity, 4), dtype),
        )
        self.cleared, (self.places, self.counters) = carve(device, cleared, cleared=True)
        self.workspace, pieces = carve(device, parts)
        self.sizes = buffer_sizes(parts, cleared)
        self.pool, self.all_spans, self.all_work, self.all_bounds, self.all_frequent, *rest = pieces
        self.firing, self.offsets, self.before, self.rare_tokens, self.rare_values = rest

    def _hopper_fits(self) -> bool:
        """16-bit types and whole steps of depth."""
        operands = self.operands
        return (
            self.gpu.hopper
            and element_bytes(operands.x.dtype) == 2
            and operands.features % 64 == 0
            and operands.outputs % 64 == 0
            and self.active.rows in (64, 128)
        )


def numbers(*shape: int) -> Part:
    return shape, torch.int32


def _runs(planes: tuple[int, ...]) -> list[tuple[int, int]]:
    """(first, number) of neighbouring planes."""
    runs: list[tuple[int, int]] = []
    for plane in planes:
        if runs and sum(runs[-1]) == plane:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((plane, 1))
    return runs
