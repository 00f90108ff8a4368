"""`import twell.hf` registers the models with the Auto classes; `import twell` installs and loads nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("transformers")

from .tiny import sparse_model

LOAD = """
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert type(model).__name__ == "SparseLlamaForCausalLM", type(model)
config = AutoConfig.for_model("qwen2_sparse_relu", sparsity_l1_coeff=0.5, num_hidden_layers=1)
assert type(config).__name__ == "SparseQwen2Config", type(config)
import torch
with torch.device("meta"):
    assert type(AutoModel.from_config(config)).__name__ == "SparseQwen2Model"
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize(
    "order",
    ["import twell.hf", "import transformers, twell.hf", "from twell.hf.config import SparseLlamaConfig"],
)
def test_import_orders(order, tmp_path):
    sparse_model().save_pretrained(tmp_path)
    result = run(f"import sys\n{order}\n{LOAD}", str(tmp_path))
    assert result.returncode == 0, result.stderr


def test_import_twell_installs_no_hook_and_imports_nothing_heavy():
    code = """
import sys, torch
finders = list(sys.meta_path)
import twell
assert sys.meta_path == finders
heavy = {"transformers", "torch._dynamo", "torch.utils.flop_counter", "triton", "matplotlib", "rich"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
"""
    result = run(code)
    assert result.returncode == 0, result.stderr


def test_without_transformers():
    code = """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "transformers" else find_spec(name, *rest)
import twell
twell.SparseMLP(4, 8)
import twell.hf
"""
    result = run(code)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].endswith('pip install -e ".[hf]" in a checkout of twell')


def test_public_names_are_there():
    from twell import hf

    assert all(hasattr(hf, name) for name in hf.__all__)
