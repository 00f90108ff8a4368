"""FSDP 2 through the trainer, as `accelerate launch` sets it up: one process on a GPU, two on CPUs."""

from __future__ import annotations

import shutil

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from twell.train.run import train
from twell.train.settings import to_yaml

from .runs import QUIET, launch, logged, small_run, write_corpus

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}
FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"
ON_GPU = {"processes": 1, "CUDA_VISIBLE_DEVICES": "0"}
ON_CPUS = {"processes": 2, "CUDA_VISIBLE_DEVICES": ""}
VALUES = ("ce_loss", "l1_loss", "nnz", "grad_norm")

# For values in float32, where nothing but the order of sums differs. Plain runs in micro-batches of 1, 2 and
# 4 differ by 2e-7 over 12 steps on a CPU; products in TF32 would round to 5e-4. A gradient that is lost,
# doubled or not averaged changes its norm in the first step by far more.
BOUND = {"rtol": 1e-3, "atol": 0.0}


def sharded_train(place, state, folder, *arguments) -> str:
    """`twell train` in processes of its own, with FSDP 2; what it printed."""
    notes = folder.parent / "notes"
    notes.mkdir(exist_ok=True)
    environment = FSDP | place | {"FSDP_STATE_DICT_TYPE": state, "NOTES": str(notes)}
    processes = environment.pop("processes")
    return launch(processes, "train", *arguments, module=("tests.train.sharded_train",), **environment)


def start(place, state, config, folder) -> str:
    settings = folder.parent / "run.yaml"
    settings.write_text(to_yaml(config))
    return sharded_train(place, state, folder, "--config", settings, "--out", folder)


def weights_of(run):
    return load_file(run / "model" / "model.safetensors")


def go_back(run, *steps):
    """As if a run had died before these steps were saved."""
    (run / "summary.json").unlink()
    for path in (run / "model", *(run / f"checkpoint-{step}" for step in steps)):
        shutil.rmtree(path)


def assert_same(some, others):
    assert some.keys() == others.keys()
    assert all(torch.equal(some[name], others[name]) for name in some)


@pytest.mark.parametrize(
    ("place", "state", "checkpointing"),
    [pytest.param(ON_GPU, FULL, "false", marks=GPU), pytest.param(ON_GPU, SHARDED, "true", marks=GPU)],
)
def test_sharded_run_equals_a_plain_one_and_resumes(tmp_path, place, state, checkpointing):
    """In float32, and without revival, which would amplify a neuron that is silent in only one run."""
    corpus = write_corpus(tmp_path / "corpus")
    config = small_run(corpus, "train.micro_batch=2", f"train.checkpointing={checkpointing}")
    train(config, tmp_path / "plain", console=QUIET)
    sharded = tmp_path / "sharded"
    start(place, state, config, sharded)
    wanted, found = (logged(run, *VALUES) for run in (tmp_path / "plain", sharded))
    assert len(found) == 12
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), **BOUND)
    weights = weights_of(sharded)
    AutoModelForCausalLM.from_pretrained(sharded / "model")

    go_back(sharded, 12)
    sharded_train(place, state, sharded, "--resume", sharded)
    assert logged(sharded, *VALUES) == found
    assert_same(weights_of(sharded), weights)


@pytest.mark.parametrize(("place", "state"), [pytest.param(ON_GPU, FULL, marks=GPU)])
def test_sharded_steps_in_16_bits(tmp_path, place, state):
    """The first step, before weights part ways: FSDP rounds all of them to 16 bits, autocast only some.

    Half of the neurons fire, so that the few that a rounding turns on or off do not count.
    """
    config = small_run(
        write_corpus(tmp_path / "corpus"), "train.precision=bfloat16", "train.steps=2", "train.save_every=0"
    )
    train(config, tmp_path / "plain", console=QUIET)
    start(place, state, config, tmp_path / "sharded")
    wanted, found = (logged(tmp_path / run, "ce_loss", "nnz") for run in ("plain", "sharded"))
    rounding = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(wanted[0]), rtol=2 * rounding, atol=0)
    losses = torch.tensor([line[1] for line in found])
    assert (losses != losses.bfloat16()).any(), "losses were rounded to 16 bits"


@pytest.mark.parametrize(
    ("place", "state", "precision"),
    [
        pytest.param(ON_CPUS, SHARDED, "float32", marks=pytest.mark.slow, id="cpu"),
        pytest.param(ON_GPU, SHARDED, "float32", marks=GPU),
        pytest.param(ON_GPU, FULL, "bfloat16", marks=GPU),
    ],
)
def test_revival_of_a_sharded_run(tmp_path, place, state, precision):
    """`sharded_train` checks rows and moments of every revival, and after reloading them.

    Neurons that fire above 0.3 only: many are silent, and are revived after steps 4 and 8. So few are active
    that one more or less counts: runs are compared by loss and gradient, up to the first revival.
    """
    config = small_run(
        write_corpus(tmp_path / "corpus"),
        f"train.precision={precision}",
        "recipe.revive_every=4",
        "recipe.dead_after=128",
        "model.activation=fatrelu(0.3)",
    )
    run, values = tmp_path / "run", (*VALUES, "dead", "revived")
    assert start(place, state, config, run).count(" checked\n") == 4  # twice, two layers
    found, weights = logged(run, *values), weights_of(run)
    if precision == "float32":
        train(config, tmp_path / "plain", console=QUIET)
        one, other = (logged(path, "ce_loss", "grad_norm")[:4] for path in (run, tmp_path / "plain"))
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), **BOUND)
    revived = [line[-1] for line in found]
    assert revived[:3] == [0, 0, 0]
    assert 0 < revived[3] < revived[-1]
    assert all(weight.isfinite().all() for weight in weights.values())

    go_back(run, 8, 12)
    said = sharded_train(place, state, run, "--resume", run)
    assert said.count("reloaded the same") == 1
    assert said.count(" checked\n") == 2
    assert logged(run, *values) == found
    assert_same(weights_of(run), weights)
