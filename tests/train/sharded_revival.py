"""Run by test_distributed.py in two processes: revive a sharded block like a whole one."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from twell import SparseMLP
from twell.train.distributed import generator_of
from twell.train.neurons import FiringTracker, revive

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
blocks, optimizers = [], []
for sharded in (False, True):
    torch.manual_seed(0)
    mlp = SparseMLP(16, 40, neuron_major=False)
    if sharded:
        fully_shard(mlp, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(mlp.parameters())
    mlp(torch.randn(8, 16)).square().sum().backward()
    optimizer.step()
    dead = torch.zeros(40, dtype=torch.bool)
    dead[[1, 19, 20, 39]] = True
    revive(mlp, dead, std=0.1, generator=generator_of(0, 1, 2), optimizer=optimizer)
    blocks.append(mlp)
    optimizers.append(optimizer)
whole, parts = blocks
assert torch.equal(parts.gate_proj.weight.full_tensor(), whole.gate_proj.weight)
for name in ("exp_avg", "exp_avg_sq"):
    wanted = optimizers[0].state[whole.gate_proj.weight][name]
    assert torch.equal(optimizers[1].state[parts.gate_proj.weight][name].full_tensor(), wanted)
    assert not wanted[[1, 19, 20, 39]].any()

tracker = FiringTracker([2])
tracker.add([torch.tensor([rank, 0])], tokens=5)
tracker.finish_step()
assert tracker.silent.tolist() == [0, 10]
print("revived the same", flush=True)
dist.barrier()
dist.destroy_process_group()
# Not through the interpreter's end: gloo's threads may outlive the group, and then abort the process.
os._exit(0)
