"""Two runs that differ in lambda, a profile of one of them, and records of a comparison."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from twell.measure.records import Record, source, write_records
from twell.measure.results import Measured, records_of

STRANGE = [
    "</script><script>alert(1)</script>",
    "\"'&<b>",
    "a\nb\n",
    "\u202eabc",
    "\ufffd",
    "|`*_[x](y)",
    "\ud800",
]


@pytest.fixture(scope="package")
def made(tmp_path_factory) -> Path:
    """A folder with the runs `none` and `some`, a `profile` and `bench.jsonl`."""
    pytest.importorskip("transformers")
    pytest.importorskip("datasets")
    from twell.evaluation import load_model
    from twell.profiling import profile_model
    from twell.train.run import train

    from ..train.runs import QUIET, small_run, write_corpus

    root = tmp_path_factory.mktemp("report")
    corpus = write_corpus(root / "corpus")
    for name, l1 in (("none", "0"), ("some", "1e-3")):
        settings = ("train.save_every=0", "train.eval_every=6", f"recipe.l1={l1}")
        train(small_run(corpus, *settings), root / name, console=QUIET)
    model, tokenizer = load_model(str(root / "some"))
    text = "\n".join(path.read_text() for path in sorted(corpus.iterdir())[:4])
    options = {"sequence_length": 32, "batch": 4, "max_tokens": 640, "sample": 32, "repetitions": 2}
    profile = profile_model(model, tokenizer, [text], name=str(root / "some"), text=["corpus"], **options)
    sample = profile.sample
    # The tokenizer of a test has no such tokens; those of large models have.
    sample = dataclasses.replace(sample, text=[*STRANGE, *sample.text[len(STRANGE) :]])
    strange = [dataclasses.replace(profile.most[0], text=text) for text in STRANGE]
    (root / "profile").mkdir()
    dataclasses.replace(profile, sample=sample, most=strange).save(root / "profile" / "profile.json")
    write_records(root / "bench.jsonl", bench_records())
    return root


def bench_records(**seconds: float) -> list[Record]:
    """Of a forward pass, where ours is faster than dense eager, and less so than the best dense."""
    took = {"dense-eager": 2.0, "best-dense": 1.5, "ours-eager": 1.0} | seconds
    shape = {"model": "tiny", "layers": 2, "D": 32, "H": 96, "dtype": "float32", "batch": 4, "sequence": 32}
    measured = [
        Measured(
            workload="forward",
            contender=name,
            meaning=f"{name} in words",
            shape={**shape, "text": "random tokens"},
            tokens=128,
            seconds=tuple(value * (1 + percent / 100) for percent in (-2, -1, 0, 0, 1, 2)),
            joules=(value * 3,),
            sparsity={"nnz": 12.0, "nnz_least": 10.0, "nnz_most": 14.0},
            details={"peak_bytes": int(value * 2**30)},
        )
        for name, value in took.items()
    ]
    return records_of("bench_inference", measured, source=source("cpu", None), seed=0)


@pytest.fixture(scope="package")
def everything(made) -> list[Path]:
    return [made / "none", made / "some", made / "profile", made / "bench.jsonl"]
