"""A model and its tokenizer for evaluation and generation."""

from __future__ import annotations

from typing import Any

import torch

from .._checks import reject
from .._extras import missing_extra
from ..train.checkpoints import find_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(path: str, *, dtype: str = "auto", device: str | None = None) -> tuple[Any, Any]:
    """(model in evaluation mode, tokenizer) from a folder or the Hub; a run's folder stands for its model.

    dtype:   "auto" takes that of the checkpoint, in float32 on a CPU.
    device:  None: a GPU if there is one.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise missing_extra("loading models needs transformers", "hf") from error
    import twell.hf  # noqa: F401 - registers the sparse models

    transformers_logging.disable_progress_bar()  # one bar per tensor
    source = find_model(path)
    if dtype != "auto" and dtype not in DTYPES:
        reject("dtype", repr(dtype), " | ".join(["auto", *DTYPES]))
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    wanted = DTYPES.get(dtype, torch.float32 if place == "cpu" else "auto")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=wanted).to(place).eval()
    return model, AutoTokenizer.from_pretrained(source)
