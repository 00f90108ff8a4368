"""How good and how sparse a language model is: on text (`text`), on lm-eval's tasks (`tasks`)."""

from __future__ import annotations

from typing import Any

import torch

from .. import hf as _hf  # noqa: F401 - registers the sparse models; explains itself without transformers
from .._errors import reject
from ..sparsify import sparsify_
from ..sparsify.blocks import named_blocks
from ..sparsify.recognition import find_blocks
from ..train.checkpoints import find_model
from .text import TextResult, evaluate_text, evaluate_windows, text_windows

__all__ = [
    "TextResult",
    "evaluate_text",
    "evaluate_windows",
    "load_model",
    "require_sparse_blocks",
    "text_windows",
]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(path: str, *, dtype: str = "auto", device: str | None = None) -> tuple[Any, Any]:
    """(model in evaluation mode, tokenizer) from a model's folder, a run's folder or the Hub.

    The blocks of a stock model with exact zeros are sparsified.

    dtype:   "auto" is the checkpoint's dtype on a GPU and float32 on a CPU.
    device:  None picks a GPU if there is one.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # one bar per tensor
    source = find_model(path)
    if dtype != "auto" and dtype not in DTYPES:
        reject("dtype", repr(dtype), " | ".join(["auto", *DTYPES]))
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    wanted = DTYPES.get(dtype, torch.float32 if place == "cpu" else "auto")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=wanted).to(place).eval()
    if not named_blocks(model) and find_blocks(model, None).blocks:
        sparsify_(model)
    return model, AutoTokenizer.from_pretrained(source)


def require_sparse_blocks(model: Any) -> None:
    """Refuse a model that `load_model` could not make sparse, and say why."""
    if named_blocks(model):
        return
    reasons = "; ".join(sorted({skipped.reason for skipped in find_blocks(model, None).skipped}))
    found = f"a {type(model).__name__} without blocks that have exact zeros"
    accepted = "a model with ReLU, squared ReLU, fatrelu or a shifted ReLU"
    reject("model", f"{found}: {reasons}" if reasons else found, accepted)
