"""`model.generate` with captured steps: our models have it, `accelerate_` gives it to others.

transformers prepares a request (settings, prompt, cache, processors, criteria) and hands it to `_sample`,
which is ours. What a captured step cannot do goes on to transformers' own, with one log line.
"""

from __future__ import annotations

import copy
import threading
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation import stopping_criteria as criteria

from .._errors import ran_out_of_memory, reject
from .._log import log_once
from .cache import is_plain
from .decoder import is_understood
from .prompt import MOST_TOKENS, Prompt, fits_prompt, padded
from .sampling import Sampling, sampling_of
from .snapshot import snapshot_of
from .step import Step

DEVICES = ("cuda",)  # where steps are captured
_FIRST_STEPS = 3  # run before a step is captured: kernels are compiled and loaded, layers are read
FIRST_TOKENS = _FIRST_STEPS + 2  # the prompt's, those of the first steps, the one after the capture
_WORTH_CAPTURING = 8  # further tokens
_LOOK_FOR_THE_END = 16  # steps between looks at what has ended, one of which may be waited for
_LOOK_AGAIN = 512  # replayed steps after which layers are read again
_LONGEST = 16_384  # tokens of a sequence: a step attends to all of its columns
_COLUMNS = 256  # sequences have room in steps of so many tokens, later in powers of two
_MOST_STEPS = 4  # that a model keeps, with their caches
_MOST_PROMPTS = 4
# Of the norm of a model's logits: how far a step's may be off. Other kernels round otherwise.
_AGREEING = {torch.bfloat16: 0.03, torch.float16: 0.005}
_AGREEING_WIDE = 1e-3
_KNOWN = {
    "attention_mask",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "position_ids",
    "cache_position",
}


class Request(NamedTuple):
    """tokens, attended:  [B, P]; 0 in `attended` where the prompt is padded.
    positions:  [B], of the token after the prompt.
    placed:     whether transformers hands positions to the model.
    stops:      tokens that end a sequence; pad: what follows them.
    longest:    tokens of prompt and answer.
    uncounted:  [B], first tokens that a repetition penalty leaves out; None: all count.
    fingerprint:  of the model, see `Snapshot`.
    """

    tokens: Tensor
    attended: Tensor
    positions: Tensor
    placed: bool
    sampling: Sampling
    stops: list[int]
    pad: int
    longest: int
    uncounted: Tensor | None
    fingerprint: int


class CapturedGeneration:
    """Mixin for causal language models of transformers."""

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        given = input_ids, logits_processor, stopping_criteria, generation_config
        request = None if input_ids.device.type not in DEVICES else _request(self, *given, model_kwargs)
        if synced_gpus:
            request = "ranks that wait for each other"
        if not isinstance(request, Request):
            if request is not None:
                log_once(f"generate runs without captured steps: {request}")
            return super()._sample(*given, synced_gpus=synced_gpus, streamer=streamer, **model_kwargs)
        lock = _kept(self).lock
        if not lock.acquire(blocking=False):
            log_once("generate runs without captured steps while another thread has them")
            return super()._sample(*given, streamer=streamer, **model_kwargs)
        try:
            # Steps outlive the call, and inference tensors cannot be used again outside of that mode.
            with torch.inference_mode(False), torch.no_grad(), _current(input_ids.device):
                generated = _generate(self, request, generation_config, model_kwargs, streamer)
        finally:
            lock.release()
        if generated is not None:
            return generated
        model_kwargs["past_key_values"] = type(model_kwargs["past_key_values"])(config=self.config)
        return super()._sample(*given, streamer=streamer, **model_kwargs)


