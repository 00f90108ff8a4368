"""`profile_model`: streams text through a model and counts how its neurons behave."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor, nn

from .._errors import reject, require_int, require_positive_int
from ..block_table import state_of
from ..evaluation import check_ids, require_sparse_blocks, text_windows, window_length
from ..measure.environment import hardware, versions
from ..nn import SparseMLP
from ..problem import Tensors, are_plain
from ..shares import active_neurons, run_observed
from ..sparsify.blocks import named_blocks
from .counts import UNION_SIZES, BlockCounts, position_starts
from .schema import LayerProfile, Profile, Speed
from .speed import correlation_of, measure_speed
from .tokens import ExtremeTokens, SampledLayer, VocabularyCounts, make_sample

SAMPLE_TOKENS = 256
REPETITIONS = 15
INTERRUPTED = "interrupted"


def profile_model(
    model: nn.Module,
    tokenizer: Any,
    documents: Iterable[str],
    *,
    name: str = "",
    text: Iterable[str] = (),
    sequence_length: int | None = None,
    batch: int = 8,
    max_tokens: int | None = None,
    sample: int = SAMPLE_TOKENS,
    repetitions: int = REPETITIONS,
    stop: Callable[[], bool] | None = None,
    timing: Callable[[int, int], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Profile:
    """How the neurons of `model` behave on a text. Needs memory for one batch, however long the text is.

    documents:    texts, joined by EOS and cut into sequences; the rest after the last whole one is left out.
    name, text:   what the profile says it is of.
    sequence_length:  None uses the model's positions, at most 1,024.
    batch:        sequences that go through the model at once. Blocks are timed on the first batch.
    max_tokens:   stops after the sequence that reaches it.
    sample:       tokens from the start of the text that are kept one by one; 0: none.
    repetitions:  rounds of each block's timing; 0: blocks are not timed.
    stop:         asked after every batch; True ends it there, with what was counted.
    timing:       called with the number of blocks that have been timed, and of all blocks.
    progress:     called with the number of tokens after every batch.

    A text that cannot be read any further (a damaged line) ends it too: `Profile.stopped` says why. The model
    runs in eval mode, without gradients, and returns to its own mode. Synchronises with the device.
    """
    require_positive_int("batch", batch)
    require_int("sample", sample, 0)
    require_int("repetitions", repetitions, 0)
    if max_tokens is not None:
        require_positive_int("max_tokens", max_tokens)
    require_sparse_blocks(model)
    length = window_length(model, sequence_length)
    sequences = _Sequences(text_windows(model, tokenizer, documents, sequence_length), length, max_tokens)
    batches = sequences.batches(batch)
    stopped: str | None = None
    counting: _Counting | None = None
    while True:
        try:
            ids = next(batches, None)
        except (ValueError, OSError) as error:
            if counting is None:
                raise
            stopped = f"the text could not be read any further: {error}"
            break
        if ids is None:
            break
        check_ids(ids, model)
        if counting is None:
            counting = _Counting(model, ids, sample, repetitions, timing)
        counting.add(ids)
        if progress is not None:
            progress(ids.numel())
        if stop is not None and stop():
            stopped = INTERRUPTED
            break
    if counting is None:
        shorter = "--sequence-length (in Python: sequence_length) sets a shorter one"
        accepted = f"at least one sequence of {length:,} tokens; {shorter}"
        reject("text", f"{sequences.left_over:,} tokens", accepted)
    return counting.profile(tokenizer, name=name, text=list(text), batch=batch, stopped=stopped)


class _Sequences:
    """Windows of `length` tokens, up to the one that reaches `max_tokens`.

    left_over:  tokens of shorter windows.
    """

    def __init__(self, windows: Iterable[list[int]], length: int, max_tokens: int | None) -> None:
        self._windows, self._length, self._most = windows, length, max_tokens
        self.left_over = 0

    def batches(self, size: int) -> Iterator[Tensor]:
        """int64 [up to size, length]."""
        held: list[list[int]] = []
        for window in self._whole():
            held.append(window)
            if len(held) == size:
                yield torch.tensor(held)
                held = []
        if held:
            yield torch.tensor(held)

    def _whole(self) -> Iterator[list[int]]:
        seen = 0
        for window in self._windows:
            if len(window) < self._length:
                self.left_over += len(window)
                continue
            yield window
            seen += len(window)
            if self._most is not None and seen >= self._most:
                return


class _Counting:
    """All blocks of a model, from the first batch on."""

    def __init__(
        self,
        model: nn.Module,
        first: Tensor,
        sample: int,
        repetitions: int,
        timing: Callable[[int, int], None] | None,
    ) -> None:
        self._model = model
        self._length = first.shape[1]
        blocks = named_blocks(model)
        self._timing, self._timed = timing, 0
        self._watched = [
            _Watched(name, block, self._length, min(sample, self._length), repetitions, self._note_timed)
            for name, block in blocks
        ]
        self._sample = first[0, :sample].tolist()
        vocabulary = model.get_input_embeddings().num_embeddings
        self._vocabulary = VocabularyCounts(vocabulary)
        self._tokens = 0
        # Nobody reads the logits, which may take more memory than all else.
        accepts = inspect.signature(model.forward).parameters
        self._options = {"use_cache": False} | ({"logits_to_keep": 1} if "logits_to_keep" in accepts else {})

    def _note_timed(self) -> None:
        self._timed += 1
        if self._timing is not None:
            self._timing(self._timed, len(self._watched))

    def add(self, ids: Tensor) -> None:
        device = next(self._model.parameters()).device
        for watched in self._watched:
            watched.begin(ids)
        looks = [(watched.block, watched.look) for watched in self._watched]
        run_observed(self._model, {"input_ids": ids.to(device), **self._options}, looks)
        seen = [nnz for watched in self._watched if (nnz := watched.finish()) is not None]
        if seen:
            self._vocabulary.add(torch.stack(seen).double().mean(0), ids)
        self._tokens += ids.numel()

    def profile(
        self, tokenizer: Any, *, name: str, text: list[str], batch: int, stopped: str | None
    ) -> Profile:
        starts = position_starts(self._length)
        counted = [watched for watched in self._watched if watched.counts.tokens]
        skipped = {watched.name: watched.why_skipped() for watched in self._watched if watched not in counted}
        if not counted:
            reasons = "; ".join(sorted(set(skipped.values())))
            reject("model", f"one whose blocks did not run on our kernels: {reasons}", "one whose blocks do")
        layers = [watched.layer(starts, tokenizer) for watched in counted]
        most, fewest = self._vocabulary.lists(tokenizer)
        parameter = next(self._model.parameters())
        return Profile(
            model=name,
            text=text,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            tokens=self._tokens,
            sequence_length=self._length,
            batch=batch,
            dtype=str(parameter.dtype).removeprefix("torch."),
            hardware=hardware(parameter.device),
            versions=versions(),
            stopped=stopped,
            position_starts=starts,
            union_sizes=list(UNION_SIZES),
            layers=layers,
            skipped=skipped,
            most=most,
            fewest=fewest,
            correlation=correlation_of(layers),
            sample=make_sample(self._sample, [watched.sampled for watched in counted], tokenizer),
        )


class _Watched:
    """One block. `begin` and `finish` go around a batch, `look` sees the block's calls between them."""

    def __init__(
        self,
        name: str,
        block: SparseMLP,
        length: int,
        sample: int,
        repetitions: int,
        timed: Callable[[], None],
    ) -> None:
        self.name, self.block = name, block
        self._timed = timed
        device = block.down_proj.weight.device
        self.counts = BlockCounts(block.intermediate_size, length, device)
        self.sampled = SampledLayer(sample)
        self._extremes = ExtremeTokens()
        self._repetitions = repetitions
        self._speed: Speed | None = None
        self._ids: Tensor | None = None
        self._nnz: Tensor | None = None

    def begin(self, ids: Tensor) -> None:
        self._ids, self._nnz = ids, None

    def look(self, block: SparseMLP, inputs: tuple[Any, ...]) -> None:
        weights, x = block._plain_weights(), inputs[0].detach()
        if weights is None or not are_plain(weights) or x.numel() == 0:
            return
        x, ordered = self._in_order(x)
        flat = x.flatten(0, 1)
        if self._repetitions and self._speed is None:
            self._speed = measure_speed(block, flat, weights, self._repetitions)
            self._timed()
        if ordered:
            self.sampled.add(block, x[0], weights)
        nnz = self.counts.add(self._active(block, x, weights), ordered)
        if ordered:
            self._nnz = nnz

    def _active(self, block: SparseMLP, x: Tensor, weights: Tensors) -> Tensor:
        return active_neurons(block, x.flatten(0, 1), weights).view(*x.shape[:2], -1)

    def _in_order(self, x: Tensor) -> tuple[Tensor, bool]:
        """x as [B, S, D], and whether these are the batch's tokens; a block may get them flat or turned."""
        sequences, length = self._ids.shape
        if x.dim() == 3 and x.shape[:2] == (length, sequences) and length != sequences:
            return x.transpose(0, 1), True
        if x.numel() == sequences * length * x.shape[-1] and self._nnz is None:
            return x.reshape(sequences, length, -1), True
        return x.reshape(1, -1, x.shape[-1]), False

    def finish(self) -> Tensor | None:
        """int64 [B, S] on the CPU: active neurons per token, None where tokens are not known."""
        if self._nnz is None:
            return None
        nnz = self._nnz.cpu()
        self._extremes.add(nnz, self._ids)
        return nnz

    def why_skipped(self) -> str:
        state = state_of(self.block)
        return "no token reached it" if state is None else state.ran["forward"].reason

    def layer(self, starts: list[int], tokenizer: Any) -> LayerProfile:
        most, fewest = self._extremes.lists(tokenizer)
        counts, block = self.counts, self.block
        return LayerProfile(
            name=self.name,
            hidden=block.hidden_size,
            neurons=block.intermediate_size,
            gated=block.gated,
            activation=block.activation.spec,
            tokens=counts.tokens,
            nnz=counts.nnz(),
            firing=counts.firing(),
            nnz_by_position=counts.by_position(starts),
            union=counts.unions(),
            union_apart=counts.unions_apart(),
            overlap=counts.overlap(),
            overflow=counts.overflow(),
            most=most,
            fewest=fewest,
            speed=self._speed,
        )
