"""How good and how sparse a language model is: cross-entropy on text, accuracy on lm-eval's tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from . import hf as _hf  # noqa: F401 - registers the sparse models; explains itself without transformers
from ._errors import missing_extra, reject, require_positive_int
from .pruning.firing import BlockFiring, eval_mode, recorded_firing
from .sparsify import sparsify_
from .sparsify.blocks import named_blocks
from .sparsify.recognition import find_blocks
from .train.checkpoints import find_model
from .train.data.tokenizer import Encoder
from .train.run_folder import CONFIG
from .train.settings import read_settings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "spiece*", "*.model", "*.tiktoken", "tekken.json")
PAPER_TASKS = ("arc_easy", "arc_challenge", "hellaswag", "openbookqa", "piqa", "winogrande", "commonsense_qa")


def load_model(path: str, *, dtype: str = "auto", device: str | None = None) -> tuple[Any, Any]:
    """(model in evaluation mode, tokenizer) from a model's folder, a run's folder or the Hub.

    The blocks of a stock model with exact zeros are sparsified.

    dtype:   "auto" is float32 on a CPU; on a GPU what a run of `twell train` computed in (`train.precision`),
             and the checkpoint's dtype for all other models.
    device:  None picks a GPU if there is one.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # one bar per tensor
    source = find_model(path)
    if dtype != "auto" and dtype not in DTYPES:
        reject("dtype", repr(dtype), " | ".join(["auto", *DTYPES]))
    _require_causal(path, source)
    tokenizer = load_tokenizer(path)
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    wanted = DTYPES[dtype] if dtype != "auto" else automatic_dtype(source, place)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=wanted).to(place).eval()
    if not named_blocks(model) and find_blocks(model, None).blocks:
        sparsify_(model)
    return model, tokenizer


def automatic_dtype(source: str, device: str) -> torch.dtype | str:
    """What "auto" means for the model in the folder `source`; "auto" leaves it to transformers.

    A run trained under autocast stores float32 weights, but nobody has seen it compute in float32, and on a
    GPU the sparse kernels pay in 16 bits.
    """
    if torch.device(device).type == "cpu":
        return torch.float32
    settings = Path(source).parent / CONFIG
    try:
        precision = read_settings(settings)["train"]["precision"]
    except (ValueError, OSError, KeyError, TypeError):  # no run's folder, or somebody else's file
        return "auto"
    return DTYPES.get(precision, "auto") if isinstance(precision, str) else "auto"


def _require_causal(path: str, source: str) -> None:
    """Refuse other models before their weights are read, in one line."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        config = AutoConfig.from_pretrained(source)
    except OSError as error:
        if Path(source).is_dir():
            raise
        reason = str(error).strip().partition("\n")[0]
        accepted = (
            "a folder, or a name on a Hub that can be reached; elsewhere, get it with "
            "`hf download NAME --local-dir FOLDER`"
        )
        found = f"{path!r}, which is no folder here and could not be loaded from the Hub ({reason})"
        reject("model", found, accepted)
    kind = next(iter(config.architectures or []), f"model of type {config.model_type}")
    found, accepted = f"{path!r}, a {kind}", "a causal language model"
    if config.is_encoder_decoder:
        reject("model", f"{found}: an encoder and a decoder", accepted)
    if kind.endswith("ForMaskedLM"):
        reject("model", f"{found}: it predicts masked tokens", accepted)
    by_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not by_code:
        reject("model", found, accepted)


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a model's folder, a run's folder or a model on the Hub."""
    from transformers import AutoTokenizer

    source = find_model(path)
    accepted = "a model with the files of its tokenizer, which tokenizer.save_pretrained writes"
    folder = Path(source)
    # For some classes transformers makes an empty one of nothing.
    if folder.is_dir() and not any(file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern)):
        reject("model", f"{path!r}, without a tokenizer", accepted)
    try:
        return AutoTokenizer.from_pretrained(source)
    except ImportError:
        raise
    except Exception as error:  # damaged files fail in any way
        reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0].rstrip(" :")
        return reject("model", f"{path!r}, whose tokenizer does not load ({reason})", accepted)