def _current(device: torch.device) -> AbstractContextManager:
    """Captures and events belong to the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _request(
    model: Any,
    tokens: Tensor,
    processors: Any,
    stopping: Any,
    config: Any,
    named: dict[str, Any],
) -> Request | str:
    """What to generate, or why not here."""
    sampling = sampling_of(processors, bool(config.do_sample))
    if isinstance(sampling, str):
        return sampling
    unknown = [
        n for n, value in named.items() if n not in _KNOWN and value is not None and value is not False
    ]
    unsupported = (
        (_kept(model).refused is not None, _kept(model).refused),
        (model.training, "a module in training mode"),
        (torch.is_autocast_enabled(tokens.device.type), "autocast"),
        ("prepare_inputs_for_generation" in vars(model), "inputs that are prepared otherwise"),
        (model.config.is_encoder_decoder, "an encoder-decoder"),
        (bool(unknown), f"{', '.join(unknown)} among the inputs"),
        (not named.get("use_cache", False), "use_cache=False"),
        (not is_plain(named.get("past_key_values")), "another cache than the default one"),
        (config.return_dict_in_generate, "return_dict_in_generate"),
        (getattr(named.get("past_key_values"), "_is_user_defined", False), "a cache of one's own"),
        (getattr(config, "is_assistant", False), "an assistant"),
        (getattr(config, "prefill_chunk_size", None), "a prompt in chunks"),
    )
    for wrong, reason in unsupported:
        if wrong:
            return reason
    snapshot = snapshot_of(model)
    reason = snapshot.why_not()
    if reason is not None:
        return reason
    if named["past_key_values"].get_seq_length():
        return "a cache that is filled already"
    stops, longest = [], None
    for one in stopping:
        if type(one) is criteria.EosTokenCriteria:
            stops += one.eos_token_id.flatten().tolist()
        elif type(one) is criteria.MaxLengthCriteria:
            longest = min(longest or one.max_length, one.max_length)
        else:
            return f"the stopping criterion {type(one).__name__}"
    if longest is None or longest > _LONGEST:
        return f"sequences of up to {longest or 'any number of'} tokens; there is room for {_LONGEST:,}"
    longest = max(longest, tokens.shape[1] + 1)
    pad = config._pad_token_tensor
    attended = named.get("attention_mask")
    attended = torch.ones_like(tokens) if attended is None else attended
    if attended.dim() != 2 or attended.shape != tokens.shape:
        return "an attention mask of another shape than the prompt"
    if not bool((attended != 0).any(1).all()):
        return "a prompt of padding alone"
    uncounted = sampling.uncounted
    if uncounted is not None:
        if uncounted.shape != tokens.shape[:1] or bool((uncounted > tokens.shape[1]).any()):
            return "a repetition penalty that ignores more than the prompt"
        uncounted = uncounted.to(tokens.device)
    positions = named.get("position_ids")
    if positions is not None and (positions.dim() != 2 or positions.shape[1] != tokens.shape[1]):
        return "positions of another shape than the prompt"
    placed = positions is not None
    positions = positions[:, -1] + 1 if placed else attended.sum(1)
    pad = 0 if pad is None else int(pad.flatten()[0])
    configured = model.config._attn_implementation, getattr(model.config, "num_hidden_layers", None)
    fingerprint = snapshot.fingerprint(*configured)
    positions = positions.expand(len(tokens))
    return Request(tokens, attended, positions, placed, sampling, stops, pad, longest, uncounted, fingerprint)


def _generate(model: Any, request: Request, config: Any, named: dict[str, Any], streamer: Any) -> Any:
    """The generated sequences; None where the model turns out not to compute as a step has it."""
    request, logits, cache, extra = _prefilled(model, request, config, named)
    length = request.tokens.shape[1]
    if not _holds_prompt(cache, length) or (request.sampling.sampled and bool(logits.isnan().any())):
        return None  # tokens that somebody puts before the prompt; numbers that transformers refuses
    step = _step_for(model, request, cache)
    if step is None:
        return None
    prompt = request.tokens, request.attended, request.positions
    step.begin(*prompt, cache, request.stops, request.pad, request.uncounted)
    step.choose(logits)
    del logits
    made = _tokens(step, request.longest - length, bool(request.stops), streamer)
    ended = length + made
    if request.stops:
        ended = min(ended, int(step.ended.max()) + 1)
    sequences = step.sequence[:, extra:ended].clone()
    if streamer is not None:
        streamer.end()
    return sequences


def _prefilled(
    model: Any, request: Request, config: Any, named: dict[str, Any]
) -> tuple[Request, Tensor, Any, int]:
    """The request, padded where a graph runs its prompt; logits [B, V] after the prompt; its keys and
    values; by how many tokens it is padded."""
    batch, length = request.tokens.shape
    room = request.longest + MOST_TOKENS <= _LONGEST
    if not (room and request.placed and is_understood(model) and fits_prompt(model, batch, length)):
        outputs = model._prefill(request.tokens, config, named, is_first_iteration=True)
        return request, outputs.logits[:, -1], named["past_key_values"], 0
    given = padded(request.tokens, request.attended, named["position_ids"].expand(batch, length))
    kept, key = _kept(model).prompts, (*given.tokens.shape, request.fingerprint)
    prompt = kept.pop(key, None)
    if prompt is None:
        while len(kept) >= _MOST_PROMPTS or any(old[-1] != key[-1] for old in kept):
            kept.pop(next(iter(kept)))
        prompt = Prompt(model, *given.tokens.shape)
    kept[key] = prompt
    logits, cache = prompt.run(model, given)
    longest = request.longest + given.extra
    padding = {"tokens": given.tokens, "attended": given.attended, "longest": longest}
    if request.uncounted is not None:
        padding["uncounted"] = request.uncounted + given.extra
    return request._replace(**padding), logits, cache, given.extra


def _holds_prompt(cache: Any, length: int) -> bool:
    keys = [layer.keys for layer in cache.layers]
    return bool(keys) and all(isinstance(k, Tensor) and k.dim() == 4 and k.shape[2] == length for k in keys)


def _tokens(step: Step, most: int, may_end: bool, streamer: Any) -> int:
    """Make up to `most` tokens, of which the first is there; how many there are when all sequences have
    ended, or a few more."""
    ends = _Ends(step) if may_end else None
    for made in range(1, most + 1):
        if streamer is not None:
            streamer.put(step.token.cpu())
        if made == most or (ends is not None and ends.reached(made, streamer is not None)):
            return made
        _advance(step, made, most - made)
    return most


def _advance(step: Step, made: int, left: int) -> None:
    if step.token.device.type != "cuda":
        step.run()
    elif step.is_captured:
        step.replays += 1
        if step.replays % _LOOK_AGAIN >= _LOOK_AGAIN - 2:  # what the first look reads, the second goes by
            step.look_again()
        else:
            step.replay()
    elif made <= _FIRST_STEPS or left < _WORTH_CAPTURING:
        step.run()
        torch.cuda.synchronize(step.token.device)  # what was read of the layers has arrived
    else:
        step.replay()


class _Ends:
    """Looks now and then whether all sequences have ended, without stalling the device: at what a look some
    steps ago has copied to the host."""

    def __init__(self, step: Step) -> None:
        self._step = step
        cuda = step.ended.is_cuda
        self._host = torch.zeros(1, dtype=torch.bool, pin_memory=cuda)
        self._copied = torch.cuda.Event() if cuda else None
        self._pending = False

    def reached(self, made: int, at_once: bool) -> bool:
        """at_once: whether to wait for an answer, as somebody who reads along does anyway."""
        if at_once or self._copied is None:
            return bool((self._step.ended < self._step.columns).all())
        if self._pending and self._copied.query():
            self._pending = False
            if bool(self._host[0]):
                return True
        if not self._pending and made % _LOOK_FOR_THE_END == 0:
            self._host.copy_((self._step.ended < self._step.columns).all()[None], non_blocking=True)
            self._copied.record()
            self._pending = True
        return False


class _Kept(dict[tuple, Step]):
    """The steps of a model, the youngest last. A copy of the model begins without any.

    refused: why it has none, once that is known; lock: of whoever generates; prompts: the same for them.
    """

    refused: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.prompts: dict[tuple, Prompt] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return _Kept()

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


def _kept(model: nn.Module) -> _Kept:
    return model.__dict__.setdefault("_twell_steps", _Kept())


def _step_for(model: Any, request: Request, cache: Any) -> Step | None:
    """The step that an earlier request of this kind has captured, or a new one; None where a step gives other
    logits than the model."""
    kept, columns = _kept(model), _room(request.longest)
    batch = request.tokens.shape[0]
    understood = is_understood(model)
    # A model of which nothing is known is tried with padding before a padded prompt is believed to it.
    padded = not understood and bool((request.attended == 0).any())
    key = batch, columns, padded, len(request.stops), request.sampling.key, request.fingerprint
    step = kept.pop(key, None)
    if step is None:
        while len(kept) >= _MOST_STEPS or any(old[-1] != key[-1] for old in kept):
            kept.pop(next(iter(kept)))
        step = _new_step(model, request, cache, columns, kept)
        if step is None:
            return None
        if not understood and not _agrees(model, step, request, cache):
            kept.refused = f"a step of {type(model).__name__} does not compute what the model does"
            log_once(f"generate runs without captured steps: {kept.refused}")
            return None
    kept[key] = step
    return step


def _new_step(model: Any, request: Request, cache: Any, columns: int, kept: _Kept) -> Step | None:
    """None where its memory cannot be had."""
    batch, stops = request.tokens.shape[0], len(request.stops)
    for _ in range(2):
        try:
            return Step(model, request.sampling, cache, batch, columns, stops)
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
        # Not before: the error holds what its frames held.
        kept.clear()  # steps for other batches hold caches as well, and graphs of prompts
        kept.prompts.clear()
        torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(request.tokens.device)
    of_one = sum(t[0, :, 0].nbytes for layer in cache.layers for t in (layer.keys, layer.values)) * columns
    log_once(
        f"generate runs without captured steps: keys and values of {batch} sequences with room for "
        f"{columns:,} tokens each do not fit the {free / 2**30:.1f} GiB that are free; those of "
        f"{free // of_one} do"
    )
    return None


def _agrees(model: Any, step: Step, request: Request, cache: Any) -> bool:
    """Whether a step gives the logits that the model gives for a token after the prompt."""
    token, attended = request.tokens[:, -1:], request.attended
    step.begin(request.tokens, attended, request.positions, cache, request.stops, request.pad)
    step.token.copy_(token[:, 0])
    try:
        ours = step.logits().float()
    except Exception as error:
        if ran_out_of_memory(error):
            raise
        return False
    longer = torch.cat((attended, attended.new_ones(attended.shape[0], 1)), 1)
    inputs = model.prepare_inputs_for_generation(
        torch.cat((request.tokens, token), 1),
        next_sequence_length=1,
        past_key_values=copy.deepcopy(cache),
        attention_mask=longer,
        use_cache=True,
        **({"position_ids": request.positions[:, None]} if request.placed else {}),
    )
    theirs = model(**inputs, return_dict=True).logits[:, -1].float()
    allowed = _AGREEING.get(model.dtype, _AGREEING_WIDE)
    return bool((ours - theirs).norm() <= allowed * theirs.norm())


def _room(tokens: int) -> int:
    columns = -(-tokens // _COLUMNS) * _COLUMNS
    return columns if columns <= 4 * _COLUMNS else 1 << (columns - 1).bit_length()


def accelerate_(model: PreTrainedModel) -> PreTrainedModel:
    """Have `model.generate` run captured steps on a GPU, with the arguments and the results it has now.

    model: a causal language model of transformers, sparse, sparsified or dense. Returned for convenience.
    """
    if not isinstance(model, PreTrainedModel) or not hasattr(model, "_sample"):
        reject("model", type(model).__name__, "a model of transformers that generates")
    if not isinstance(model, CapturedGeneration):
        model.__class__ = _accelerated(type(model))
    return model


@lru_cache(maxsize=256)
def _accelerated(stock: type[PreTrainedModel]) -> type[PreTrainedModel]:
    names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}

    def reduce(self: Any, _protocol: int) -> tuple:
        return _rebuild, (stock,), self.__getstate__()

    return type(stock.__name__, (CapturedGeneration, stock), {**names, "__reduce_ex__": reduce})


def _rebuild(stock: type[PreTrainedModel]) -> PreTrainedModel:
    kind = _accelerated(stock)
    return kind.__new__(kind)
