"""transformers' `Trainer` with sparsity: what the recipe has to see, whole checkpoints, one order."""

from __future__ import annotations

import errno
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import Trainer

from .checkpoints import checkpoints, newest_whole, step_of, write_manifest
from .config import RunConfig
from .firing import FiringTracker
from .interrupt import outlive_signals
from .order import RunOrder
from .recipe import Recipe


class SparseTrainer(Trainer):
    """`Trainer` for causal language models with or without sparse layers.

    Logs gain `ce_loss`, and for sparse models `l1_loss`, `nnz` and `dead` (means over layers, and by layer);
    the loss of an evaluation is the cross-entropy alone. Checkpoints hold the recipe's state and a manifest.
    """

    def __init__(self, *arguments: Any, run: RunConfig, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.run_config = run
        self.recipe = Recipe(run, self.model)
        self.add_callback(self.recipe)
        self._evaluated: FiringTracker | None = None

    def train(self, resume_from_checkpoint: str | None = None, **options: Any):
        self.recipe.prepare(self.args.device)
        if resume_from_checkpoint is not None:
            self.recipe.load(Path(resume_from_checkpoint))
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **options)

    def _get_train_sampler(self, *_arguments: Any) -> RunOrder:
        return RunOrder(
            len(self.train_dataset), self.args.max_steps * self.run_config.train.batch, self.args.seed
        )

    def get_train_dataloader(self):
        loader = super().get_train_dataloader()
        if self.args.dataloader_num_workers:
            loader.worker_init_fn = partial(outlive_signals, loader.worker_init_fn)
        return loader

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if model.training:
            items = num_items_in_batch if self.model_accepts_loss_kwargs else None
            self.recipe.note(outputs, inputs["labels"], items)
        elif self._evaluated is not None:
            self._evaluated.add(outputs["firing"], inputs["labels"].numel())
        return (loss, outputs) if return_outputs else loss

    def evaluation_loop(self, *arguments: Any, metric_key_prefix: str = "eval", **options: Any):
        layers = self.recipe.layers
        weight = getattr(self.model, "l1_weight", None)
        if layers:
            self._evaluated = FiringTracker([mlp.intermediate_size for mlp in layers], self.args.device)
            self.model.l1_weight = 0.0  # what is evaluated is the cross-entropy
        try:
            output = super().evaluation_loop(*arguments, metric_key_prefix=metric_key_prefix, **options)
            loss = output.metrics.get(f"{metric_key_prefix}_loss")
            if loss is not None:
                output.metrics[f"{metric_key_prefix}_perplexity"] = math.exp(min(loss, 700.0))
            if self._evaluated is not None:
                self._evaluated.finish_step()
                active = self._evaluated.active_per_token() or []
                output.metrics.update({f"{metric_key_prefix}_nnz_layer_{i}": v for i, v in enumerate(active)})
                if active:
                    output.metrics[f"{metric_key_prefix}_nnz"] = sum(active) / len(active)
            return output
        finally:
            self._evaluated = None
            if weight is not None:
                self.model.l1_weight = weight

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        if "loss" in logs:
            logs |= self.recipe.report()
        super().log(logs, *arguments, **options)
        if not math.isfinite(logs.get("loss", 0.0)):
            last = newest_whole(Path(self.args.output_dir))
            kept = "no checkpoint was saved before" if last is None else f"the last checkpoint is {last}"
            raise FloatingPointError(f"the loss is {logs['loss']} at step {self.state.global_step}; {kept}")

    def _save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        try:
            super()._save_checkpoint(*arguments, **options)
            if self.args.should_save:
                self.recipe.save(folder)
            if dist.is_available() and dist.is_initialized():
                dist.barrier()  # files of every process are there before the manifest says so
            if self.args.should_save:
                write_manifest(folder)
                self._drop_old_checkpoints()
        except Exception as error:
            if not _is_disk_full(error):
                raise
            shutil.rmtree(folder, ignore_errors=True)
            last = newest_whole(Path(self.args.output_dir))
            kept = "no checkpoint was saved before" if last is None else f"the last checkpoint is {last}"
            raise OSError(
                errno.ENOSPC, f"no space left to save step {self.state.global_step}; {kept}"
            ) from error

    def _drop_old_checkpoints(self) -> None:
        """Only now that a newer one is whole."""
        found = sorted(checkpoints(Path(self.args.output_dir)), key=step_of)
        for folder in found[: -self.run_config.train.keep]:
            shutil.rmtree(folder)


def _is_disk_full(error: BaseException | None) -> bool:
    """Writers in C++ and Rust raise errors of their own."""
    while error is not None:
        if getattr(error, "errno", None) == errno.ENOSPC or "no space left" in str(error).lower():
            return True
        if "inline_container" in str(error) and "unexpected pos" in str(error):  # torch.save
            return True
        error = error.__cause__ or error.__context__
    return False
