"""Every kernel compiles to machine code from Ampere on, within their registers; no GPU needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .compile_targets import gpu_of_target

ROOT = Path(__file__).parents[3]
FEW_BYTES = 320  # of stack: Triton 3.6 takes up to 280, later ones 100; tiles that do not fit take far more
KERNELS = {"90": 23, "hopper": 57} | dict.fromkeys(("80", "89", "100", "120"), 53)


@pytest.mark.targets
@pytest.mark.parametrize("target", KERNELS)
def test_compiles(target, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    # A Triton on the path of the tests, like the oldest that is accepted, goes before the installed one.
    path = [*filter(None, [environment.get("PYTHONPATH")]), str(ROOT / "src"), str(ROOT)]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(path)}
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.gpu.compile_targets", target],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    lines = [line.split(" | ") for line in result.stdout.splitlines()]
    assert len(lines) == KERNELS[target]
    assert {name: int(spilled) for name, _, spilled in lines if int(spilled) > FEW_BYTES} == {}
    shared_memory = gpu_of_target(target).shared_memory
    assert {name: int(shared) for name, shared, _ in lines if int(shared) > shared_memory} == {}
