"""transformers' `Trainer` with the sparsity recipe, checked checkpoints and a fixed order of the data.

Ctrl-C and SIGTERM end a run after the current step, with a checkpoint.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainerCallback, default_data_collator
from transformers.trainer_utils import EvalLoopOutput

from .._errors import reject
from .._files import needs_space
from ..shares import keep_shares, measure_shares
from .checkpoints import drop_old, newest_whole, write_manifest
from .config import RunConfig
from .data import RunOrder
from .distributed import any_of_all, are_several, sum_over_all, wait_for_all
from .metrics import Pace
from .neurons import FiringTracker
from .recipe import Recipe

_SHARES_TOKENS = 8192
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class SparseTrainer(Trainer):
    """`Trainer` for causal language models with or without sparse layers.

    Logs gain `ce_loss`, tokens per second and peak memory, and for sparse models `l1_loss`, `nnz` and `dead`
    (means over layers, and by layer). A neuron is dead if it was silent in the last `dead_window` tokens, in
    an evaluation in all of its tokens. The loss of an evaluation is the cross-entropy alone. Checkpoints hold
    the recipe's state and a manifest.
    """

    def __init__(self, model: PreTrainedModel, *arguments: Any, run: RunConfig, **options: Any) -> None:
        self._stored_use_cache = model.config.use_cache
        super().__init__(model, *arguments, **options)
        self.run_config = run
        self.recipe = Recipe(run, self.model)
        self.pace = Pace(run.tokens_per_step)
        self.add_callback(self.recipe)
        self.add_callback(self.pace)
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None:
            adapt_fsdp(plugin, run.recipe.revive_every)

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
        # transformers would multiply by the number of processes in place, and so change the outputs we read.
        average, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, False
        try:
            loss, outputs = super().compute_loss(
                model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
            )
        finally:
            self.args.average_tokens_across_devices = average
        if average and self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            # Gradients are averaged over processes; `num_items_in_batch` counts the items of all.
            loss = loss * self.accelerator.num_processes
        items = num_items_in_batch if self.model_accepts_loss_kwargs else None
        self.recipe.note(outputs, inputs["labels"], items)
        return (loss, outputs) if return_outputs else loss

    def evaluation_loop(self, dataloader, *_arguments: Any, metric_key_prefix: str = "eval", **_options: Any):
        """Count every sequence once, with any number of processes: transformers' loop pads."""
        tracker = None
        if self.recipe.layers:
            tracker = FiringTracker([mlp.intermediate_size for mlp in self.recipe.layers], self.args.device)
        metrics = self._evaluate_all(dataloader.dataset, metric_key_prefix, tracker)
        return EvalLoopOutput(
            predictions=None, label_ids=None, metrics=metrics, num_samples=len(dataloader.dataset)
        )

    @torch.no_grad()
    def _evaluate_all(self, dataset: Dataset, prefix: str, tracker: FiringTracker | None) -> dict[str, float]:
        world, batch = self.args.world_size, self.args.per_device_eval_batch_size
        mine = range(self.args.process_index, len(dataset), world)
        sums = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        self.model.eval()
        # Every process makes the same number of calls, since each call gathers sharded weights.
        for start in range(0, -(-len(dataset) // world), batch):
            places = mine[start : start + batch]
            items = [dataset[place] for place in places or [0]]
            inputs = self._prepare_inputs(default_data_collator(items))
            with self.compute_loss_context_manager():
                output = self.model(**inputs)
            if places:
                counted = (inputs["labels"][..., 1:] != -100).sum()
                sums += torch.stack([output.loss.double() * counted, counted.double()])
                if tracker is not None:
                    tracker.add(output.firing, inputs["labels"].numel())
        total, tokens = sum_over_all(sums).tolist()
        loss = total / tokens
        metrics = {f"{prefix}_loss": loss, f"{prefix}_perplexity": math.exp(min(loss, 700.0))}
        if tracker is not None:
            tracker.finish_step()
            dead, window = tracker.dead_shares()
            metrics |= {f"{prefix}_dead": sum(dead) / len(dead), f"{prefix}_dead_window": window}
            active = tracker.active_per_token()
            metrics[f"{prefix}_nnz"] = sum(active) / len(active)
            metrics |= {f"{prefix}_nnz_layer_{layer}": value for layer, value in enumerate(active)}
        return metrics

    def note_shares(self) -> None:
        """Note in the model's config how active its layers are, on a few thousand tokens (`twell.shares`)."""
        if not self.recipe.layers:
            return
        dataset = self.eval_dataset if self.eval_dataset is not None else self.train_dataset
        batch = self.args.per_device_eval_batch_size
        length = len(dataset[0]["input_ids"])
        sequences = min(len(dataset), max(_SHARES_TOKENS // length, 1))

        def batches() -> Iterator[dict[str, Any]]:
            for start in range(0, sequences, batch):
                items = [dataset[place] for place in range(start, min(start + batch, sequences))]
                yield self._prepare_inputs(default_data_collator(items))

        with self.compute_loss_context_manager():
            shares = measure_shares(self.model, batches())
        keep_shares(self.recipe.model.config, shares)

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        if "loss" in logs:
            logs |= self.recipe.report() | self.pace.report(self.state.global_step)
        super().log(logs, *arguments, **options)
        if not math.isfinite(logs.get("loss", 0.0)):
            self.say_diverged(f"the loss is {logs['loss']}")

    def say_diverged(self, what: str) -> NoReturn:
        raise FloatingPointError(f"{what} at step {self.state.global_step}; {self._what_is_saved()}")

    def _what_is_saved(self) -> str:
        last = newest_whole(Path(self.args.output_dir))
        return "no checkpoint was saved before" if last is None else f"the last checkpoint is {last}"

    @torch.no_grad()
    def check_weights(self) -> None:
        """Raise if any weight is not finite: they must not replace good ones. Call it on every process."""
        finite = [_local(parameter).isfinite().all() for parameter in self.model.parameters()]
        if any_of_all(~torch.stack(finite).all()):
            self.say_diverged("weights are not finite")

    def _save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        self.check_weights()
        what = f"the checkpoint of step {self.state.global_step}"
        with needs_space(what, discard=folder, advice=self._what_is_saved):
            super()._save_checkpoint(*arguments, **options)
            self.recipe.save(folder, self.args.should_save)
            wait_for_all()  # the manifest lists the files of every process
            if self.args.should_save:
                write_manifest(folder)
                drop_old(Path(self.args.output_dir), self.run_config.train.keep)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save whole weights, also under FSDP, whose checkpoints are sharded."""
        if _internal_call or not self.is_fsdp_enabled:
            super().save_model(output_dir, _internal_call)
            return
        state = self.accelerator.get_state_dict(self.model)  # every process takes part
        if self.args.should_save:
            self._save(output_dir, state_dict=state)

    def _save(self, *arguments: Any, **options: Any) -> None:
        """Save the model's own `use_cache`: transformers turns it off for training."""
        config = self.recipe.model.config
        now, config.use_cache = config.use_cache, self._stored_use_cache
        try:
            super()._save(*arguments, **options)
        finally:
            config.use_cache = now


def adapt_fsdp(plugin: FullyShardedDataParallelPlugin, revive_every: int) -> None:
    """Make FSDP fit a sparse run. Call it before the model is sharded."""
    if plugin.fsdp_version == 1 and revive_every:
        reject("recipe.revive_every", revive_every, "0 under FSDP 1, which hides weights; or FSDP 2")
    policy = plugin.mixed_precision_policy
    if getattr(policy, "output_dtype", None) is not None:
        # accelerate makes FSDP 2 round everything a model returns to 16 bits, losses included.
        plugin.mixed_precision_policy = dataclasses.replace(policy, output_dtype=None)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def outlive_signals(then: Callable[[int], None] | None, worker: int) -> None:
    """Make a data-loading process ignore signals, which go to all processes of a job.

    The run still has a step to finish and a checkpoint to save; the training process ends its workers.
    """
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if then is not None:
        then(worker)


class SaveOnInterrupt(TrainerCallback):
    """The first signal saves and stops; a second one stops at once.

    Several processes must agree on the step, so they look at the signal when they log metrics.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> SaveOnInterrupt:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no handlers
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_error: object) -> None:
        self._restore()

    def _note(self, number: int, frame: object) -> None:
        self.interrupted = True
        self._restore()  # the next signal acts as usual

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def on_step_end(self, args, state, control, **kwargs):
        if self._all_stop(args, state.global_step):
            control.should_save = True
            control.should_training_stop = True

    def _all_stop(self, args, step: int) -> bool:
        if are_several():
            if step % args.logging_steps:
                return False
            self.interrupted = any_of_all(torch.tensor(self.interrupted, device=args.device))
        return self.interrupted
