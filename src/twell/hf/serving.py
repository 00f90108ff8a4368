"""What `python -m twell.hf serve` changes in transformers' server, for its own process only.

The server, its API and its scheduling stay transformers' own. It takes some classes from its package when it
starts, and finds ours in their place. They load models as `twell generate` does, and mend what the server
leaves open: a bad request is refused before it reaches the model, where it would end the batch of everybody;
so is one that asks for what the server would ignore; /v1/models lists what is served; a temperature samples;
the process ends when it is told to.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any, NoReturn

import torch
import transformers
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from huggingface_hub.errors import CacheNotFound
from starlette.exceptions import HTTPException
from transformers import GenerationConfig, PreTrainedModel
from transformers.cli.serving import model_manager, server, utils

from .._errors import reject
from .._log import log_once
from ..generation import accelerate_
from ..plan import ENVIRONMENT_VARIABLE
from ..sparsify import sparsify_
from ..sparsify.blocks import named_blocks
from ..sparsify.recognition import find_blocks
from .families import FAMILIES

_STARTED = int(time.time())
_stock_build_server = server.build_server
_stock_validate = utils.BaseHandler._validate_request
_states: list[Generation] = []


def prepare() -> None:
    """Before the server starts."""
    for family in FAMILIES.values():  # it takes a model's class from its own package, by name
        setattr(transformers, family.sparse_class.__name__, family.sparse_class)
    model_manager.ModelManager = Models
    server.build_server = build_server
    utils.GenerateManager, utils.CBGenerateManager = OneByOne, Batched
    utils.GenerationState = Generation
    utils.BaseHandler._validate_request = _validate
    signal.signal(signal.SIGINT, _leave)  # uvicorn passes Ctrl-C on when it is done


def _leave(_signal: int, _frame: Any) -> NoReturn:
    sys.exit(0 if _states else 130)  # after serving; while the model was loaded


def stop() -> None:
    """After the server: the thread of continuous batching would go on for ever."""
    for state in _states:
        state.shutdown()


class Models(model_manager.ModelManager):
    """Loads models whose blocks run sparse, and lists the one that is served."""

    @staticmethod
    def _resolve_dtype(dtype: str | None) -> Any:
        """CPUs compute in float32 unless told otherwise: many have no 16-bit units."""
        if dtype in ("auto", None) and not torch.accelerator.is_available():
            return torch.float32
        return super(Models, Models)._resolve_dtype(dtype)

    def _load_model(self, *given: Any, **named: Any) -> PreTrainedModel:
        model = super()._load_model(*given, **named)
        if not named_blocks(model) and find_blocks(model, None).blocks:
            sparsify_(model)
        blocks, plan = len(named_blocks(model)), os.environ.get(ENVIRONMENT_VARIABLE) or "auto"
        log_once(f"{blocks} sparse blocks, plan {plan}" if blocks else "no sparse blocks: it runs dense")
        return accelerate_(model) if hasattr(model, "_sample") else model

    def get_gen_models(self) -> list[dict[str, Any]]:
        """The only one that requests may name; without one, those that are on this machine."""
        if self.force_model is None:
            try:
                return super().get_gen_models()
            except CacheNotFound:  # nothing was downloaded yet
                return []
        return [{"id": self.force_model, "object": "model", "owned_by": "", "created": _STARTED}]


def build_server(*given: Any, **named: Any) -> FastAPI:
    app = _stock_build_server(*given, **named)
    app.add_exception_handler(ValueError, _refuse)
    app.add_exception_handler(HTTPException, _refuse)
    return app


async def _refuse(_request: Request, error: Exception) -> JSONResponse:
    """In the form that OpenAI's client shows."""
    status, said = 400, str(error)
    if isinstance(error, HTTPException):  # the server's own refusals, which the client would not show
        status, said = error.status_code, str(error.detail)
    body = {"message": said, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": body}, status_code=status)


# Fields of a request that change its answer and that the server ignores: the values that ask for nothing, and
# what to ask for. Other ignored fields (user, metadata, ...) leave the answer as it is.
_IGNORED: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "1: there is one answer to a request"),
    "best_of": ((1,), "1: there is one answer to a request"),
    "echo": ((False,), "false: answers do not repeat the prompt"),
    "logprobs": ((False,), "null or false: answers have no probabilities"),
    "top_logprobs": ((0,), "0: answers have no probabilities"),
    "presence_penalty": ((0,), "0"),
    "response_format": (({"type": "text"},), "text"),
    "previous_response_id": ((), "the whole conversation as input"),
}


