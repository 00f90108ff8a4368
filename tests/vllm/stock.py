"""Whether vLLM itself runs on this machine: one of its own models, without twell, in a process of its own.

python -m tests.vllm.stock     exits with 0 if it does
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ..serving.models import build, tokenizer

ROOT = Path(__file__).parents[2]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        build("silu").save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        environment = os.environ | {
            "VLLM_PLUGINS": "",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CACHE_ROOT": f"{folder}/cache",
        }
        command = [sys.executable, "-m", "tests.vllm.engine", folder, "1", f"{folder}/tokens.json"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    if done.returncode:
        print(done.stderr[-1500:], file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
