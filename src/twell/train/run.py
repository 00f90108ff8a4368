"""A training run, from its config to its folder.

config.yaml     the resolved settings
data.json       which data it uses
choices.json    the measurements of the CPU that its automatic plans use
metrics.jsonl   every log and evaluation
checkpoint-N/   model, optimiser, schedule, random state, firing statistics, manifest
model/          the trained model and its tokenizer, at the end
environment.json  machine, versions and date, at the end
summary.json    the results, at the end
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import TrainingArguments, default_data_collator
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import IntervalStrategy
from transformers.utils import logging as transformers_logging

from .. import hf
from .._errors import reject
from .._files import needs_space, read_json_object, remove, remove_leftovers, replace_folder, write_json
from .._log import log_once
from .._processor import make_products_safe
from ..hf.layers import CHECKPOINTS, enable_checkpoints
from ..kernels.cpu.measurements import choices_kept_in
from ..measure.records import source
from .checkpoints import MODEL, newest_whole, set_aside_after, step_of
from .config import RunConfig
from .data import Prepared, prepare
from .display import metrics_html, summary_html
from .distributed import is_first
from .metrics import MetricsFile, ProgressBar, check_reporters, read_metrics
from .model import build_model, with_checkpoint
from .run_folder import CHOICES, ENVIRONMENT, METRICS, SUMMARY, check_data, claimed, with_absolute_paths
from .trainer import SaveOnInterrupt, SparseTrainer

_FULL_GRAPH, _FSDP = "ACCELERATE_DYNAMO_USE_FULLGRAPH", "ACCELERATE_USE_FSDP"


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What `train` returns.

    finished:  False if the run was interrupted; it can be resumed.
    summary:   as in summary.json; of an interrupted run only the step.
    """

    folder: Path
    finished: bool
    summary: dict[str, Any]

    def _repr_html_(self) -> str:
        """In a notebook: the results, then some metrics and the training curves."""
        state = "finished" if self.finished else "stopped; it can be resumed"
        results = summary_html(self.summary, f"{self.folder}: {state}")
        return results + metrics_html(read_metrics(self.folder / METRICS), self.folder.name)


def train(
    config: RunConfig,
    folder: Path,
    *,
    resume: bool = False,
    verify: bool = False,
    console: Console | None = None,
) -> RunResult:
    """Train in `folder`.

    Call it in one process, or in each process that torchrun or `accelerate launch` has started.
    resume:  continue from the newest whole checkpoint in `folder`, or from the start without one.
    verify:  check the contents of all token files, not only of new and changed ones.
    """
    console = console or Console()
    if config.train.precision != "float32":
        make_products_safe()
    config = with_absolute_paths(config)
    check_reporters(config.train.report)
    if config.model.init_from is not None and not resume:  # a resumed run has its sizes already
        config = with_checkpoint(config)
    with claimed(config, folder, resume=resume, first=is_first()):
        if resume and (stored := _finished(config, folder)) is not None:
            return RunResult(folder=folder, finished=True, summary=stored)
        # Measurements choose the path of a product, which shows in the last bits: a run keeps its own.
        with choices_kept_in(folder / CHOICES, write=is_first()):
            return _train(config, folder, resume, verify, console)


def _finished(config: RunConfig, folder: Path) -> dict[str, Any] | None:
    """The summary of a finished run; None if it is not finished."""
    if not (folder / MODEL / "config.json").exists():
        return None
    summary = read_json_object(folder / SUMMARY)
    return summary if summary is not None and summary.get("steps") == config.train.steps else None


