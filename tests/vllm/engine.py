"""Greedy tokens of vLLM's engine; as a command, in a process of its own.

python -m tests.vllm.engine FOLDER RANKS OUT     writes the tokens of 8 prompts to a JSON file
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from ..serving.models import NEW_TOKENS, POSITIONS, prompts


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[LLM]:
    llm = LLM(str(folder), dtype="float32", max_model_len=POSITIONS, max_num_seqs=32, seed=0, **options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def generate(llm: LLM, asked: list[list[int]]) -> list[list[int]]:
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
    done = llm.generate([{"prompt_token_ids": ids} for ids in asked], sampling, use_tqdm=False)
    return [list(request.outputs[0].token_ids) for request in done]


if __name__ == "__main__":
    with engine(Path(sys.argv[1]), tensor_parallel_size=int(sys.argv[2]), enforce_eager=True) as running:
        Path(sys.argv[3]).write_text(json.dumps(generate(running, prompts(8))))
