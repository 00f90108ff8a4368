"""Models in which some neurons never fire."""

from __future__ import annotations

import torch
from torch import nn

from twell.pruning.projections import roles_of
from twell.sparsify.blocks import named_blocks


@torch.no_grad()
def kill(model: nn.Module, *alive: int) -> dict[str, torch.Tensor]:
    """Let so many neurons of each block live, drawn anew for each; the living ones, ascending, by block."""
    draw, living = torch.Generator().manual_seed(3), {}
    blocks = named_blocks(model)
    for place, (name, block) in enumerate(blocks):
        roles, neurons = roles_of(block), block.intermediate_size
        order = torch.randperm(neurons, generator=draw)
        count = alive[place % len(alive)]
        weight, bias = (roles.gate or roles.up).weight_and_bias()
        weight[order[count:]] = 0
        if bias is not None:
            bias[order[:count]] += 1  # else the few tokens of a test may leave them silent
            bias[order[count:]] = -1
        living[name] = order[:count].sort().values
    return living


def state_of(model: nn.Module) -> list:
    """All that `prune_` may change, as it is now."""
    modules = [(id(m), dict(m.__dict__), list(m._parameters.values())) for m in model.modules()]
    tensors = [(id(p), p.clone(), p.stride()) for p in model.parameters()]
    blocks = [(b.intermediate_size, b._layer, getattr(b, "roles", None)) for _, b in named_blocks(model)]
    return [modules, tensors, blocks]


def assert_same_state(model: nn.Module, before: list) -> None:
    modules, tensors, blocks = state_of(model)
    assert blocks == before[2]
    for (now, clone, stride), (then, old, old_stride) in zip(tensors, before[1], strict=True):
        assert now == then
        assert old.is_meta or torch.equal(clone, old)
        assert stride == old_stride
    for (_, state, parameters), (_, old_state, old_parameters) in zip(modules, before[0], strict=True):
        assert [id(p) for p in parameters] == [id(p) for p in old_parameters]
        simple = (int, str, bool, type(None))
        for name, value in old_state.items():
            if isinstance(value, simple):
                assert state[name] == value, name
