"""Every setting of a training run: its type, default, meaning and what it accepts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._errors import reject, require_choice, require_int, require_text
from .._files import user_cache
from ..activations import Activation
from ..plan import Plan

ARCHITECTURES = ("llama", "qwen2")  # as in `hf.families`, which would import transformers
PRECISIONS = ("float32", "bfloat16", "float16")
DENSE_ACTIVATIONS = ("silu", "gelu")

# A shorter window counts rare neurons as dead: at the end of preset tiny 20 to 45% of the neurons are silent
# in a batch of 2,048 tokens, 5.9% in 40,000 training tokens, 7.3% in 40,000 held-out tokens.
DEAD_TOKENS = 40_000

BYTE_TOKENS = 257
"""The smallest byte-level vocabulary: every byte, and the end of a document."""

_PREPARED = "prepared:"
_MEANING = "meaning"


def setting(default: Any, meaning: str) -> Any:
    """A field of a section; `twell train --help` shows the meaning."""
    return field(default=default, metadata={_MEANING: meaning})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model: new, or from a checkpoint."""

    architecture: str = setting("llama", "llama or qwen2.")
    hidden_size: int = setting(256, "Features per token.")
    intermediate_size: int = setting(1024, "Neurons of a feed-forward block.")
    layers: int = setting(4, "Transformer layers.")
    heads: int = setting(4, "Attention heads.")
    kv_heads: int | None = setting(None, "Key and value heads; null: as many as heads.")
    gated: bool = setting(True, "Whether feed-forward blocks have a gate.")
    activation: str = setting(
        "relu", "relu, relu2, fatrelu(THRESHOLD) or drelu; silu and gelu give a stock dense model."
    )
    positions: int = setting(2048, "Longest sequence that the model can read.")
    tie_embeddings: bool = setting(True, "Whether input and output embeddings share their weights.")
    rms_norm_eps: float = setting(1e-5, "Epsilon of the normalisation layers.")
    initializer_range: float = setting(0.02, "Standard deviation of new weights.")
    init_from: str | None = setting(
        None, "Start from a run's folder, a model's folder or a Hub name; it decides sizes and vocabulary."
    )
    plan: str | None = setting(
        None, "twell.Plan of every layer: auto, dense, row or block; null: each layer decides (auto)."
    )

    def __post_init__(self) -> None:
        require_choice("model.architecture", self.architecture, ARCHITECTURES)
        _positive(
            "model", self, "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "positions"
        )
        _positive("model", self, "rms_norm_eps", "initializer_range")
        if self.plan is not None:
            Plan.parse(self.plan)
        if self.init_from is None:
            self._check_heads()
        if not self.dense:
            Activation.parse(self.activation).check_gated(self.gated)
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
        """Whether this is a stock model, without sparsity."""
        return self.activation in DENSE_ACTIVATIONS


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The corpus, the tokenizer and the cut into sequences.

    `source` is "python" (the standard library's source, built in), a file or folder (UTF-8 text of any name,
    .jsonl, also as .gz or .xz, and .parquet), "hf:NAME[:CONFIG[:SPLIT]]", or a list of these; or
    "prepared:FOLDER", tokens with their tokenizer that `prepare` wrote, perhaps elsewhere.
    """

    source: str | tuple[str, ...] = setting(
        "python", "python, a file, a folder, hf:NAME[:CONFIG[:SPLIT]], a list of these, or prepared:FOLDER."
    )
    text_field: str = setting("text", "Field of .jsonl, .parquet and Hugging Face records with the text.")
    tokenizer: str = setting(
        "train", "train: a byte-level BPE learnt from the corpus; else a Hugging Face name or folder."
    )
    vocab_size: int = setting(4096, "Tokens of a trained tokenizer, with the end-of-document token.")
    tokenizer_bytes: int = setting(20_000_000, "Maximum amount of text to train the tokenizer on, in bytes.")
    sequence_length: int = setting(256, "Tokens per training example.")
    held_out: float = setting(
        0.02,
        "Share of documents kept out of training; a single document loses that share of its end. 0: none.",
    )
    held_out_tokens: int = setting(1_000_000, "Maximum size of the evaluation set, in tokens.")
    max_tokens: int | None = setting(None, "Most training tokens; null: the whole source.")
    seed: int = setting(0, "Decides, together with a document's text, whether it is held out.")
    cache: str | None = setting(
        None, "Folder for tokens and tokenizers; null: twell/data in the user's cache folder."
    )

    def __post_init__(self) -> None:
        if isinstance(self.source, list):
            object.__setattr__(self, "source", tuple(self.source))
        if not self.sources or not all(isinstance(name, str) and name.strip() for name in self.sources):
            reject("data.source", repr(self.source), "'python', a path, 'hf:NAME', or a list of these")
        for name in ("text_field", "tokenizer"):
            require_text(f"data.{name}", getattr(self, name))
        if self.cache is not None:
            require_text("data.cache", self.cache, "None or a folder")
        require_int("data.vocab_size", self.vocab_size, BYTE_TOKENS, ": one per byte, one end")
        for name in ("tokenizer_bytes", "sequence_length", "held_out_tokens"):
            require_int(f"data.{name}", getattr(self, name), 1)
        if type(self.held_out) not in (int, float) or not 0 <= self.held_out < 1:
            reject("data.held_out", repr(self.held_out), "a number from 0 to 1, without 1")
        if self.max_tokens is not None:
            least = self.sequence_length
            require_int("data.max_tokens", self.max_tokens, least, " (sequence_length), or None")
        require_int("data.seed", self.seed, 0)

    @property
    def prepared(self) -> Path | None:
        """The folder of a prepared `source`, which makes the other settings about text irrelevant."""
        if isinstance(self.source, str) and self.source.startswith(_PREPARED):
            return Path(self.source.removeprefix(_PREPARED)).expanduser()
        return None

    @property
    def sources(self) -> tuple[str, ...]:
        """`source` as a tuple."""
        return self.source if isinstance(self.source, tuple) else (self.source,)

    @property
    def cache_folder(self) -> Path:
        """Where tokens and tokenizers are kept; it may not exist yet."""
        return user_cache() / "data" if self.cache is None else Path(self.cache).expanduser()


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """How the model becomes sparse. Steps are optimiser steps."""

    l1: float = setting(2e-5, "Weight of the L1 penalty; 2e-5 is the paper's.")
    l1_start: int = setting(0, "The penalty is 0 up to this step, then rises linearly until l1_end.")
    l1_end: int = setting(0, "First step with the full penalty.")
    dead_after: int | None = setting(
        None,
        f"Silent tokens that make a neuron dead; null: {DEAD_TOKENS:,}, or one batch if that is more.",
    )
    revive_every: int = setting(
        0, "Steps between revivals: dead neurons get new gate rows and optimiser state; 0: never."
    )
    revive_until: int | None = setting(None, "Step at which revivals stop; null: after 90% of the run.")

    def __post_init__(self) -> None:
        _not_negative("recipe", self, "l1", "l1_start", "l1_end", "revive_every", "revive_until")
        _positive("recipe", self, "dead_after")
        if self.l1_end < self.l1_start:
            reject("recipe.l1_end", self.l1_end, f"a step of at least l1_start = {self.l1_start}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The optimisation: AdamW, linear warm-up, cosine decay. Steps are optimiser steps.

    The number of processes does not change a run: `batch` counts the sequences of all. The last step is
    always logged, evaluated and saved.
    """

    steps: int = setting(1000, "Optimiser steps.")
    batch: int = setting(16, "Sequences per step, over all processes.")
    micro_batch: int | None = setting(
        None, "Sequences per process at a time; gradients accumulate over several. null: all at once."
    )
    lr: float = setting(1e-3, "Highest learning rate.")
    final_lr: float = setting(0.0, "Learning rate at the end of the cosine decay.")
    warmup: int = setting(100, "Steps until the learning rate is highest.")
    beta1: float = setting(0.9, "AdamW's decay of the mean gradient.")
    beta2: float = setting(0.95, "AdamW's decay of the mean squared gradient.")
    eps: float = setting(1e-8, "AdamW's epsilon.")
    weight_decay: float = setting(0.1, "AdamW's weight decay.")
    clip: float = setting(1.0, "Clip the gradient to this norm; 0: no clipping.")
    precision: str = setting(
        "float32", "float32, bfloat16 or float16, by autocast; weights and optimiser stay in float32."
    )
    checkpointing: bool = setting(False, "Recompute activations in the backward pass to save memory.")
    compile: bool = setting(False, "Compile the model with torch.compile.")
    eval_every: int = setting(0, "Steps between evaluations; 0: only after the last step.")
    save_every: int = setting(0, "Steps between checkpoints; 0: only after the last step.")
    log_every: int = setting(10, "Steps between logs.")
    keep: int = setting(2, "Checkpoints to keep; at least 2, in case one is damaged.")
    workers: int = setting(0, "Processes that load data; 0: the training process does.")
    seed: int = setting(0, "Seed of weights, data order and revivals.")
    report: tuple[str, ...] = setting((), "Loggers to send metrics to as well, such as tensorboard or wandb.")

    def __post_init__(self) -> None:
        require_choice("train.precision", self.precision, PRECISIONS)
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
    """A whole run."""

    preset: str | None = setting(None, "Preset the settings started from; informational only.")
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


def meanings() -> Iterator[tuple[str, Any, str]]:
    """(key as in YAML, default, meaning) of every setting, sections as section.key."""

    def of(config: Any, prefix: str) -> Iterator[tuple[str, Any, str]]:
        for entry in dataclasses.fields(config):
            value = getattr(config, entry.name)
            if dataclasses.is_dataclass(value):
                yield from of(value, f"{entry.name}.")
            else:
                yield prefix + entry.name, value, entry.metadata.get(_MEANING, "")

    yield from of(RunConfig(), "")


def _positive(section: str, config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            reject(f"{section}.{name}", value, "a number above 0")


def _not_negative(section: str, config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 <= value < math.inf:
            reject(f"{section}.{name}", value, "a number of at least 0")
