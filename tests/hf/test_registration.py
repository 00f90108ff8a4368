"""The auto classes know the models in whichever order twell and transformers are imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("transformers")

from .tiny import sparse_model

TWELL = "import twell, twell._transformers_hook as hook; hook.install(); hook.install()"
LOAD = """
from transformers import AutoConfig, AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert type(model).__name__ == "SparseLlamaForCausalLM", type(model)
config = AutoConfig.for_model("qwen2_sparse_relu", sparsity_l1_coeff=0.5)
assert type(config).__name__ == "SparseQwen2Config", type(config)
assert not any(getattr(finder, "name", None) == hook._AUTO_MODULE for finder in sys.meta_path)
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize(
    "order",
    [
        f"{TWELL}\nassert 'transformers' not in sys.modules\n",
        f"from transformers import AutoModelForCausalLM\n{TWELL}\n",
        # Loads the auto module while the module of LlamaConfig is half imported.
        f"{TWELL}\nfrom transformers import LlamaConfig\nassert 'twell.hf' not in sys.modules\n",
    ],
    ids=["twell-first", "transformers-first", "auto-in-between"],
)
def test_import_orders(order, tmp_path):
    sparse_model().save_pretrained(tmp_path)
    result = run(f"import sys\n{order}{LOAD}", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "not registered" not in result.stderr


MISSING = """
import sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "transformers":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Nothing())
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "transformers" else find_spec(name, *rest)
"""


def test_without_transformers():
    result = run(f"{MISSING}\n{TWELL}\ntwell.SparseMLP(4, 8)\nimport twell.hf")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].endswith('pip install -e ".[hf]" in a checkout of twell')


def test_a_failing_registration_does_not_break_transformers():
    code = f"{TWELL}\nhook._CONFIGS = None\nfrom transformers import AutoConfig"
    result = run(code)
    assert result.returncode == 0, result.stderr
    assert "are not registered" in result.stderr


def test_public_names_are_there():
    from twell import hf

    assert all(hasattr(hf, name) for name in hf.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        hf.nonsense  # noqa: B018
