"""What `profile.json` holds. Reports build on it: fields are added, never renamed. See docs/profile.md."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._errors import reject
from .._files import write_json
from .._interval import Interval

FORMAT = "twell profile"
VERSION = 1
"""Raised when a reader of an earlier version would misunderstand a file."""
FEWEST_LAYERS = 6
"""Of fewer timed layers, chance alone makes a correlation."""


@dataclass(frozen=True, kw_only=True)
class Nnz:
    """Active neurons per token. share: mean / H."""

    mean: float
    share: float
    p50: int
    p99: int
    max: int


@dataclass(frozen=True, kw_only=True)
class HotNeuron:
    neuron: int
    rate: float


@dataclass(frozen=True, kw_only=True)
class Firing:
    """How often neurons fire.

    dead:        neurons that never did on this text.
    rank, rate:  neuron number `rank`, from the busiest (1) to the quietest (H), fires for this share of the
                 tokens; about 200 ranks, evenly spaced on a logarithmic scale.
    hottest:     the busiest ones.
    """

    dead: int
    rank: list[int]
    rate: list[float]
    hottest: list[HotNeuron]


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Neighbouring tokens of a sequence.

    kept:            share of a token's active neurons that the token before it activates as well.
    kept_by_chance:  the same for tokens that have nothing to do with each other.
    jaccard:         neurons that both activate, over neurons that either does.
    """

    kept: float
    kept_by_chance: float
    jaccard: float


@dataclass(frozen=True, kw_only=True)
class OverflowShare:
    """Shares of tiles, and of tokens with at least one such tile, that hold more than `capacity` entries."""

    compression: int
    capacity: int
    tiles: float
    rows: float


@dataclass(frozen=True, kw_only=True)
class Overflow:
    """What would not fit the paper's formats.

    tile:            neurons of a tile of row TwELL.
    fullest_tile:    most active neurons in one tile of one token.
    by_compression:  for tile / compression - 1 entries a tile.
    heavy_row, heavy_rows:  entries of a row of the training format, and the share of tokens with more.
    """

    tile: int
    fullest_tile: int
    by_compression: list[OverflowShare]
    heavy_row: int
    heavy_rows: float


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Measured on the input that this layer gets from the first batch, interleaved with dense PyTorch.

    nnz:           mean active neurons of that input.
    dense_ms:      stock eager PyTorch on the same weights.
    sparse_path, sparse_ms:  the sparse path by name: "block" on a GPU, "row" on a CPU.
    auto_ms, auto_path, reason:  what an automatic plan runs, and why.
    sparse_speedup, auto_speedup:  ratios of medians.
    auto_low, auto_high:  95% interval of the latter; None in profiles of earlier versions.
    """

    tokens: int
    nnz: float
    dense_ms: float
    sparse_path: str
    sparse_ms: float
    sparse_speedup: float
    auto_path: str
    auto_ms: float
    auto_speedup: float
    reason: str
    auto_low: float | None = None
    auto_high: float | None = None

    @property
    def interval(self) -> Interval:
        """The interval of `auto_speedup`."""
        low, high = (self.auto_speedup if end is None else end for end in (self.auto_low, self.auto_high))
        return Interval(low, self.auto_speedup, high)


@dataclass(frozen=True, kw_only=True)
class SeenToken:
    """One token of the text. before, after: the text around it."""

    nnz: float
    token: int
    text: str
    before: str
    after: str
    position: int


@dataclass(frozen=True, kw_only=True)
class KnownToken:
    """An entry of the vocabulary: its mean active neurons per layer over `count` occurrences."""

    nnz: float
    token: int
    text: str
    count: int


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """One block.

    tokens:           that were counted; fewer than the profile's where a router sends some elsewhere.
    nnz_by_position:  mean nnz of the positions from `position_starts[i]` to before the next.
    union:            neurons that at least one of `union_sizes[i]` consecutive tokens activates; None where
                      a batch has fewer tokens.
    union_apart:      the same for tokens from different places of the text.
    most, fewest:     tokens that wake most and fewest neurons, beyond the first few of a sequence.
    speed:            None if it was not measured.
    """

    name: str
    hidden: int
    neurons: int
    gated: bool
    activation: str
    tokens: int
    nnz: Nnz
    firing: Firing
    nnz_by_position: list[float] | None
    union: list[float | None]
    union_apart: list[float | None]
    overlap: Overlap | None
    overflow: Overflow
    most: list[SeenToken]
    fewest: list[SeenToken]
    speed: Speed | None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The first tokens of the text, one by one, for a heat map of tokens by layers.

    tokens, text:     [T] ids, and the text that each stands for.
    nnz:              [layers][T].
    neurons, values:  [layers][T][up to K] the neurons with the largest |hidden|, and their hidden values.
    """

    tokens: list[int]
    text: list[str]
    nnz: list[list[int]]
    neurons: list[list[list[int]]]
    values: list[list[list[float]]]


