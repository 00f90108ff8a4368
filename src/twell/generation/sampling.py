"""Which token comes next: transformers' logits processors, as far as a captured step can run them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation import logits_process

# They look at the scores alone, and compute without waiting for the device.
_OF_SCORES = tuple(
    getattr(logits_process, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "EpsilonLogitsWarper",
        "TypicalLogitsWarper",
        "LogitNormalization",
    )
    if hasattr(logits_process, name)
)
_REPETITION = logits_process.RepetitionPenaltyLogitsProcessor
_UNCOUNTED = "prompt_ignore_length"


class Sampling(NamedTuple):
    """processors: in their order; sampled: whether to draw, or take the best."""

    processors: tuple[Any, ...]
    sampled: bool

    @property
    def remembers(self) -> bool:
        """Whether it asks which tokens were there before."""
        return any(type(one) is _REPETITION for one in self.processors)

    @property
    def uncounted(self) -> Tensor | None:
        """[B]: so many tokens at the start of each sequence do not count as there before."""
        found = [getattr(one, _UNCOUNTED, None) for one in self.processors if type(one) is _REPETITION]
        return found[0] if found and isinstance(found[0], Tensor) else None

    @property
    def key(self) -> tuple:
        """Equal for requests that a captured step may serve alike."""
        return self.sampled, *((type(one).__name__, *_settings(one)) for one in self.processors)

    def choose(self, logits: Tensor, seen: Tensor | None) -> Tensor:
        """int64 [B] from logits [B, V]; seen: bool [B, V], tokens that were there before."""
        scores = logits.float()
        for one in self.processors:
            if type(one) is _REPETITION:
                penalised = torch.where(scores < 0, scores * one.penalty, scores / one.penalty)
                scores = torch.where(seen, penalised, scores)
            else:
                scores = one(None, scores)
        if not self.sampled:
            return scores.argmax(-1)
        chances = scores.softmax(-1)
        # As `torch.multinomial` draws one, without its checks, which wait for the device.
        return (chances / torch.empty_like(chances).exponential_()).argmax(-1)


def sampling_of(processors: Iterable[Any], sampled: bool) -> Sampling | str:
    """The sampling, or why a captured step cannot do it."""
    processors = tuple(processors)
    if sum(type(one) is _REPETITION for one in processors) > 1:
        return "several repetition penalties"
    for one in processors:
        if type(one) is _REPETITION:
            # transformers 5.23 leaves padding out so, as a tensor; a number comes from the user.
            uncounted = getattr(one, _UNCOUNTED, None)
            if not isinstance(uncounted, Tensor) and uncounted:
                return "a repetition penalty that ignores the prompt"
        elif type(one) not in _OF_SCORES:
            return f"the logits processor {type(one).__name__}"
    return Sampling(processors, sampled)


def _settings(processor: Any) -> tuple:
    return tuple(
        (name, value.tolist() if isinstance(value, Tensor) else value)
        for name, value in sorted(vars(processor).items())
        if name != _UNCOUNTED  # a part of the request
    )
