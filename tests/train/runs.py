"""Small runs for tests: a corpus of made-up text, a model that trains in seconds, processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

from rich.console import Console

from twell.train.settings import run_config, with_overrides

QUIET = Console(quiet=True)
ROOT = Path(__file__).parents[2]
SETTINGS = {
    "model": {"hidden_size": 32, "intermediate_size": 96, "layers": 2, "heads": 2, "positions": 64},
    "data": {"vocab_size": 384, "sequence_length": 32, "held_out": 0.1, "held_out_tokens": 2000},
    "recipe": {"l1": 1e-3, "l1_start": 2, "l1_end": 4},
    "train": {
        "steps": 12,
        "batch": 4,
        "lr": 3e-3,
        "warmup": 2,
        "save_every": 4,
        "log_every": 1,
        "keep": 4,
    },
}


def write_corpus(folder: Path) -> Path:
    """A folder of text files, the same ones always: what a run does depends on them."""
    folder.mkdir(parents=True)
    draw = Random(0)
    words = ["".join(draw.choices("etaoinshrdlucmf", k=draw.randint(2, 8))) for _ in range(1000)]
    weights = [place**-0.5 for place in range(1, len(words) + 1)]  # few are common
    for number in range(16):
        lines = (" ".join(draw.choices(words, weights, k=draw.randint(2, 9))) for _ in range(200))
        (folder / f"{number:02}.txt").write_text(".\n".join(lines) + "\n")
    return folder


def small_run(corpus: Path, *overrides: str):
    settings = {
        **SETTINGS,
        "data": {**SETTINGS["data"], "source": str(corpus), "cache": str(corpus.parent / "cache")},
    }
    return run_config(with_overrides(settings, overrides))


def logged(folder: Path, *names: str) -> list[tuple]:
    """(step, values) of every training log."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], *(line[name] for name in names)) for line in lines if "ce_loss" in line]


def launch(processes: int, *arguments, module=("twell.cli", "train"), **environment: str) -> str:
    """`twell train` in processes of its own, without a GPU unless `environment` says otherwise."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    result = subprocess.run(
        [*command, "-m", *module, *map(str, arguments)],
        env=os.environ | fixed | {"CUDA_VISIBLE_DEVICES": ""} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout
