"""`twell.explain`: shows what ran in each layer of a model, why, and what it gains over dense PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ._errors import reject, require_positive_int
from ._html import table
from ._interval import Interval, paired_gain
from ._text_table import aligned, terminal_width, together, wrapped
from .activations import Activation
from .block_table import state_of
from .functional import run_ffn
from .nn import SparseMLP
from .shares import active_neurons, run_observed
from .sparsify.blocks import named_blocks

_COLUMNS = ("layer", "D x H", "plan", "ran", "active", "union", "fewer products", "measured", "why")
_NOTHING = "no sparse block found; twell.sparsify_ makes those of a stock model sparse"
# Columns that a narrow table loses, in this order: some are told below it, the others are left out.
_TOLD_BELOW, _LEFT_OUT = ("why", "plan", "D x H"), ("fewer products", "union")
NEIGHBOURS = 128  # tokens that the kernels' blocks share neurons over
_WARM, _ROUNDS = 5, 9
_MOST_TOKENS = 65_536  # of a batch that are looked at


class ExplainedLayer(NamedTuple):
    """What is known of one block.

    layer:    name of the block in the model.
    hidden, neurons:  D and H.
    plan:     its plan, or "auto".
    forward:  path of the last decided call: "dense", "row" or "block"; None before the first call.
    backward: path of our last backward; None if there was none or autograd ran it.
    active:   share of neurons that are active for a token of the batch; None without one.
    union:    share of neurons that are active for at least one of 128 neighbouring tokens; without a batch,
              the last reading of a GPU, None on CPUs, which look at every call instead.
    limit:    how many times fewer products than dense: those of the active neurons on a CPU, of the union
              on a GPU; None without a batch.
    gain:     measured gain over dense, on the batch's own input of this block, with its 95% interval; None
              without a batch.
    reason:   why the forward ran this way.
    """

    layer: str
    hidden: int
    neurons: int
    plan: str
    forward: str | None
    backward: str | None
    active: float | None
    union: float | None
    limit: float | None
    gain: Interval | None
    reason: str


class Explanation(list[ExplainedLayer]):
    """A list of layers that prints as a table."""

    def __str__(self) -> str:
        """As wide as the terminal; in full where the output is a file or a pipe."""
        return self.text(terminal_width())

    def text(self, width: int | None = None) -> str:
        """The table. width: a wider table loses columns; what they say follows in words where it can."""
        if width is not None:
            require_positive_int("width", width)
        if not self:
            return _NOTHING
        columns = {title: cells for title, *cells in zip(*self._rows(), strict=True)}
        gone: dict[str, list[str]] = {}
        for title in (*_TOLD_BELOW, *_LEFT_OUT):
            if width is None or max(map(len, aligned(columns))) <= width:
                break
            if title in columns:
                gone[title] = columns.pop(title)
        below = [
            line
            for title in _COLUMNS
            if title in gone and title in _TOLD_BELOW
            for line in _told(title, gone[title], columns["layer"])
        ]
        if missing := [title for title in gone if title in _LEFT_OUT]:
            below.append(f"no room for: {', '.join(missing)}")
        return "\n".join([*aligned(columns), *(wrapped(line, width) for line in below)])

    def _repr_html_(self) -> str:
        """In a notebook."""
        if not self:
            return f"<p>{_NOTHING}</p>"
        columns, *rows = self._rows()
        words = [place for place, name in enumerate(columns) if name in ("layer", "plan", "ran", "why")]
        return table(columns, rows, left=words)

    def _rows(self) -> list[list[str]]:
        """With their titles, without columns that say nothing."""
        rows = [_COLUMNS, *map(_cells, self)]
        kept = [i for i in range(len(_COLUMNS)) if any(row[i] != "-" for row in rows[1:])]
        return [[row[i] for i in kept] for row in rows]


def explain(
    model: nn.Module,
    batch: Tensor | Mapping[str, Any] | Sequence[Any] | None = None,
    *,
    progress: Callable[[str, float], None] | None = None,
) -> Explanation:
    """What ran in every block of `model` that is ours, and why. Print the result for a table.

        twell.sparsify_(model)
        print(twell.explain(model, batch))

    Layers decide when they run, so without a batch a layer that was not called shows no path. A call that
    repeats a decision shows that decision. Blocks that a compiler fused into dense code do not appear as run.

    batch:  what the model is called with, without gradients and in eval mode: a tensor, a mapping of keyword
            arguments or a sequence of arguments. Every block is then timed on the input that it gets, against
            dense PyTorch on the same weights; statistics are of the first 65,536 tokens.
    progress:  called with the name of a block and the share of its timing that is done.
    """
    if not isinstance(model, nn.Module):
        reject("model", type(model).__name__, "a torch.nn.Module")
    blocks = named_blocks(model)
    observed = {name: _Observed() for name, _ in blocks}

    def look(name: str, block: SparseMLP, inputs: tuple[Any, ...]) -> None:
        observed[name].look(block, inputs, None if progress is None else partial(progress, name))

    if batch is not None:
        run_observed(model, batch, [(block, partial(look, name)) for name, block in blocks])
    return Explanation(_explained(name, block, observed[name]) for name, block in blocks)


@dataclass
class _Observed:
    """One block in one pass of the batch; sums, since a layer may be called several times.

    by_blocks: whether the kernels compute a block of tokens on the union of its neurons, as on a GPU.
    seconds:   by plan, of each round.
    """

    tokens: int = 0
    windows: int = 0
    active: float = 0.0
    union: float = 0.0
    by_blocks: bool = False
    seconds: dict[str, list[float]] = field(
        default_factory=lambda: {name: [0.0] * _ROUNDS for name in ("dense", "ours")}
    )

    def look(
        self, block: SparseMLP, inputs: tuple[Any, ...], progress: Callable[[float], None] | None
    ) -> None:
        """At the input of a call, before it runs."""
        weights = block._plain_weights()
        x = inputs[0]
        if weights is None or x.numel() == 0:
            return
        x = x.detach().reshape(-1, x.shape[-1])[:_MOST_TOKENS]
        self.by_blocks = x.is_cuda
        self._count(block, x, weights)
        for name, seconds in _times(block, x, weights, progress).items():
            self.seconds[name] = [sum(pair) for pair in zip(self.seconds[name], seconds, strict=True)]

    def _count(self, block: SparseMLP, x: Tensor, weights: tuple[Tensor | None, ...]) -> None:
        for tokens in x.split(NEIGHBOURS):
            active = active_neurons(block, tokens, weights)
            self.active += float(active.double().mean(1).sum())
            self.union += float(active.any(0).double().mean())
            self.tokens += len(tokens)
            self.windows += 1


def _times(
    block: SparseMLP,
    x: Tensor,
    weights: tuple[Tensor | None, ...],
    progress: Callable[[float], None] | None,
) -> dict[str, list[float]]:
    """Seconds of a call by round, of dense PyTorch and with the block's plan, by turns."""
    layer = block._own_layer()
    up, down, *rest = weights
    stock = (up, down.contiguous(), *rest)  # ours lies in memory neuron by neuron
    calls = {
        "dense": lambda: dense_as_stock(x, stock, block.activation),
        "ours": lambda: run_ffn((x, *weights), block.activation, block.plan, record=False, layer=layer),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(_WARM + _ROUNDS):
        for name, call in calls.items():
            start = _now(x)
            call()
            if turn >= _WARM:
                seconds[name].append(_now(x) - start)
        if progress is not None:
            progress((turn + 1) / (_WARM + _ROUNDS))
    return seconds


def dense_as_stock(x: Tensor, weights: tuple[Tensor | None, ...], activation: Activation) -> Tensor:
    """As stock modules compute it."""
    up, down, gate, up_bias, down_bias, gate_bias = weights
    hidden = linear(x, up, up_bias)
    if gate is None:
        hidden = activation(hidden)
    else:
        hidden = activation(linear(x, gate, gate_bias)) * activation.factor(hidden)
    return linear(hidden, down, down_bias)


def _now(x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return perf_counter()


def _explained(name: str, mlp: SparseMLP, seen: _Observed) -> ExplainedLayer:
    plan = "auto" if mlp.plan is None else mlp.plan.spec
    forward = backward = active = union = limit = gain = None
    reason = "it has not been called"
    state = state_of(mlp)
    if state is not None:
        outcome = state.ran["forward"]
        forward, reason = outcome.path, outcome.reason
        backward = state.ran["backward"].path if "backward" in state.ran else None
        shares = [outcome.share, *(reading.share for reading in reversed(state.readings().values()))]
        union = next((share for share in shares if share is not None), None)
    if seen.tokens:
        active, union = seen.active / seen.tokens, seen.union / seen.windows
        skipped = 2 if mlp.gated else 1  # products of which only the active neurons' part is needed
        needed = union if seen.by_blocks else active
        limit = (1 + skipped) / (1 + skipped * needed)
        gain = paired_gain([seen.seconds["dense"]], [seen.seconds["ours"]])
    return ExplainedLayer(
        name,
        mlp.hidden_size,
        mlp.intermediate_size,
        plan,
        forward,
        backward,
        active,
        union,
        limit,
        gain,
        reason,
    )


def _told(title: str, cells: Sequence[str], layers: Sequence[str]) -> list[str]:
    """A column in words: every value once, with the layers that have it."""
    having: dict[str, list[str]] = {}
    for cell, layer in zip(cells, layers, strict=True):
        having.setdefault(cell, []).append(layer)
    if len(having) == 1:
        return [f"{title}, all layers: {cells[0]}"]
    return [f"{title}, {together(names)}: {cell}" for cell, names in having.items()]


def _cells(layer: ExplainedLayer) -> tuple[str, ...]:
    ran = layer.forward or "-"
    if layer.backward is not None:
        ran = f"{ran}, backward {layer.backward}"
    return (
        layer.layer or "(model)",
        f"{layer.hidden} x {layer.neurons}",
        layer.plan,
        ran,
        *("-" if share is None else f"{share:.1%}" for share in (layer.active, layer.union)),
        "-" if layer.limit is None else f"{layer.limit:.2f}x",
        "-" if layer.gain is None else str(layer.gain),
        layer.reason,
    )