def _train(config: RunConfig, folder: Path, resume: bool, verify: bool, console: Console) -> RunResult:
    first = is_first()
    arguments = training_arguments(config, folder)
    data = prepare(config.data, quiet=not first, verify=verify)
    check_data(folder, data, config.data.source, resume=resume, first=first)
    if data.held_out is None:
        arguments.eval_strategy = IntervalStrategy.NO  # `prepare` has logged why
    if first:
        _warn(config)
        _introduce(config, data, console)
    torch.manual_seed(config.train.seed)
    model = build_model(
        config.model,
        vocab_size=max(len(data.tokenizer), data.vocab_size),
        eos_token_id=data.tokenizer.eos_token_id,
        l1=config.recipe.l1,
        eager=blocks_leave_graphs(config),
    )
    if compiles_inside_checkpoints(config):
        enable_checkpoints(model)
        hf.compile_inside_checkpoints(model, backend=arguments.torch_compile_backend)
    elif config.train.compile and config.train.checkpointing:
        # Recomputed blocks would note their statistics a second time, which nobody reads.
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    interrupt = SaveOnInterrupt()
    progress = ProgressBar(config.tokens_per_step, console)
    metrics = MetricsFile(folder / METRICS, config.tokens_per_step)
    trainer = SparseTrainer(
        model=model,
        args=arguments,
        train_dataset=data.train,
        eval_dataset=data.held_out,
        processing_class=data.tokenizer,
        data_collator=default_data_collator,
        callbacks=[metrics, progress, interrupt],
        run=config,
    )
    trainer.remove_callback(PrinterCallback)
    checkpoint = newest_whole(folder) if resume else None
    trainer.accelerator.wait_for_everyone()
    if resume and first:
        set_aside_after(folder, -1 if checkpoint is None else step_of(checkpoint))
        where = "the start: it has no whole checkpoint" if checkpoint is None else checkpoint.name
        console.print(f"resuming from {where}", highlight=False, markup=False)
    try:
        with interrupt:  # not earlier: Ctrl-C should end tokenising at once
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    finally:
        progress.close()
    if interrupt.interrupted and trainer.state.global_step < config.train.steps:
        return RunResult(folder=folder, finished=False, summary={"step": trainer.state.global_step})
    return _finish(trainer, config, folder, data)


def _checkpointing(wanted: bool) -> dict[str, Any]:
    """The arguments of the Trainer, which transformers 5.23 renamed."""
    renamed = "activation_checkpointing" in {field.name for field in fields(TrainingArguments)}
    name = "activation_checkpointing" if renamed else "gradient_checkpointing"
    return {name: wanted, f"{name}_kwargs": CHECKPOINTS if wanted else None}


def training_arguments(config: RunConfig, folder: Path) -> TrainingArguments:
    train = config.train
    world = int(os.environ.get("WORLD_SIZE", "1"))
    micro = train.micro_batch or max(train.batch // world, 1)
    if train.batch % (micro * world):
        reject("train.batch", train.batch, f"a multiple of micro_batch x processes = {micro} x {world}")
    decay = {"lr_scheduler_type": "cosine"}
    if train.final_lr:
        decay = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": train.final_lr}}
    cuda = torch.cuda.is_available()
    if train.precision == "float16" and not cuda:
        reject("train.precision", "'float16' without a GPU", "float32 or bfloat16")
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=train.steps,
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=micro,
        gradient_accumulation_steps=train.batch // (micro * world),
        learning_rate=train.lr,
        warmup_steps=train.warmup,
        **decay,
        adam_beta1=train.beta1,
        adam_beta2=train.beta2,
        adam_epsilon=train.eps,
        weight_decay=train.weight_decay,
        max_grad_norm=train.clip,
        optim="adamw_torch_fused" if cuda else "adamw_torch",
        bf16=train.precision == "bfloat16",
        fp16=train.precision == "float16",
        **_checkpointing(train.checkpointing and not compiles_inside_checkpoints(config)),
        torch_compile=train.compile,
        eval_strategy="steps" if train.eval_every else "no",
        eval_steps=train.eval_every or None,
        save_strategy="steps",
        save_steps=train.save_every or train.steps,
        save_total_limit=None,  # `SparseTrainer` drops old ones when a newer one is whole
        logging_steps=train.log_every,
        logging_nan_inf_filter=False,  # would wait for the device in every step
        report_to=list(train.report) or "none",
        seed=train.seed,
        dataloader_num_workers=train.workers,
        dataloader_drop_last=False,  # training has whole batches anyway, a small evaluation set may not
        dataloader_pin_memory=cuda,
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        prediction_loss_only=True,
        disable_tqdm=True,
        use_cpu=not cuda,
    )
    if arguments.n_gpu > 1:
        # transformers would use all of them in this process, and multiply the batch.
        log_once(f"training on one of {arguments.n_gpu} GPUs; start it with torchrun to use more")
        arguments._n_gpu = 1
    return arguments


def blocks_leave_graphs(config: RunConfig) -> bool:
    """Whether blocks decide outside of compiled graphs. A graph break would leave a checkpoint uncompiled."""
    inside = compiles_inside_checkpoints(config)
    return config.train.compile and (inside or not config.train.checkpointing) and not _is_set(_FULL_GRAPH)


