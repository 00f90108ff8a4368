"""`twell generate`: streams text from a model; `app` declares its options."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from .._errors import asked_too_much, reject
from .progress import Progress
from .status import INTERRUPTED

if TYPE_CHECKING:
    import torch

    from .._log import Ran
    from .streaming import Stream

DEFAULT_TOKENS = 64
_FIRST_TOKENS_CPU = 2  # with the second, layers may measure which path pays
_MOSTLY = 0.5  # where fewer calls ran sparse, the reason is said


def run_generate(
    *,
    model: str,
    prompt: str,
    tokens: int | None,
    temperature: float,
    top_k: int,
    top_p: float,
    repetition_penalty: float,
    batch: int,
    seed: int,
    dtype: str,
) -> None:
    if batch > 1 and temperature == 0:
        reject("batch", batch, "1 with temperature 0, where all texts would be equal")
    if top_k and temperature == 0:
        reject("top-k", top_k, "0 with temperature 0, which always takes the best token")
    sampling: dict[str, Any] = {"do_sample": False, "repetition_penalty": repetition_penalty}
    if temperature > 0:
        sampling |= {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    progress = Progress(console)
    stream: Stream | None = None
    try:
        progress.show(f"loading {model}")
        loaded, tokenizer = _load(model, dtype)
        ids = _encoded(loaded, tokenizer, prompt)
        tokens = _new_tokens(loaded, ids.shape[1], tokens)
        _check_memory(loaded, batch, ids.shape[1] + tokens)
        stream = _stream(loaded, tokenizer, batch, progress)
        said = _generate(loaded, tokenizer, ids, batch, tokens, seed, sampling, stream)
    except KeyboardInterrupt:
        progress.clear()
        made = 0 if stream is None else stream.made
        if made:
            stream.end()
        console.print(f"stopped after {made} tokens" if made else "stopped", style="dim")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        progress.clear()
    console.print(said, style="dim")


def _load(model: str, dtype: str) -> tuple[Any, Any]:
    from ..train.checkpoints import find_model

    find_model(model)  # before the imports that take seconds
    from ..evaluation import load_model
    from ..generation import accelerate_

    with _memory_may_run_out("model", repr(model), "one that fits this machine's memory"):
        loaded, tokenizer = load_model(model, dtype=dtype)
    return accelerate_(loaded), tokenizer


def _encoded(model: Any, tokenizer: Any, prompt: str) -> torch.Tensor:
    """[1, P]"""
    from ..evaluation import check_ids

    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    if not ids.shape[1]:
        reject("prompt", repr(prompt), "text of at least one token")
    check_ids(ids, model)
    return ids.to(model.device)


def _new_tokens(model: Any, length: int, wanted: int | None) -> int:
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is None:
        return DEFAULT_TOKENS if wanted is None else wanted
    if length >= positions:
        reject("prompt", f"{length} tokens", f"fewer than the {positions} positions of the model")
    if wanted is None:
        return min(DEFAULT_TOKENS, positions - length)
    if length + wanted > positions:
        reject("tokens", wanted, f"at most {positions - length}: the model has {positions} positions")
    return wanted


def _stream(model: Any, tokenizer: Any, batch: int, progress: Progress) -> Stream:
    from ..generation.generate import FIRST_TOKENS
    from .streaming import Stream

    progress.show("reading the prompt")
    if model.device.type == "cuda":
        return Stream(tokenizer, batch, FIRST_TOKENS, progress, "compiling kernels and capturing a step")
    return Stream(tokenizer, batch, _FIRST_TOKENS_CPU, progress, "finding out what this CPU does fastest")


def _generate(
    model: Any,
    tokenizer: Any,
    ids: torch.Tensor,
    batch: int,
    tokens: int,
    seed: int,
    sampling: dict[str, Any],
    stream: Stream,
) -> str:
    """ids [1, P]. Returns what to say of it."""
    import torch

    from .. import recorded_paths

    length = ids.shape[1]
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    torch.manual_seed(seed)
    free, asked = _free(model.device), f"{batch} of {length + tokens} tokens"
    start = perf_counter()
    with (
        torch.inference_mode(),
        recorded_paths() as ran,
        _memory_may_run_out("batch", asked, f"fewer or shorter texts: {free} were free, which did not do"),
    ):
        ids = ids.repeat(batch, 1)
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            eos_token_id=ends,
            pad_token_id=tokenizer.eos_token_id,
            streamer=stream,
            **sampling,
        )
    seconds = perf_counter() - start
    made = [_until_the_end(row, ends) for row in output[:, length:].tolist()]
    if batch > 1:
        stream.show(tokenizer.decode(row, skip_special_tokens=True) for row in output)
    return f"{_pace(made, seconds, start, stream)}{_sparse_share(model, stream.made, ran)}"


def _until_the_end(tokens: list[int], ends: int | Sequence[int] | None) -> int:
    """How many tokens there are, with the one that ends the text."""
    stops = {ends} if ends is None or isinstance(ends, int) else set(ends)
    return next((place for place, token in enumerate(tokens, 1) if token in stops), len(tokens))


def _pace(made: Sequence[int], seconds: float, start: float, stream: Stream) -> str:
    """made: tokens of every text. The pace is without the first ones, for which kernels are compiled."""
    first, times = stream.first, stream.times
    texts = "" if len(made) == 1 else f" of {len(made)} texts"
    said = f"{sum(made)} tokens{texts} in {seconds:.2f} s"
    if stream.made <= first:
        return f"{said}, the first after {times[1] - start:.2f} s"
    steady = sum(max(length - first, 0) for length in made) / (times[-1] - times[first])
    return f"{said}: the first {first} after {times[first] - start:.2f} s, then {steady:.1f} tokens/s"


def _sparse_share(model: Any, steps: int, ran: Sequence[Ran]) -> str:
    """How many feed-forward calls ran sparse. Captured steps are recorded once; repeats ran like the last."""
    from ..block_table import state_of
    from ..sparsify.blocks import named_blocks

    blocks = [block for _, block in named_blocks(model)]
    if not blocks or not ran:
        return ""
    sparse = sum(piece.path != "dense" for piece in ran)
    replayed = max(len(blocks) * steps - len(ran), 0)
    last = [state.ran["forward"] for state in map(state_of, blocks) if state is not None]
    share = (sparse + replayed * sum(one.path != "dense" for one in last) / max(len(last), 1)) / (
        len(ran) + replayed
    )
    said = f"; {share:.0%} of the feed-forward calls ran sparse"
    reasons = Counter(one.reason for one in (*last, *ran) if one.path == "dense" and one.reason)
    return f"{said} (dense: {reasons.most_common(1)[0][0]})" if share < _MOSTLY and reasons else said


def _check_memory(model: Any, batch: int, length: int) -> None:
    """Refuse what certainly does not fit, before anything is computed; length: tokens of a text."""
    config, free = model.config.get_text_config(), _free_bytes(model.device)
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if free is None or heads is None or getattr(config, "sliding_window", None) is not None:
        return
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    of_one = 2 * config.num_hidden_layers * heads * size * model.dtype.itemsize * length
    if batch * of_one > free:
        fits = f"at most {free // of_one}: keys and values of {length} tokens take {of_one / 2**20:.1f} MiB"
        reject("batch", batch, f"{fits}, and {_free(model.device)} are free")


def _free(device: torch.device) -> str:
    free = _free_bytes(device)
    return "too little memory" if free is None else f"{free / 2**30:.1f} GiB"


def _free_bytes(device: torch.device) -> int | None:
    """None if that is not known."""
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    try:
        import psutil  # which accelerate needs, too
    except ImportError:
        return None
    return psutil.virtual_memory().available


@contextmanager
def _memory_may_run_out(argument: str, received: str, accepted: str) -> Iterator[None]:
    """Say so in one line."""
    try:
        yield
    except RuntimeError as error:
        if asked_too_much(error) is None:
            raise
        reject(argument, received, accepted)
