"""`twell train` under FSDP 2, with a check of every revival and of what a resumed run has loaded.

Run by test_fsdp.py, in torchrun. What a revival leaves goes to the folder $NOTES, from the first process.
accelerate shards on GPUs only: without one, that choice is overruled, and the rest of its code and torch's
`fully_shard` run over gloo.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from twell.cli import main
from twell.train import recipe
from twell.train.distributed import generator_of

NOTES = Path(os.environ["NOTES"])
MOMENTS = ("exp_avg", "exp_avg_sq")
revive, load, begin = recipe.revive, recipe.Recipe.load, recipe.Recipe.on_step_begin


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor on the CPU; call it on every process."""
    assert isinstance(tensor, DTensor), "not sharded"
    return tensor.full_tensor().detach().cpu()


def seen(mlp, optimizer) -> dict[str, torch.Tensor]:
    """The gate and its moments."""
    weight = mlp.gate_proj.weight
    state = optimizer.optimizer.state[weight]
    return {"weight": whole(weight), **{name: whole(state[name]) for name in MOMENTS}}


def checked_revival(mlp, dead, *, std, generator, optimizer):
    before = seen(mlp, optimizer)
    draws = torch.Generator().set_state(generator.get_state())
    neurons = revive(mlp, dead, std=std, generator=generator, optimizer=optimizer)
    after, dead = seen(mlp, optimizer), dead.cpu()
    assert torch.equal(neurons.cpu(), dead.nonzero().flatten())
    rows = torch.randn(int(dead.sum()), before["weight"].shape[1], generator=draws) * std
    assert torch.equal(after["weight"][dead], rows)
    for name in before:
        assert after[name].isfinite().all()
        assert torch.equal(after[name][~dead], before[name][~dead])
    assert not any(after[name][dead].any() for name in MOMENTS)
    noted = NOTES / f"{generator.initial_seed()}.safetensors"
    if noted.exists():  # a resumed run revives the same neurons
        assert all(torch.equal(after[name], value) for name, value in load_file(noted).items())
    dist.barrier()
    if dist.get_rank() == 0:
        save_file(after, noted)
        print(f"revived {neurons.numel()} checked", flush=True)
    dist.barrier()
    return neurons


def resuming(self, folder):
    load(self, folder)
    self.look_at_loaded = True


def check_loaded(self, args, state, control, optimizer=None, **options):
    """Before the first step of a resumed run: rows and moments are as the revival left them."""
    if getattr(self, "look_at_loaded", False):
        self.look_at_loaded = False
        for layer, mlp in enumerate(self.layers if self.config.recipe.revive_every else ()):
            seed = generator_of(self.config.train.seed, state.global_step, layer).initial_seed()
            found, noted = seen(mlp, optimizer), load_file(NOTES / f"{seed}.safetensors")
            assert all(torch.equal(found[name], value) for name, value in noted.items())
        if dist.get_rank() == 0:
            print("reloaded the same", flush=True)
    return begin(self, args, state, control, optimizer=optimizer, **options)


def shard_on_cpus() -> None:
    original = AcceleratorState.__init__

    def sharding(self, *arguments, fsdp_plugin=None, **options):
        original(self, *arguments, fsdp_plugin=fsdp_plugin, **options)
        if "fsdp_plugin" not in self._shared_state:
            self.fsdp_plugin = fsdp_plugin or FullyShardedDataParallelPlugin()
            if self._mixed_precision != "no":
                self.fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = sharding


if __name__ == "__main__":
    if not torch.cuda.is_available():
        shard_on_cpus()
    recipe.revive = checked_revival
    recipe.Recipe.load, recipe.Recipe.on_step_begin = resuming, check_loaded
    main()
