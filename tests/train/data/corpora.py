"""Small corpora, and settings to prepare them with."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np

from twell.train.data import DataConfig, Prepared

WORDS = (
    "tensor",
    "sparse",
    "neuron",
    "fires",
    "seldom",
    "while",
    "gradient",
    "flows",
    "back",
    "through",
    "layers",
)


def text(number: int, *, words: int = 60) -> str:
    """A document; no two numbers give the same."""
    return f"document {number}\n" + " ".join(WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(words))


def write_corpus(folder: Path, *, files: int = 4, documents: int = 25) -> list[str]:
    """`files` text files of NUL-separated documents; all documents, in reading order."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = []
    for f in range(files):
        of_file = [text(f * documents + d) for d in range(documents)]
        (folder / f"part-{f}.txt").write_bytes("\0".join(of_file).encode())
        texts += of_file
    return texts


def small(source: str | tuple[str, ...] | Path, cache: Path, **changes) -> DataConfig:
    settings = {"vocab_size": 300, "sequence_length": 32, "held_out": 0.2, "cache": str(cache)}
    source = source if isinstance(source, tuple) else str(source)
    return DataConfig(source=source, **(settings | changes))


def stored(prepared: Prepared, kind: str) -> np.ndarray:
    """All tokens of "train" or "held_out", as stored."""
    parts = [np.fromfile(path, dtype="<u2") for path in sorted(prepared.folder.glob(f"{kind}*.bin"))]
    return np.concatenate(parts) if parts else np.zeros(0, dtype="<u2")


def stored_documents(prepared: Prepared, kind: str) -> list[str]:
    """The documents of "train" or "held_out", decoded."""
    tokens = stored(prepared, kind).astype(int)
    ends = np.flatnonzero(tokens == prepared.tokenizer.eos_token_id)
    return [prepared.tokenizer.decode(part[:-1]) for part in np.split(tokens, ends + 1)[:-1]]


def process_context():
    """Fresh processes that share one slow import, where the system can."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["twell.train.data", "transformers", "tests.train.data.test_prepare"])
    return context
