"""A training run as data: every setting, validated, from YAML and back."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from .._checks import reject
from ..activations import Activation
from ..plan import Plan
from .data import DataConfig

ARCHITECTURES = ("llama", "qwen2")
PRECISIONS = ("float32", "bfloat16", "float16")
DENSE_ACTIVATIONS = ("silu", "gelu")

# Fewer tokens take rare neurons for dead ones: at the end of preset tiny 20 to 45% of the neurons do not fire
# in a batch of 2,048 tokens, 5.9% in 40,000 tokens of training, 7.3% in as many held-out ones.
DEAD_TOKENS = 40_000


def _positive(section: str, config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            reject(f"{section}.{name}", value, "a number above 0")


def _not_negative(section: str, config: Any, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(config, name) < math.inf:
            reject(f"{section}.{name}", getattr(config, name), "a number of at least 0")


def _one_of(name: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        reject(name, repr(value), " | ".join(accepted))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model, drawn at random or taken from a checkpoint.

    activation:    of the feed-forward blocks: "relu", "relu2", "fatrelu(THRESHOLD)"; "silu" and "gelu" give a
                   stock dense model, to compare with.
    init_from:     what to start from: a run's folder, a model's, or a name on the Hub; one of ours, or a
                   dense Llama or Qwen2, whose activation is then swapped. It brings sizes and vocabulary.
    plan:          a `twell.Plan` spec for every layer ("dense", "block", ...); None lets layers decide.
    """

    architecture: str = "llama"
    hidden_size: int = 256
    intermediate_size: int = 1024
    layers: int = 4
    heads: int = 4
    kv_heads: int | None = None
    gated: bool = True
    activation: str = "relu"
    positions: int = 2048
    tie_embeddings: bool = True
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    init_from: str | None = None
    plan: str | None = None

    def __post_init__(self) -> None:
        _one_of("model.architecture", self.architecture, ARCHITECTURES)
        _positive(
            "model", self, "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "positions"
        )
        _positive("model", self, "rms_norm_eps", "initializer_range")
        if self.plan is not None:
            Plan.parse(self.plan)
        if self.init_from is None:
            self._check_heads()
        if not self.dense:
            Activation.parse(self.activation)
        elif not self.gated:
            reject("model.gated", False, f"true with activation {self.activation!r}: stock models are gated")

    def _check_heads(self) -> None:
        if self.hidden_size % self.heads:
            reject("model.heads", self.heads, f"a divisor of hidden_size = {self.hidden_size}")
        if self.hidden_size // self.heads % 2:
            reject(
                "model.heads", self.heads, "heads of an even size: rotary positions turn pairs of features"
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            reject("model.kv_heads", self.kv_heads, f"a divisor of heads = {self.heads}")

    @property
    def dense(self) -> bool:
        """Whether it is a stock model, without sparsity."""
        return self.activation in DENSE_ACTIVATIONS


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """The sparsity of the model. Steps are optimiser steps.

    l1:             weight of the L1 penalty, lambda; 2e-5 is the paper's.
    l1_start, l1_end:  no penalty until step l1_start, then a linear ramp, full from l1_end on.
    dead_after:     tokens without firing after which a neuron counts as dead; None: 40,000, or one global
                    batch where that is more.
    revive_every:   steps between revivals of dead neurons: their gate rows are drawn again and their
                    optimiser state is cleared. 0: never.
    revive_until:   step from which no neuron is revived any more; None: not in the last tenth of the run.
    """

    l1: float = 2e-5
    l1_start: int = 0
    l1_end: int = 0
    dead_after: int | None = None
    revive_every: int = 0
    revive_until: int | None = None

    def __post_init__(self) -> None:
        _not_negative("recipe", self, "l1", "l1_start", "l1_end", "revive_every")
        _positive("recipe", self, "dead_after")
        if self.revive_until is not None and self.revive_until < 0:
            reject("recipe.revive_until", self.revive_until, "a step of at least 0")
        if self.l1_end < self.l1_start:
            reject("recipe.l1_end", self.l1_end, f"a step of at least l1_start = {self.l1_start}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The optimisation: AdamW, linear warm-up, cosine decay to `final_lr`, in optimiser steps.

    batch:          sequences per step, over all processes; the number of processes does not change the run.
    micro_batch:    sequences per process at a time; gradients of several are accumulated. None: all at once.
    precision:      of the computation; weights and optimiser stay in float32 (autocast).
    eval_every, save_every, log_every:  in steps. The last step is always logged, evaluated and saved; 0 for
                    the first two: nothing else is.
    keep:           checkpoints to keep, at least 2, so that a damaged one is not the last.
    workers:        processes that load data; 0: the training process does.
    report:         where metrics go besides the run directory: any of "tensorboard", "wandb", ...
    """

    steps: int = 1000
    batch: int = 16
    micro_batch: int | None = None
    lr: float = 1e-3
    final_lr: float = 0.0
    warmup: int = 100
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    precision: str = "float32"
    checkpointing: bool = False
    compile: bool = False
    eval_every: int = 0
    save_every: int = 0
    log_every: int = 10
    keep: int = 2
    workers: int = 0
    seed: int = 0
    report: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _one_of("train.precision", self.precision, PRECISIONS)
        _positive("train", self, "steps", "batch", "micro_batch", "lr", "eps", "log_every")
        _not_negative("train", self, "final_lr", "warmup", "weight_decay", "clip", "eval_every", "save_every")
        _not_negative("train", self, "workers", "seed")
        if self.keep < 2:
            reject("train.keep", self.keep, "at least 2: a damaged checkpoint must not be the last")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                reject(f"train.{name}", getattr(self, name), "a number from 0 to 1, without 1")
        if self.seed >= 2**32:
            reject("train.seed", self.seed, "at most 4,294,967,295")
        if self.final_lr > self.lr:
            reject("train.final_lr", self.final_lr, f"at most lr = {self.lr}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything about a run; `preset` is where it started from, for the reader."""

    preset: str | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if self.preset == "relufy" and self.model.init_from is None:
            reject("model.init_from", None, "the dense checkpoint that preset 'relufy' is to make sparse")
        if self.data.sequence_length > self.model.positions and self.model.init_from is None:
            reject(
                "data.sequence_length",
                self.data.sequence_length,
                f"at most model.positions = {self.model.positions}",
            )

    @property
    def tokens_per_step(self) -> int:
        return self.train.batch * self.data.sequence_length

    @property
    def dead_after(self) -> int:
        return self.recipe.dead_after or max(self.tokens_per_step, DEAD_TOKENS)

    @property
    def revive_until(self) -> int:
        steps = self.train.steps
        return steps - steps // 10 if self.recipe.revive_until is None else self.recipe.revive_until

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
