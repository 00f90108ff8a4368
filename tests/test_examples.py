"""The examples run as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[1]
EXAMPLES = {
    "sparsify_opt.py": ([], ["2: model.decoder.layers.0-1 ", "the same weights"]),
    "train_prune_generate.py": (["--steps", "8"], ["step    7", "parameters: ", "def main("]),
    "your_own_adapter.py": ([], ["HandMade", "outputs differ by"]),
}


def test_every_example_is_listed():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, tmp_path):
    options, expected = EXAMPLES[name]
    environment = {
        "PATH": "",
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name, *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for text in expected:
        assert text in done.stdout
