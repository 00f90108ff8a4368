"""vLLM's engine with our blocks gives transformers' greedy tokens, and our kernels compute them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm installs it")

from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaMLP

from twell import recorded_paths
from twell.layer_state import known_layer
from twell.vllm import block as block_module
from twell.vllm.block import BlockConfig, SparseBlock
from twell.vllm.models import _distinguish_compiled_code

from ..hf.test_spellings import release
from ..serving.models import build, greedy, prompts
from .engine import engine, generate

ASKED = prompts(8)
ROOT = Path(__file__).parents[2]


def model_of(llm):
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def blocks_of(llm):
    return [layer.mlp for layer in model_of(llm).model.layers]


@pytest.fixture
def row_plan(monkeypatch):
    """Automatic plans find too little work in models this small."""
    monkeypatch.setenv("TWELL_PLAN", "row")


@pytest.mark.parametrize(
    ("name", "eager"),
    [("llama", True), ("llama", False), ("qwen2", False), ("plain", True), ("relu", True)],
    ids=lambda value: value if isinstance(value, str) else "eager" if value else "compiled",
)
def test_greedy_tokens_are_those_of_transformers(saved, row_plan, name, eager):
    wanted = greedy(saved / name, ASKED)
    with engine(saved / name, enforce_eager=eager) as llm:
        with recorded_paths() as ran:
            assert generate(llm, ASKED) == wanted
        blocks = blocks_of(llm)
        assert all(type(block) is SparseBlock for block in blocks)
        assert all(block.down_proj.weight.mT.is_contiguous() for block in blocks)
        assert {piece.path for piece in ran} == {"row"}
        assert {piece.neurons for piece in ran} == {block.neurons for block in blocks}
        assert len(ran) >= 12 * len(blocks)
        check_expected_shares(name, blocks)


def check_expected_shares(name, blocks):
    """Layers go by the checkpoint's shares; without any, nothing that vLLM makes up is read."""
    for block in blocks:
        up, _, gate, _ = block._input_weights()
        layer = known_layer(up if gate is None else gate)
        assert layer.ran["forward"].path == "row"  # the state that calls find
        reading = layer.reading(up, 1, training=False)
        assert reading.share == (0.5 if name == "llama" else None)
        assert not reading.is_due()


def test_a_silu_model_stays_vllms_own(saved):
    with engine(saved / "silu", enforce_eager=True) as llm:
        with recorded_paths() as ran:
            assert generate(llm, ASKED) == greedy(saved / "silu", ASKED)
        assert all(type(block) is LlamaMLP for block in blocks_of(llm))
        assert not ran


def test_a_released_spelling_with_an_automatic_plan(saved, tmp_path):
    model = build("qwen2")
    release(model, tmp_path, "lower")
    with engine(tmp_path, enforce_eager=True, skip_tokenizer_init=True) as llm, recorded_paths() as ran:
        assert generate(llm, ASKED) == greedy(saved / "qwen2", ASKED)
    assert {piece.path for piece in ran} == {"dense"}
    assert "too little work" in ran[0].reason


def test_compiled_code_of_another_plan_is_not_used(monkeypatch):
    """vLLM keeps compiled code by a hash of its config."""
    hashes = set()
    for plan in ("row", "block", ""):
        monkeypatch.setenv("TWELL_PLAN", plan)
        config = VllmConfig()
        _distinguish_compiled_code(config)
        hashes.add(config.compute_hash())
    assert len(hashes) == 3


def test_two_ranks(saved, tmp_path):
    environment = {**os.environ, "TWELL_PLAN": "row", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    out = tmp_path / "tokens.json"
    command = [sys.executable, "-m", "tests.vllm.engine", str(saved / "llama"), "2", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-4000:]
    assert json.loads(out.read_text()) == greedy(saved / "llama", ASKED)
    said = done.stdout + done.stderr
    assert said.count("twell: 2 sparse blocks, plan row, shares of active neurons known") == 2


@pytest.mark.parametrize(("ranks", "neurons"), [(2, 72), (3, 96 + 8), (1, 36)])
def test_neurons_that_do_not_divide_are_refused(monkeypatch, ranks, neurons):
    monkeypatch.setattr(block_module, "get_tensor_model_parallel_world_size", lambda: ranks)
    blocks = BlockConfig.of(build("relu").config)
    with pytest.raises(ValueError, match=rf"tensor_parallel_size: got {ranks} for the {neurons} neurons"):
        SparseBlock(64, neurons, blocks, None, "model.layers.0.mlp")
