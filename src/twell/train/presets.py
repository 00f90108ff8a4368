"""Named runs for `twell train --preset NAME`: settings that differ from the defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._errors import did_you_mean, reject

Settings = dict[str, Any]
PAPER_CORPUS = "hf:skymizer/fineweb-edu-dedup-45B"


def tiny() -> Settings:
    """A few minutes on two CPU cores, with the source of Python's standard library."""
    return {
        "model": {"hidden_size": 256, "intermediate_size": 1536, "layers": 2, "heads": 4, "positions": 256},
        "data": {
            "source": "python",
            "vocab_size": 2048,
            "sequence_length": 128,
            "held_out": 0.05,
            "held_out_tokens": 40_000,
        },
        "recipe": {"l1": 2e-3, "l1_start": 30, "l1_end": 90},
        "train": {
            "steps": 300,
            "batch": 16,
            "lr": 3e-3,
            "warmup": 30,
            "eval_every": 100,
            "save_every": 100,
            "log_every": 10,
        },
    }


def demo() -> Settings:
    """What `twell demo` trains, twice: wide blocks, so that single tokens gain as well; a minute each."""
    return {
        "model": {"hidden_size": 384, "intermediate_size": 6144, "layers": 2, "heads": 6, "positions": 256},
        "data": {
            "source": "python",
            "vocab_size": 2048,
            "sequence_length": 128,
            "held_out": 0.05,
            "held_out_tokens": 20_000,
        },
        "recipe": {"l1": 2e-3, "l1_start": 0, "l1_end": 24},
        "train": {"steps": 80, "batch": 8, "lr": 2e-3, "warmup": 8, "log_every": 5},
    }


def small() -> Settings:
    """About 100M parameters, one GPU."""
    return {
        "model": {
            "hidden_size": 768,
            "intermediate_size": 2560,
            "layers": 12,
            "heads": 12,
            "positions": 1024,
        },
        "data": {"vocab_size": 16384, "sequence_length": 512},
        "recipe": {"l1": 2e-5, "l1_start": 100, "l1_end": 400},
        "train": {
            "steps": 2000,
            "batch": 64,
            "lr": 1e-3,
            "warmup": 100,
            "precision": "bfloat16",
            "eval_every": 500,
            "save_every": 500,
            "log_every": 20,
            "workers": 4,
        },
    }


def _paper(layers: int, steps: int) -> Settings:
    return {
        "model": {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "layers": layers,
            "heads": 32,
            "positions": 2048,
        },
        "data": {
            # FineWeb-Edu without duplicates, 45 billion tokens: what the paper's code trains on.
            "source": PAPER_CORPUS,
            "tokenizer": "HuggingFaceTB/SmolLM2-135M",
            "sequence_length": 2048,
            "max_tokens": steps * 512 * 2048,
            "held_out": 0.001,
        },
        "recipe": {"l1": 2e-5},
        "train": {
            "steps": steps,
            "batch": 512,  # 1,048,576 tokens
            "micro_batch": 16,
            "lr": 1e-3,
            "warmup": 600,
            "precision": "bfloat16",
            "checkpointing": True,
            "eval_every": 1000,
            "save_every": 500,
            "log_every": 10,
            "keep": 3,
            "workers": 4,
        },
    }


def relufy() -> Settings:
    """Make a dense (SiLU) checkpoint sparse: swap its activation and train on while L1 rises.

    Needs model.init_from, and data.source with the kind of text that the checkpoint was trained on.
    """
    return {
        "data": {"source": "", "sequence_length": 512},
        "recipe": {"l1": 2e-5, "l1_start": 200, "l1_end": 1000},
        "train": {
            "steps": 2000,
            "batch": 64,
            "lr": 1e-4,
            "warmup": 100,
            "precision": "bfloat16",
            "eval_every": 500,
            "save_every": 500,
        },
    }


PRESETS: dict[str, Callable[[], Settings]] = {
    "tiny": tiny,
    "demo": demo,
    "small": small,
    "paper-0.5b": lambda: _paper(8, 10_000),
    "paper-1b": lambda: _paper(18, 20_000),
    "paper-1.5b": lambda: _paper(28, 30_000),
    "paper-2b": lambda: _paper(38, 40_000),
    "relufy": relufy,
}


_TAKES = {
    "tiny": "a few minutes on two CPU cores",
    "demo": "about a minute on two CPU cores, what `twell demo` trains",
    "small": "minutes on one H200",
    # From eager sparse steps with recomputation (docs/benchmarks.md): 107,900 tokens a second with 8 layers,
    # 27,600 with 38, and what lies between.
    "paper-0.5b": "about a day on one H200",
    "paper-1b": "about four days on one H200",
    "paper-1.5b": "about ten days on one H200",
    "paper-2b": "more than two weeks on one H200",
    "relufy": "makes a dense model sparse: needs model.init_from and data.source",
}


def about(name: str) -> str:
    """The sizes of a preset, its tokens, and how long it takes on what: one line."""
    settings = PRESETS[name]()
    model, train = settings.get("model"), settings["train"]
    sizes = "as the checkpoint"
    if model is not None:
        sizes = f"{model['layers']} layers, D {model['hidden_size']:,}, H {model['intermediate_size']:,}"
    tokens = train["steps"] * train["batch"] * settings["data"]["sequence_length"]
    count = f"{tokens / 1e9:.1f} billion" if tokens >= 1e9 else f"{tokens / 1e6:.1f} million"
    return f"{sizes}; {count} tokens; {_TAKES[name]}"


def without_sizes(settings: Settings) -> Settings:
    """A preset for a model from a checkpoint, which has its own sizes."""
    return {key: value for key, value in settings.items() if key != "model"}


def preset(name: str) -> Settings:
    """The settings of a preset, with its name."""
    if name not in PRESETS:
        reject("preset", repr(name), f"one of {', '.join(PRESETS)}{did_you_mean(name, PRESETS)}")
    return {"preset": name, **PRESETS[name]()}
