"""Whole training runs on a GPU; writes benchmarks/results/training_runs.jsonl, one line per run.

    small   about 100M parameters on the same tokens: SiLU, ReLU without a penalty, several penalties, revival
    wide    the paper's width (D 2048, H 5632, 8 layers): automatic plans against dense, eager and compiled,
            from one seed

Each run is `twell train` with settings over a preset. Runs of `wide` follow each other in one process; runs
of `small` may share the GPU, each in its own process, so their tokens per second mean nothing. Text comes
from a prepared folder:

    python benchmarks/training_runs.py small --data FOLDER [--together N] [--commit HASH] [--out FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from rich.console import Console

import twell
from twell.measure import RunRecord, write_records
from twell.measure.records import source
from twell.train.metrics import read_metrics

RESULTS = Path(__file__).parent / "results" / "training_runs.jsonl"
POINTS = 150  # of a stored curve, at most
CURVE = ("tokens", "ce_loss", "nnz", "dead", "tokens_per_second", "peak_memory_bytes")
console = Console(width=150)

SMALL = (
    "data.sequence_length=512",
    "train.batch=32",
    "train.steps=600",
    "train.warmup=60",
    "recipe.l1_start=60",
    "recipe.l1_end=180",
    "train.eval_every=0",
    "train.save_every=0",
    "train.log_every=10",
    "train.workers=1",
)
WIDE = (
    "data.sequence_length=1024",
    "train.batch=32",
    "train.micro_batch=32",
    "train.checkpointing=false",
    "train.steps=350",
    "train.warmup=35",
    "train.lr=6e-4",
    "recipe.l1=6e-4",
    "recipe.l1_start=0",
    "recipe.l1_end=60",
    "train.eval_every=0",
    "train.save_every=0",
    "train.log_every=5",
    "train.workers=2",
)
SUITES: dict[str, tuple[str, tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "small": (
        "small",
        SMALL,
        {
            "silu": ("model.activation=silu",),
            "relu": ("recipe.l1=0",),
            "l1-3e-5": ("recipe.l1=3e-5",),
            "l1-1e-4": ("recipe.l1=1e-4",),
            "l1-3e-4": ("recipe.l1=3e-4",),
            "l1-1e-3": ("recipe.l1=1e-3",),
            "l1-3e-4-revival": ("recipe.l1=3e-4", "recipe.revive_every=50"),
        },
    ),
    "wide": (
        "paper-0.5b",
        WIDE,
        {
            "dense": ("model.plan=dense",),
            "auto": (),
            "dense-compiled": ("model.plan=dense", "train.compile=true"),
            "auto-compiled": ("train.compile=true",),
        },
    ),
}


def run_one(suite: str, name: str, data: Path, folder: Path, commit: str | None) -> RunRecord | None:
    """Train one run; its record, or None if it failed."""
    preset, shared, runs = SUITES[suite]
    settings = (*shared, *runs[name])
    command = [sys.executable, "-m", "twell.cli", "train", "--preset", preset, "--out", str(folder)]
    overrides = [f"data.source=prepared:{data}", *settings]
    known = len(twell.training_states())
    start = time.perf_counter()
    if suite == "wide":
        from twell.cli.train import run_train

        run_train(overrides=overrides, preset=preset, config=None, out=folder, resume=None)
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    else:
        log = folder.with_suffix(".log")
        with log.open("w") as out:
            code = subprocess.run(
                [*command, *overrides], stdout=out, stderr=subprocess.STDOUT, env=os.environ
            ).returncode
        if code:
            console.print(f"{suite}/{name} failed:\n{log.read_text()[-1500:]}", markup=False)
            return None
    seconds = time.perf_counter() - start
    summary = json.loads((folder / "summary.json").read_text())
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if "ce_loss" in line]
    step = max(1, -(-len(lines) // POINTS))
    curve = {key: [_finite(line.get(key)) for line in lines[step - 1 :: step]] for key in CURVE}
    layers = [(s.sparse, s.share, s.switches) for s in twell.training_states()[known:]]
    shown = {key: round(value, 4) for key, value in summary.items() if isinstance(value, float)}
    console.print(f"{suite}/{name} {seconds:.0f} s, sparse layers {sum(s for s, *_ in layers)}", shown)
    origin = source("cuda" if torch.cuda.is_available() else "cpu", __file__)
    return RunRecord(
        what=f"training_runs/{suite}/{name}",
        preset=preset,
        settings=list(settings),
        seconds=seconds,
        summary=summary,
        last={key: value for key, value in lines[-1].items() if _finite(value) is not None},
        curve=curve,
        layers=layers,
        **origin | {"commit": commit or origin["commit"]},
    )


def _finite(value: object) -> float | None:
    """A number that a record takes; None for others, such as the loss of a run that diverged."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if number else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--data", type=Path, required=True, help="a prepared folder")
    parser.add_argument("--only", nargs="*", help="runs of the suite")
    parser.add_argument("--together", type=int, default=1, help="runs at a time")
    parser.add_argument("--commit", help="commit to write where git is not available")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    names = options.only or list(SUITES[options.suite][2])
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.together) as pool:
        jobs = [
            pool.submit(run_one, options.suite, name, options.data, Path(folder) / name, options.commit)
            for name in names
        ]
        for job in jobs:
            record = job.result()
            if record is not None:
                write_records(options.out, [record], append=True)


if __name__ == "__main__":
    main()
