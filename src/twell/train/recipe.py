"""The sparsity recipe: the L1 schedule, firing statistics and the revival of dead neurons during training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback

from .._errors import reject
from ..hf import sparse_mlps
from .config import RunConfig
from .distributed import generator_of, is_first, sum_over_all
from .neurons import FiringTracker, revive

STATE_FILE = "sparsity.safetensors"


@dataclass(frozen=True, kw_only=True)
class L1Schedule:
    """The weight of the L1 penalty: 0 until step `start`, a linear ramp, `weight` from step `end` on."""

    weight: float
    start: int = 0
    end: int = 0

    def __call__(self, step: int) -> float:
        if step >= self.end:
            return self.weight
        if step <= self.start:
            return 0.0
        return self.weight * (step - self.start) / (self.end - self.start)


class Recipe(TrainerCallback):
    """Sets the L1 weight before every step, counts firing neurons and revives dead ones after it.

    Stock dense models have no sparse layers: for them it only averages the loss.
    """

    def __init__(self, config: RunConfig, model: nn.Module) -> None:
        self.config = config
        recipe = config.recipe
        self.schedule = L1Schedule(weight=recipe.l1, start=recipe.l1_start, end=recipe.l1_end)
        self.model = model
        self.layers = sparse_mlps(model)
        self.std = getattr(model.config, "initializer_range", 0.02)
        self.tracker: FiringTracker | None = None
        self.revived = 0
        self._l1_weight = 0.0
        # float64: loss and cross-entropy over tokens, tokens, L1 over batches, batches
        self._sums: Tensor | None = None

    def prepare(self, device: torch.device) -> None:
        """Start counting at zero. Call it before every `train()`."""
        self._sums = torch.zeros(5, dtype=torch.float64, device=device)
        if self.layers:
            self.tracker = FiringTracker([mlp.intermediate_size for mlp in self.layers], device)

    def note(self, outputs: Mapping[str, Any], labels: Tensor, num_items: Tensor | int | None) -> None:
        """Count a micro-batch of training on this process."""
        counted = (labels[..., 1:] != -100).sum()
        loss = outputs.get("ce_loss")
        loss = outputs["loss"] if loss is None else loss
        items = counted if num_items is None else num_items
        total = loss.detach().double() * items
        penalised = outputs["loss"].detach().double() * items
        l1 = outputs.get("l1_loss")
        l1 = torch.zeros_like(total) if l1 is None else l1.detach().double()
        self._sums += torch.stack([penalised, total, counted.double(), l1, torch.ones_like(total)])
        if self.tracker is not None:
            self.tracker.add(outputs["firing"], labels.numel())

    def report(self) -> dict[str, float]:
        """Means since the last report, over all processes. Call it on every process."""
        penalised, total, tokens, l1, batches = sum_over_all(self._sums.clone()).tolist()
        self._sums.zero_()
        found = {"loss": penalised / tokens, "ce_loss": total / tokens} if tokens else {}
        if self.tracker is not None:
            found |= {"l1_loss": l1 / batches} if batches else {}
            found |= {"l1_weight": self._l1_weight, "revived": self.revived}
            active = self.tracker.active_per_token()
            if active is not None:
                found |= {"nnz": sum(active) / len(active)}
                found |= {f"nnz_layer_{layer}": value for layer, value in enumerate(active)}
            dead, window = self.tracker.dead_shares(self.config.dead_after)
            found |= {"dead": sum(dead) / len(dead), "dead_window": window}
            found |= {f"dead_layer_{layer}": value for layer, value in enumerate(dead)}
        return found

    def on_train_begin(self, args, state, control, **kwargs):
        # transformers restores the intervals of the checkpoint; the run's settings decide.
        state.compute_steps(args, state.max_steps)

    def on_step_begin(self, args, state, control, **kwargs):
        if self.layers:
            self._l1_weight = self.model.l1_weight = self.schedule(state.global_step)

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        if state.global_step >= state.max_steps:
            control.should_log = True
        if self.tracker is None:
            return
        self.tracker.finish_step()
        every = self.config.recipe.revive_every
        step = state.global_step
        if every and step % every == 0 and step < self.config.revive_until:
            self.revive_dead(step, optimizer)

    def revive_dead(self, step: int, optimizer: torch.optim.Optimizer | None) -> None:
        if type(optimizer).__module__.startswith("deepspeed"):
            reject(
                "recipe.revive_every",
                self.config.recipe.revive_every,
                "0 under DeepSpeed, which hides weights",
            )
        for layer, (mlp, dead) in enumerate(
            zip(self.layers, self.tracker.dead(self.config.dead_after), strict=True)
        ):
            generator = generator_of(self.config.train.seed, step, layer)
            neurons = revive(mlp, dead, std=self.std, generator=generator, optimizer=optimizer)
            self.tracker.revived(layer, neurons)
            self.revived += neurons.numel()

    def save(self, folder: Path, first: bool) -> None:
        """Write the state to `folder` on the first process. Call it on every process."""
        state = {"sums": sum_over_all(self._sums.clone()).cpu(), "revived": torch.tensor(self.revived)}
        if self.tracker is not None:
            state |= self.tracker.state_dict()
        if first:
            save_file(state, folder / STATE_FILE)

    def load(self, folder: Path) -> None:
        state = load_file(folder / STATE_FILE)
        self.revived = int(state.pop("revived"))
        sums = state.pop("sums")
        if is_first():
            self._sums.copy_(sums)  # once: they are the sums over all processes
        if self.tracker is not None:
            self.tracker.load_state_dict(state)