@dataclass(frozen=True, kw_only=True)
class Correlation:
    """Pearson's, over layers, between mean nnz and speed-up; None for fewer than `FEWEST_LAYERS` timed layers
    or for alike ones.

    paper:  what the paper reports for its kernels.
    """

    sparse: float | None
    auto: float | None
    paper: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model on a text.

    tokens:      that went through the model.
    stopped:     None if the text (or the limit) was reached; else why not.
    skipped:     blocks that did not run on our kernels, and why.
    most, fewest:  entries of the vocabulary that occurred several times.
    """

    model: str
    text: list[str]
    created: str
    tokens: int
    sequence_length: int
    batch: int
    dtype: str
    hardware: dict[str, Any]
    versions: dict[str, Any]
    stopped: str | None
    position_starts: list[int]
    union_sizes: list[int]
    layers: list[LayerProfile]
    skipped: dict[str, str]
    most: list[KnownToken]
    fewest: list[KnownToken]
    correlation: Correlation | None
    sample: Sample | None

    @property
    def mean_nnz(self) -> float:
        """Over layers."""
        return sum(layer.nnz.mean for layer in self.layers) / len(self.layers)

    @property
    def mean_share(self) -> float:
        return sum(layer.nnz.share for layer in self.layers) / len(self.layers)

    def save(self, path: Path) -> None:
        write_json(path, {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)})


def read_profile(path: str | Path) -> Profile:
    """A profile that `Profile.save` wrote; drops correlations that early versions drew from few layers."""
    accepted = f"a profile.json of version {VERSION}, which `twell profile` writes"
    try:
        content = json.loads(Path(path).read_text())
    except ValueError as error:
        reject("profile", f"{path}, which is no JSON ({error})", accepted)
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        reject("profile", f"{path}, which is something else", accepted)
    if (version := content.pop("version", None)) != VERSION:
        reject("profile", f"{path} of version {version}", accepted)
    try:
        profile = _built(Profile, content)
        timed = sum(layer.speed is not None for layer in profile.layers)
        if profile.correlation is None or timed >= FEWEST_LAYERS:
            return profile
        unknown = dataclasses.replace(profile.correlation, sparse=None, auto=None)
        return dataclasses.replace(profile, correlation=unknown)
    except (KeyError, TypeError, AttributeError) as error:
        return reject("profile", f"{path}, which is damaged ({type(error).__name__}: {error})", accepted)


def _built(kind: Any, value: Any) -> Any:
    """`value` as read from JSON, with the dataclasses that `kind` names; fields of later versions are left
    out."""
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(
            **{
                field.name: _built(hints[field.name], value[field.name])
                for field in dataclasses.fields(kind)
                if field.name in value or field.default is dataclasses.MISSING
            }
        )
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return [_built(arguments[0], item) for item in value]
    if origin in (types.UnionType, typing.Union):
        [inner] = [argument for argument in arguments if argument is not type(None)]
        return None if value is None else _built(inner, value)
    return value
