"""`twell.explain`: shows what ran in each layer of a model, and why."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from ._errors import reject
from .layer_state import LayerState, known_layer
from .nn import SparseMLP
from .problem import PLAIN

_COLUMNS = ("layer", "D x H", "plan", "ran", "active", "why")


class ExplainedLayer(NamedTuple):
    """What is known of one block.

    layer:    name of the block in the model.
    hidden, neurons:  D and H.
    plan:     its plan, or "auto".
    forward:  path of the last decided call: "dense", "row" or "block"; None before the first call.
    backward: path of our last backward; None if there was none or autograd ran it.
    active:   share of active neurons in a block of tokens when the forward was decided, or the last one
              known; None on CPUs, which look at every call instead.
    reason:   why the forward ran this way.
    """

    layer: str
    hidden: int
    neurons: int
    plan: str
    forward: str | None
    backward: str | None
    active: float | None
    reason: str


class Explanation(list[ExplainedLayer]):
    """A list of layers that prints as a table."""

    def __str__(self) -> str:
        if not self:
            return "no SparseMLP found"
        rows = [_COLUMNS, *map(_cells, self)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )


def explain(model: nn.Module) -> Explanation:
    """What ran in every `SparseMLP` of `model`, and why. Print the result for a table.

        model(ids)
        print(twell.explain(model))

    Layers decide when they run, so a layer without a call shows no path. A call that repeats a decision shows
    that decision. Blocks that a compiler fused into dense code do not appear as run.
    """
    if not isinstance(model, nn.Module):
        reject("model", type(model).__name__, "a torch.nn.Module")
    return Explanation(
        _explained(name, module) for name, module in model.named_modules() if isinstance(module, SparseMLP)
    )


def _explained(name: str, mlp: SparseMLP) -> ExplainedLayer:
    plan = "auto" if mlp.plan is None else mlp.plan.spec
    forward = backward = active = None
    reason = "it has not been called"
    state = _state_of(mlp)
    if state is not None:
        outcome = state.ran["forward"]
        forward, reason = outcome.path, outcome.reason
        backward = state.ran["backward"].path if "backward" in state.ran else None
        shares = [outcome.share, *(reading.share for reading in reversed(state.readings().values()))]
        active = next((share for share in shares if share is not None), None)
    return ExplainedLayer(
        name, mlp.hidden_size, mlp.intermediate_size, plan, forward, backward, active, reason
    )


def _state_of(mlp: SparseMLP) -> LayerState | None:
    """The module's state or the one that a compiled graph keeps for its weights: whichever ran last."""
    states = [mlp._layer]
    selector = mlp.gate_proj if mlp.gated else mlp.up_proj
    weight = getattr(selector, "weight", None)
    if type(weight) in PLAIN:
        states.append(known_layer(weight))
    called = [state for state in states if state is not None and "forward" in state.ran]
    return max(called, key=lambda state: state.ran["forward"].order, default=None)


def _cells(layer: ExplainedLayer) -> tuple[str, ...]:
    ran = layer.forward or "-"
    if layer.backward is not None:
        ran = f"{ran}, backward {layer.backward}"
    active = "-" if layer.active is None else f"{layer.active:.1%}"
    return (
        layer.layer or "(model)",
        f"{layer.hidden} x {layer.neurons}",
        layer.plan,
        ran,
        active,
        layer.reason,
    )