def require_sparse_blocks(model: Any) -> None:
    """Refuse a model that `load_model` could not make sparse, and say why."""
    if named_blocks(model):
        return
    reasons = "; ".join(sorted({str(skipped) for skipped in find_blocks(model, None).skipped}))
    found = f"a {type(model).__name__} without blocks that have exact zeros"
    accepted = "a model with ReLU, squared ReLU, fatrelu, a shifted ReLU or dReLU"
    reject("model", f"{found}: {reasons}" if reasons else found, accepted)


@dataclass(frozen=True, kw_only=True)
class TextResult:
    """What was measured on a text.

    cross_entropy:  nats per token, over `predicted` tokens.
    l0, l1, silent, neurons:  per block that ran on our kernels: active neurons per token, sum of |hidden| per
                    token, the share of neurons that never fired on this text, and H.
    """

    tokens: int
    predicted: int
    cross_entropy: float
    l0: tuple[float, ...] = ()
    l1: tuple[float, ...] = ()
    silent: tuple[float, ...] = ()
    neurons: tuple[int, ...] = ()

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.cross_entropy, 700.0))


@torch.no_grad()
def evaluate_text(
    model: torch.nn.Module,
    tokenizer,
    documents: Iterable[str],
    *,
    sequence_length: int | None = None,
    batch: int = 8,
    max_tokens: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> TextResult:
    """Evaluate a model on documents, joined by EOS and cut into windows of `sequence_length` tokens.

    Every token but the first of a window is predicted from the tokens before it in the window; the last
    window may be shorter. The model runs in eval mode and returns to its own mode.

    sequence_length:  None uses the model's positions, at most 1,024.
    max_tokens:       stops after this many tokens.
    progress:         called with the number of tokens after every batch.
    """
    windows = text_windows(model, tokenizer, documents, sequence_length)
    return evaluate_windows(model, windows, batch=batch, max_tokens=max_tokens, progress=progress)


def text_windows(
    model: torch.nn.Module, tokenizer, documents: Iterable[str], sequence_length: int | None = None
) -> Iterator[list[int]]:
    """The windows of token ids that `evaluate_text` makes of documents."""
    length = window_length(model, sequence_length)
    if isinstance(documents, str):
        reject("documents", "a str", "an iterable of texts")
    return _windows(text_tokens(tokenizer, documents), length)


@torch.no_grad()
def evaluate_windows(
    model: torch.nn.Module,
    windows: Iterable[list[int]],
    *,
    batch: int = 8,
    max_tokens: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> TextResult:
    """As `evaluate_text`, on windows of token ids."""
    require_positive_int("batch", batch)
    if max_tokens is not None:
        require_positive_int("max_tokens", max_tokens)
        windows = _first_tokens(windows, max_tokens)
    sums = _Sums(next(model.parameters()).device)
    with eval_mode(model), recorded_firing(model) as layers:
        for tokens in _batches(windows, batch):
            check_ids(tokens, model)
            _add(model, tokens.to(sums.device), sums)
            if progress is not None:
                progress(tokens.numel())
    if not sums.predicted:
        reject("documents", f"{sums.tokens} tokens", "at least 2 tokens of text")
    return sums.result([layer for layer in layers.values() if layer.tokens])


def check_ids(ids: Tensor, model: torch.nn.Module) -> None:
    """Refuse ids without an embedding: the tokenizer may belong to another model."""
    vocabulary = model.get_input_embeddings().num_embeddings
    if ids.max() >= vocabulary:
        reject("tokenizer", f"token {ids.max()}", f"ids below {vocabulary}, the vocabulary of the model")


def window_length(model: torch.nn.Module, sequence_length: int | None) -> int:
    """Tokens of a window; None uses the model's positions, at most 1,024."""
    positions = getattr(model.config, "max_position_embeddings", 1024)
    length = min(positions, 1024) if sequence_length is None else sequence_length
    if not 2 <= length <= positions:
        reject("sequence_length", sequence_length, f"2 to {positions}, the positions of the model")
    return length


class _Sums:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tokens = self.predicted = 0
        self.loss = torch.zeros((), dtype=torch.float64, device=device)

    def result(self, layers: list[BlockFiring]) -> TextResult:
        return TextResult(
            tokens=self.tokens,
            predicted=self.predicted,
            cross_entropy=self.loss.item() / self.predicted,
            l0=tuple(layer.firing.sum().item() / layer.tokens for layer in layers),
            l1=tuple(layer.l1.item() / layer.tokens for layer in layers),
            silent=tuple((layer.firing == 0).double().mean().item() for layer in layers),
            neurons=tuple(layer.firing.numel() for layer in layers),
        )


def _add(model: torch.nn.Module, windows: Tensor, sums: _Sums) -> None:
    """windows: int64 [B, S]."""
    logits = model(input_ids=windows, use_cache=False).logits[:, :-1].float()
    targets = windows[:, 1:]
    sums.loss += cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").double()
    sums.tokens += windows.numel()
    sums.predicted += targets.numel()


def text_tokens(tokenizer: Any, documents: Iterable[str]) -> Iterator[int]:
    """Ids of the documents' tokens, one document after the other."""
    # As training encodes it: text that spells a special token is text.
    encoder = Encoder(tokenizer) if tokenizer.is_fast and tokenizer.eos_token_id is not None else None
    for text in documents:
        if encoder is not None:
            yield from encoder.encode([text])[0].tolist()
        else:
            yield from tokenizer(text, add_special_tokens=False)["input_ids"]


def _windows(tokens: Iterator[int], length: int) -> Iterator[list[int]]:
    while len(window := list(islice(tokens, length))) > 1:
        yield window


def _first_tokens(windows: Iterable[list[int]], count: int) -> Iterator[list[int]]:
    """`windows` up to `count` tokens. The last one is cut, or left out if one token would remain of it."""
    for window in windows:
        yield window[:count]
        count -= len(window)
        if count < 2:
            return


def _batches(windows: Iterable[list[int]], batch: int) -> Iterator[Tensor]:
    """int64 [B, S]; a window of another length starts a new batch."""
    held: list[list[int]] = []
    for window in windows:
        if held and (len(held) == batch or len(window) != len(held[0])):
            yield torch.tensor(held)
            held = []
        held.append(window)
    if held:
        yield torch.tensor(held)


def evaluate_tasks(
    model: Any,
    tokenizer: Any,
    tasks: list[str],
    *,
    include: Path | None = None,
    batch: int = 8,
    limit: int | None = None,
    missing: dict[str, str] | None = None,
    say: Callable[[list[str]], None] | None = None,
) -> dict[str, float]:
    """task -> accuracy, through lm-eval; "paper" stands for the paper's seven tasks.

    include:  a folder of your own task definitions.
    limit:    examples per task; None runs all.
    missing:  takes the tasks that cannot be run, and why; None raises at the first.
    say:      called with tasks that are about to run.
    Public tasks download their datasets.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise missing_extra("tasks need lm-eval", "eval") from error
    names = [name for task in tasks for name in (PAPER_TASKS if task == "paper" else (task,))]
    manager = _task_manager(names, include)
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown and missing is None:
        reject("tasks", ", ".join(unknown), "names of lm-eval's tasks, or 'paper'")
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch)

    def run(names: list[str]) -> dict[str, float]:
        if say is not None:
            say(names)
        options = {"task_manager": manager, "limit": limit, "bootstrap_iters": 0}
        results = simple_evaluate(model=harness, tasks=names, **options)
        return {name: _accuracy(name, results["results"][name]) for name in names}

    if missing is None:
        return run(names)
    missing |= dict.fromkeys(unknown, "lm-eval has no such task")
    found: dict[str, float] = {}
    for name in names:
        if name not in unknown:
            try:
                found |= run([name])
            except (ImportError, OSError, ValueError) as error:
                missing[name] = str(error).strip().partition("\n")[0] or type(error).__name__
    return found


def _task_manager(names: list[str], include: Path | None) -> Any:
    """lm-eval's tasks and those in `include`; reading lm-eval's takes ten seconds, so only if they are
    needed."""
    from lm_eval.tasks import TaskManager

    folder = None if include is None else str(include)
    if folder is not None:
        own = TaskManager(include_path=folder, include_defaults=False)
        if set(names) <= set(own.all_tasks):
            return own
    return TaskManager(include_path=folder)


def _accuracy(name: str, metrics: dict[str, Any]) -> float:
    for metric in ("acc,none", "acc_norm,none", "exact_match,none"):
        if metric in metrics:
            return float(metrics[metric])
    numbers = {k: v for k, v in metrics.items() if isinstance(v, float)}
    return reject("tasks", f"{name} with {sorted(numbers)}", "tasks that measure accuracy")
