"""FSDP 2 through the trainer, as `accelerate launch` sets it up; accelerate shards on GPUs only."""

from __future__ import annotations

import shutil

import pytest
import torch

pytest.importorskip("transformers")

from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from twell.train.run import train
from twell.train.settings import to_yaml

from .runs import launch, logged, small_run, write_corpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "CUDA_VISIBLE_DEVICES": "0",
}


@pytest.mark.parametrize(
    ("state", "checkpointing"), [("FULL_STATE_DICT", False), ("SHARDED_STATE_DICT", True)]
)
def test_sharded_run_equals_a_plain_one_and_resumes(tmp_path, state, checkpointing):
    config = small_run(
        write_corpus(tmp_path / "corpus"),
        "train.precision=bfloat16",
        f"train.checkpointing={str(checkpointing).lower()}",
        "recipe.revive_every=4",
        "model.activation=fatrelu(0.3)",
    )
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    train(config, tmp_path / "plain", console=Console(quiet=True))
    environment = FSDP | {"FSDP_STATE_DICT_TYPE": state}
    sharded = tmp_path / "sharded"
    launch(1, "--config", tmp_path / "run.yaml", "--out", sharded, **environment)
    wanted, found = (logged(run, "ce_loss", "nnz") for run in (tmp_path / "plain", sharded))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=0.02, atol=0.02)
    losses = torch.tensor([line[1] for line in found])
    assert (losses != losses.bfloat16()).any(), "losses were rounded to 16 bits"

    weights = load_file(sharded / "model" / "model.safetensors")
    AutoModelForCausalLM.from_pretrained(sharded / "model")
    for path in (sharded / "model", sharded / "checkpoint-12"):
        shutil.rmtree(path)
    launch(1, "--resume", sharded, **environment)
    assert logged(sharded, "ce_loss", "nnz") == found
    again = load_file(sharded / "model" / "model.safetensors")
    assert all(torch.equal(again[name], weight) for name, weight in weights.items())
