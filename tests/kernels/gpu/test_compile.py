"""Every kernel compiles to machine code from Ampere on, within their registers; no GPU needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FEW_BYTES = 128  # of stack: compilers differ by a few registers; a tile that does not fit takes far more
SHARED_BYTES = {"80": 166_912, "90": 232_448, "100": 232_448, "hopper": 232_448}
KERNELS = {"80": 50, "90": 20, "100": 50, "hopper": 57}


# The kernels of 100 are those of 80, for another machine: half a minute that `TWELL_ALL_TARGETS=1` takes.
TARGETS = [target for target in KERNELS if target != "100" or os.environ.get("TWELL_ALL_TARGETS")]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_compiles(target, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
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
    assert {name: int(shared) for name, shared, _ in lines if int(shared) > SHARED_BYTES[target]} == {}