def compiles_inside_checkpoints(config: RunConfig) -> bool:
    """Whether layers are compiled one by one inside their checkpoints, so that blocks can decide."""
    train = config.train
    decides = not config.model.dense and (config.model.plan or "auto").startswith("auto")
    # Sharded layers gather their weights in hooks, which a compiled call would have to trace.
    return train.compile and train.checkpointing and decides and not (_is_set(_FULL_GRAPH) or _is_set(_FSDP))


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true")


def _introduce(config: RunConfig, data: Prepared, console: Console) -> None:
    """Print the data and the length of the run in one line."""
    source = ", ".join(config.data.sources)
    held_out = f"{data.held_out_tokens:,} held out" if data.held_out is not None else "none held out"
    console.print(
        f"{source}: {data.train_tokens:,} tokens, {held_out}; {config.train.steps:,} steps of "
        f"{config.tokens_per_step:,} tokens",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _warn(config: RunConfig) -> None:
    """Warn of settings that are allowed and probably a mistake."""
    steps, recipe = config.train.steps, config.recipe
    if config.model.dense and recipe.l1:
        log_once(
            f"model.activation = {config.model.activation!r} has no zeros: a stock model, trained without L1"
        )
    compiled = config.train.compile and config.train.checkpointing and not config.model.dense
    if compiled and not compiles_inside_checkpoints(config) and config.model.plan is None:
        log_once("train.checkpointing keeps blocks inside compiled graphs: automatic plans train dense there")
    ends = [("train.warmup", config.train.warmup, steps - 1)]
    if recipe.l1 and not config.model.dense:
        ends += [("recipe.l1_start", recipe.l1_start, steps - 1), ("recipe.l1_end", recipe.l1_end, steps)]
    for name, step, last in ends:
        if step > last:
            log_once(f"{name} = {step} lies beyond the {steps} steps of the run")


def _finish(trainer: SparseTrainer, config: RunConfig, folder: Path, data: Prepared) -> RunResult:
    """Evaluate, save the model, write the summary."""
    trainer.check_weights()
    evaluated = _last_evaluation(trainer)
    if not evaluated and data.held_out is not None:
        evaluated = trainer.evaluate()
    trainer.note_shares()
    target, temporary = folder / MODEL, folder / f".{MODEL}.part"
    if trainer.is_world_process_zero():
        remove(temporary)
    trainer.accelerator.wait_for_everyone()
    advice = f"free some, then: twell train --resume {folder}"
    with needs_space("the model", discard=temporary, advice=advice):
        trainer.save_model(str(temporary))
    summary = _summary(trainer, config, folder, data, evaluated)
    if trainer.is_world_process_zero():
        remove_leftovers(target)  # not before: one may be the last whole model
        replace_folder(temporary, target)
        write_json(folder / ENVIRONMENT, source(trainer.args.device, None))
        write_json(folder / SUMMARY, summary)
    trainer.accelerator.wait_for_everyone()
    return RunResult(folder=folder, finished=True, summary=summary)


def _last_evaluation(trainer: SparseTrainer) -> dict[str, float]:
    """The evaluation of the last step; empty if there was none."""
    history = trainer.state.log_history
    found = [line for line in history if "eval_loss" in line and line["step"] == trainer.state.global_step]
    return found[-1] if found else {}


def _summary(
    trainer: SparseTrainer, config: RunConfig, folder: Path, data: Prepared, evaluated: dict[str, float]
) -> dict[str, Any]:
    logs = [line for line in read_metrics(folder / METRICS) if "tokens_per_second" in line]
    rates = sorted(line["tokens_per_second"] for line in logs)
    last = logs[-1] if logs else {}
    return {
        "steps": trainer.state.global_step,
        "tokens": trainer.state.global_step * config.tokens_per_step,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "train_ce_loss": last.get("ce_loss"),
        "held_out_ce_loss": evaluated.get("eval_loss"),
        **{f"held_out_{n}": evaluated.get(f"eval_{n}") for n in ("perplexity", "nnz", "dead", "dead_window")},
        **{name: last.get(name) for name in ("nnz", "dead", "dead_window", "revived")},
        "tokens_per_second": rates[len(rates) // 2] if rates else None,
        "data_tokens": data.train_tokens,
        "processes": trainer.args.world_size,
        "peak_memory_bytes": max((line.get("peak_memory_bytes", 0) for line in logs), default=0) or None,
    }
