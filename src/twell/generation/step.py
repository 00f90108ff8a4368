"""A step of generation on tensors that stay where they are, run or captured as one CUDA graph.

token    int64 [B]        the last one of every sequence
position int64 [B]        its position
column   int64 [1]        where it stands in sequence, mask and cache
mask     [B, 1, 1, C]     0 at columns that are attended to, the lowest number elsewhere
sequence int64 [B, C]     prompt and answer
ended    int64 [B]        the column of the stop token, C without one so far
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .._log import log_once
from ..sparsify.blocks import named_blocks
from .cache import StepCache
from .decoder import decoder_of
from .graphs import captured_graph, paths_of
from .sampling import Sampling


class Step:
    """A model's step for batches of one size, sequences of up to `columns` tokens and one sampling."""

    def __init__(
        self, model: nn.Module, sampling: Sampling, prompt: Cache, batch: int, columns: int, stops: int
    ) -> None:
        """stops: how many stop tokens there are; prompt: keys and values of one, for their shapes."""
        embedding = model.get_input_embeddings().weight
        device, integers = embedding.device, torch.int64
        self.columns, self._sampling = columns, sampling
        self.token, self.position, self.ended = (
            torch.zeros(batch, dtype=integers, device=device) for _ in range(3)
        )
        self.column = torch.zeros(1, dtype=integers, device=device)
        self.sequence = torch.zeros(batch, columns, dtype=integers, device=device)
        self.mask = torch.zeros(batch, 1, 1, columns, dtype=embedding.dtype, device=device)
        self._stops = torch.zeros(stops, dtype=integers, device=device)
        self._pad = torch.zeros((), dtype=integers, device=device)
        vocabulary = model.get_output_embeddings().weight.shape[0]
        seen = torch.zeros(batch, vocabulary, dtype=torch.bool, device=device)
        self._seen = seen if sampling.remembers else None
        self._cache = StepCache(prompt, columns, self.column)
        self._decoder = decoder_of(model, self._cache, compiled=device.type == "cuda")
        self._blocks = [block for _, block in named_blocks(model)]
        self.replays, self._uncapturable = 0, False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured: tuple[str, ...] = ()

    def begin(
        self,
        tokens: Tensor,
        attended: Tensor,
        positions: Tensor,
        cache: Cache,
        stops: list[int],
        pad: int,
        uncounted: Tensor | None = None,
    ) -> None:
        """Take a prompt, tokens [B, P], whose keys and values are in `cache`.

        attended:   [B, P], 0 where it is padded.
        positions:  [B], of the token after it.
        pad:        what follows a stop token.
        uncounted:  [B], first tokens of each sequence that a repetition penalty leaves out.
        """
        length = tokens.shape[1]
        self._cache.fill(cache)
        self._decoder.begin()
        self.sequence.fill_(pad)[:, :length] = tokens
        self.mask.fill_(torch.finfo(self.mask.dtype).min)
        self.mask[:, 0, 0, :length].masked_fill_(attended != 0, 0.0)
        self.position.copy_(positions)
        self.column.fill_(length)
        self.ended.fill_(self.columns)
        self._stops.copy_(torch.tensor(stops, dtype=torch.int64))
        self._pad.fill_(pad)
        if self._seen is not None:
            self._see(tokens, uncounted)

    def _see(self, tokens: Tensor, uncounted: Tensor | None) -> None:
        if uncounted is None:
            self._seen.zero_().scatter_(1, tokens, True)
            return
        batch, vocabulary = self._seen.shape
        places = torch.arange(tokens.shape[1], device=tokens.device)
        tokens = tokens.masked_fill(places < uncounted[:, None], vocabulary)  # to a column that is cut off
        seen = self._seen.new_zeros(batch, vocabulary + 1).scatter_(1, tokens, True)
        self._seen.copy_(seen[:, :vocabulary])

    def choose(self, logits: Tensor) -> None:
        """Take the token at `column` from logits [B, V]."""
        finished = self.ended < self.columns
        token = self._sampling.choose(logits, self._seen)
        token = torch.where(finished, self._pad, token)
        self.sequence.index_copy_(1, self.column, token[:, None])
        stopped = torch.isin(token, self._stops) & ~finished
        self.ended.copy_(torch.where(stopped, self.column, self.ended))
        if self._seen is not None:
            self._seen.scatter_(1, token[:, None], True)
        self.token.copy_(token)

    def run(self) -> None:
        """The next token, launched operation by operation."""
        logits = self.logits()
        self.column.add_(1)
        self.position.add_(1)
        self.choose(logits)

    def logits(self) -> Tensor:
        """[B, V], after `token`, whose keys and values go into the cache."""
        self.mask.index_fill_(3, self.column, 0.0)
        return self._decoder(self.token, self.position, self.mask)

    def replay(self) -> None:
        """The next token, in one launch."""
        if self._graph is None and not self._capture():
            self.run()
        else:
            self._graph.replay()

    def _capture(self) -> bool:
        if self._uncapturable:
            return False
        graph, reason = captured_graph(self.run, self.token.device)
        if graph is None:
            self._uncapturable = True
            log_once(f"generation launches step by step, since one cannot be captured: {reason}")
            return False
        self._graph, self._captured = graph, paths_of(self._blocks)
        return True

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def look_again(self) -> None:
        """The next token, operation by operation: layers are read on the way, and what a look before has read
        counts. Where they run otherwise than they were captured, the next replay captures again."""
        self.run()
        torch.cuda.synchronize(self.token.device)
        if paths_of(self._blocks) != self._captured:
            self._graph = None
