"""How the trainer changes accelerate's FSDP settings; whole runs are in test_fsdp.py."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
from accelerate import FullyShardedDataParallelPlugin

from twell.train.trainer import adapt_fsdp


def test_losses_are_not_rounded():
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.output_dtype == torch.bfloat16
    adapt_fsdp(plugin, revive_every=10)
    assert plugin.mixed_precision_policy.output_dtype is None
    assert plugin.mixed_precision_policy.param_dtype == torch.bfloat16


def test_revival_under_the_first_version_is_refused():
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
    adapt_fsdp(plugin, revive_every=0)
    with pytest.raises(ValueError, match=r"recipe\.revive_every: got 10; accepted: 0 under FSDP 1"):
        adapt_fsdp(plugin, revive_every=10)