def _validate(self: utils.BaseHandler, body: dict[str, Any]) -> None:
    """In place of the server's: refuse what it would ignore."""
    # Two names of one thing, of which chats know the older only.
    if "max_completion_tokens" in self._unused_fields:
        most = body.pop("max_completion_tokens", None)
        body |= {} if most is None else {"max_tokens": most}
    _stock_validate(self, body)
    for name in sorted(body.keys() & self._unused_fields & _IGNORED.keys()):
        harmless, accepted = _IGNORED[name]
        value = body[name]
        if value is not None and not any(_equal(value, one) for one in harmless):
            reject(name, repr(value), accepted)


def _equal(value: Any, other: Any) -> bool:
    """As in JSON, where 0 is not false: as logprobs it asks for the probability of every token."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


class _Checked:
    """Mixin for both ways to generate: looks at requests before the model does."""

    def _check(self, model: PreTrainedModel, inputs: Any, config: GenerationConfig) -> None:
        """Refuse what cannot be done; end the answer where the model ends.

        inputs:  with "input_ids", a list or a tensor [1, P].
        config:  of this request; changed in place.
        """
        ids = inputs["input_ids"]
        length = len(ids) if isinstance(ids, list) else ids.shape[-1]
        if not length:
            reject("prompt", "no tokens", "text of at least one token")
        if config.max_new_tokens is not None and config.max_new_tokens < 1:
            reject("max_tokens", config.max_new_tokens, "1 or more")
        if config.temperature is not None and not config.temperature >= 0:
            reject("temperature", config.temperature, "0 (greedy) or more")
        if config.top_p is not None and not 0 < config.top_p <= 1:
            reject("top_p", config.top_p, "more than 0, at most 1")
        _sample_at_temperature(config)
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._limit(length, config, positions, "positions of the model")

    def _limit(self, length: int, config: GenerationConfig, most: int | None, what: str) -> None:
        """most: tokens of prompt and answer; what: these are."""
        if most is None:
            return
        if length >= most:
            reject("prompt", f"{length} tokens", f"fewer than the {most} {what}")
        config.max_new_tokens = min(config.max_new_tokens or most, most - length)

    def generate_streaming(
        self, model: PreTrainedModel, processor: Any, inputs: Any, gen_config: GenerationConfig, **named: Any
    ) -> Any:
        self._check(model, inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, **named)

    async def generate_non_streaming(
        self, model: PreTrainedModel, processor: Any, inputs: Any, gen_config: GenerationConfig, **named: Any
    ) -> Any:
        self._check(model, inputs, gen_config)
        return await super().generate_non_streaming(model, processor, inputs, gen_config, **named)


def _sample_at_temperature(config: GenerationConfig) -> None:
    """The server reads a temperature, and stays greedy unless the model's own config samples."""
    if config.temperature:
        config.do_sample = True


class OneByOne(_Checked, utils.GenerateManager):
    """`model.generate`, one request after the other."""


class Batched(_Checked, utils.CBGenerateManager):
    """Continuous batching, which samples all requests as the first one asked."""

    _sampling: str | None = None

    def init_cb(self, model: PreTrainedModel, gen_config: GenerationConfig) -> None:
        _sample_at_temperature(gen_config)
        super().init_cb(model, gen_config)
        if self._sampling is None:
            self._sampling = _sampling_of(gen_config)

    def _check(self, model: PreTrainedModel, inputs: Any, config: GenerationConfig) -> None:
        super()._check(model, inputs, config)
        if config.stop_strings:
            reject("stop", repr(config.stop_strings), "no stop strings with --continuous-batching")
        asked, rest = _sampling_of(config), "for the server's lifetime with --continuous-batching"
        if asked != self._sampling:
            reject("sampling", asked, f"{self._sampling}, as the first request asked, {rest}")
        cache = self._cb.continuous_batching_config
        if cache.num_blocks is not None:  # a longer request would end the thread that serves all
            room = cache.num_blocks * (getattr(cache, "page_size", None) or cache.block_size)
            self._limit(len(inputs["input_ids"]), config, room, "tokens that the cache has room for")

    def stop(self) -> None:
        if self._cb is not None:
            self._cb.stop(block=True, timeout=10, hard_stop=True)


def _sampling_of(config: GenerationConfig) -> str:
    settings = {"repetition penalty": config.repetition_penalty or 1.0, "bias": config.sequence_bias}
    if config.do_sample:
        chosen = {"temperature": config.temperature, "top_p": config.top_p}
        settings = {name: value or 1.0 for name, value in chosen.items()} | settings
    said = [f"{name} {value}" for name, value in settings.items() if value not in (1.0, None)]
    return ", ".join(said) or ("temperature 1.0" if config.do_sample else "greedy")


class Generation(utils.GenerationState):
    """Known to `stop`."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        _states.append(self)
