"""One random call, described by plain values: everything a run of it needs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from math import prod

NAMES = ("x", "up", "down", "gate", "up_bias", "down_bias", "gate_bias")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is called, and how. Defaults are the simplest call, so what a case says is what is special of it.

    device:    "cpu", "cuda", or "interpreted": the GPU kernels on CPU tensors.
    leading:   x's leading dimensions.
    density:   share of active neurons; skewed: some neurons fire always, others never.
    specials:  (operand, value) pairs: a few numbers of that operand become "nan", "inf", "-inf", "-0.0",
               "subnormal" or "huge".
    layouts:   (operand, layout) pairs: "transposed", "sliced", "offset", or "expanded" (x only).
    trained:   operands that need gradients.
    loss:      "weighted", "sum" (a gradient of zero strides), "transposed" (one of others), each of y;
               "l1" alone, or "weighted+l1".
    entry:     "ffn", "stats" (with statistics) or "module", a `SparseMLP`.
    mode:      "grad", "no_grad" or "inference".
    calls:     how often it is called before the call that is looked at; changed: with other weights then.
    sparse_backward:  take the CPU's backward on the active set however small the block is.
    cpu:       what automatic plans take the CPU for, one of `run.CPUS`.
    """

    device: str = "cpu"
    seed: int = 0
    leading: tuple[int, ...] = (1,)
    features: int = 8
    neurons: int = 8
    outputs: int = 8
    dtype: str = "float32"
    autocast: str | None = None
    gated: bool = False
    activation: str = "relu"
    biases: tuple[str, ...] = ()
    density: float = 0.5
    skewed: bool = False
    specials: tuple[tuple[str, str], ...] = ()
    layouts: tuple[tuple[str, str], ...] = ()
    plan: str | None = None
    entry: str = "ffn"
    mode: str = "grad"
    trained: tuple[str, ...] = ()
    loss: str = "weighted"
    calls: int = 0
    changed: bool = False
    sparse_backward: bool = False
    cpu: str = "plain"

    @property
    def tokens(self) -> int:
        return prod(self.leading)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of those that the call has."""
        weights = ("x", "up", "down", *(("gate",) if self.gated else ()))
        return (*weights, *(name for name in NAMES if name in self.biases))

    @property
    def compute_dtype(self) -> str:
        """What the block is computed in."""
        return self.autocast or self.dtype

    @property
    def trains(self) -> bool:
        return bool(self.trained) and self.mode == "grad"

    @property
    def recorded(self) -> bool:
        return self.entry != "ffn"

    def to_json(self) -> str:
        """What differs from the defaults."""
        default = asdict(Case())
        return json.dumps({key: value for key, value in asdict(self).items() if value != default[key]})

    @staticmethod
    def from_json(text: str) -> Case:
        values = json.loads(text)
        unknown = set(values) - {field.name for field in fields(Case)}
        if unknown:
            raise ValueError(f"no fields of a case: {sorted(unknown)}")
        return Case(**{key: _frozen(value) for key, value in values.items()})


def _frozen(value):
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def consistent(case: Case) -> Case:
    """`case` without what contradicts the rest of it."""
    biases = tuple(name for name in case.biases if case.gated or name != "gate_bias")
    case = replace(case, biases=biases)
    if case.activation == "drelu" and not case.gated:
        case = replace(case, activation="relu")
    trained = tuple(name for name in NAMES if name in case.trained and name in case.operands)
    if "l1" in case.loss and case.entry == "ffn":
        case = replace(case, entry="stats")
    if case.loss == "l1":  # of these it has no gradient
        trained = tuple(name for name in trained if name not in ("down", "down_bias")) or ("x",)
    if case.entry == "module":
        layouts = tuple(pair for pair in case.layouts if pair[0] == "x" or pair == ("down", "transposed"))
        case = replace(case, outputs=case.features, layouts=layouts)
    keep = [pair for pair in case.specials if pair[0] in case.operands]
    layouts = tuple(pair for pair in case.layouts if pair[0] in case.operands)
    return replace(case, trained=trained, specials=tuple(keep), layouts=layouts)
