"""Which tokens wake most and fewest neurons, and a sample of tokens one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..nn import SparseMLP
from ..problem import Tensors
from .schema import KnownToken, Sample, SeenToken

_LISTED = 10
_BEFORE, _AFTER = 12, 4  # tokens of context
# The first tokens of a sequence fire far more than all others, whatever they are (`nnz_by_position`).
LEADING = 8
_ENOUGH = 5  # occurrences of an entry of the vocabulary
_TOP = 8
_DIGITS = 4


class _Candidate(NamedTuple):
    nnz: float
    order: int  # in the text
    token: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    position: int


class ExtremeTokens:
    """The tokens of a text with most and with fewest active neurons; equal ones in the text's order."""

    def __init__(self) -> None:
        self._most: list[_Candidate] = []
        self._fewest: list[_Candidate] = []
        self._seen = 0

    def add(self, nnz: Tensor, windows: Tensor) -> None:
        """nnz [B, S] of the tokens int64 [B, S], both on the CPU."""
        length = windows.shape[1]
        first = LEADING if length > 2 * LEADING else 0
        kept = nnz[:, first:].flatten()
        count = min(_LISTED, kept.numel())
        for largest in (True, False):
            # Not topk: among equal ones it takes any.
            places = kept.sort(descending=largest, stable=True).indices[:count].tolist()
            found = []
            for place in places:
                row, position = divmod(place, length - first)
                found.append(self._candidate(nnz, windows, row, first + position))
            if largest:
                self._most = sorted([*self._most, *found], key=lambda c: (-c.nnz, c.order))[:_LISTED]
            else:
                self._fewest = sorted([*self._fewest, *found], key=lambda c: (c.nnz, c.order))[:_LISTED]
        self._seen += windows.numel()

    def _candidate(self, nnz: Tensor, windows: Tensor, row: int, position: int) -> _Candidate:
        ids = windows[row].tolist()
        return _Candidate(
            nnz=float(nnz[row, position]),
            order=self._seen + row * len(ids) + position,
            token=ids[position],
            before=tuple(ids[max(position - _BEFORE, 0) : position]),
            after=tuple(ids[position + 1 : position + 1 + _AFTER]),
            position=position,
        )

    def lists(self, tokenizer: Any) -> tuple[list[SeenToken], list[SeenToken]]:
        """Most and fewest, in words."""
        return tuple([_in_words(c, tokenizer) for c in kept] for kept in (self._most, self._fewest))


def _in_words(candidate: _Candidate, tokenizer: Any) -> SeenToken:
    return SeenToken(
        nnz=candidate.nnz,
        token=candidate.token,
        text=text_of([candidate.token], tokenizer),
        before=text_of(candidate.before, tokenizer),
        after=text_of(candidate.after, tokenizer),
        position=candidate.position,
    )


def text_of(ids: Sequence[int], tokenizer: Any) -> str:
    return tokenizer.decode(list(ids), clean_up_tokenization_spaces=False) if ids else ""


class VocabularyCounts:
    """Active neurons by entry of the vocabulary, over all layers."""

    def __init__(self, size: int) -> None:
        self._sums = torch.zeros(size, dtype=torch.float64)
        self._counts = torch.zeros(size, dtype=torch.int64)

    def add(self, nnz: Tensor, windows: Tensor) -> None:
        """nnz float64 [B, S], mean over layers, of the tokens int64 [B, S]."""
        first = LEADING if windows.shape[1] > 2 * LEADING else 0
        ids = windows[:, first:].flatten()
        self._sums.scatter_add_(0, ids, nnz[:, first:].flatten())
        self._counts.scatter_add_(0, ids, torch.ones_like(ids))

    def lists(self, tokenizer: Any) -> tuple[list[KnownToken], list[KnownToken]]:
        """Most and fewest, of those that occurred several times."""
        ids = (self._counts >= _ENOUGH).nonzero().squeeze(1)
        means = self._sums[ids] / self._counts[ids]
        order = means.sort(descending=True, stable=True).indices
        count = min(_LISTED, len(ids))

        def known(place: int) -> KnownToken:
            token = int(ids[place])
            occurrences = int(self._counts[token])
            text = text_of([token], tokenizer)
            return KnownToken(nnz=float(means[place]), token=token, text=text, count=occurrences)

        most, fewest = order[:count].tolist(), order.flip(0)[:count].tolist()
        return [known(place) for place in most], [known(place) for place in fewest]


class SampledLayer:
    """The tokens of the sample in one layer: active neurons, and those with the largest hidden values."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self.nnz: list[int] = []
        self.neurons: list[list[int]] = []
        self.values: list[list[float]] = []

    def add(self, block: SparseMLP, x: Tensor, weights: Tensors) -> None:
        """x [tokens, D], in the order of the text; what is beyond the sample is left out."""
        x = x[: self._wanted - len(self.nnz)]
        if not len(x):
            return
        activated, hidden = _hidden(block, x, weights)
        nnz = (activated != 0).sum(1).tolist()
        values, neurons = hidden.abs().topk(min(_TOP, hidden.shape[1]), dim=1)
        signed = hidden.gather(1, neurons).tolist()
        for count, chosen, sizes, kept in zip(nnz, neurons.tolist(), values.tolist(), signed, strict=True):
            fired = [place for place, size in enumerate(sizes) if size != 0]
            self.nnz.append(count)
            self.neurons.append([chosen[place] for place in fired])
            self.values.append([float(f"{kept[place]:.{_DIGITS}g}") for place in fired])


def _hidden(block: SparseMLP, x: Tensor, weights: Tensors) -> tuple[Tensor, Tensor]:
    """Activations of the neurons and hidden values, [M, H] each."""
    up, _down, gate, up_bias, _down_bias, gate_bias = weights
    ups = linear(x, up, up_bias)
    if gate is None:
        activated = block.activation(ups)
        return activated, activated.float()
    activated = block.activation(linear(x, gate, gate_bias))
    return activated, (activated * block.activation.factor(ups)).float()


def make_sample(ids: list[int], layers: list[SampledLayer], tokenizer: Any) -> Sample | None:
    """None if layers saw different tokens, as experts do."""
    if not ids or any(len(layer.nnz) != len(ids) for layer in layers):
        return None
    return Sample(
        tokens=ids,
        text=[text_of([token], tokenizer) for token in ids],
        nnz=[layer.nnz for layer in layers],
        neurons=[layer.neurons for layer in layers],
        values=[layer.values for layer in layers],
    )
