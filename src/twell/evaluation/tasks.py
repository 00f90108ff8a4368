"""Runs EleutherAI's lm-eval harness on a loaded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .._errors import missing_extra, reject

PAPER_TASKS = (
    "arc_easy",
    "arc_challenge",
    "hellaswag",
    "openbookqa",
    "piqa",
    "winogrande",
    "commonsense_qa",
)


def evaluate_tasks(
    model: Any,
    tokenizer: Any,
    tasks: list[str],
    *,
    include: Path | None = None,
    batch: int = 8,
    limit: int | None = None,
) -> dict[str, float]:
    """task -> accuracy, through lm-eval; "paper" stands for the paper's seven tasks.

    include:  a folder of your own task definitions.
    limit:    examples per task; None runs all.
    Public tasks download their datasets.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise missing_extra("tasks need lm-eval", "eval") from error
    names = [name for task in tasks for name in (PAPER_TASKS if task == "paper" else (task,))]
    manager = TaskManager(include_path=None if include is None else str(include))
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        reject("tasks", ", ".join(unknown), "names of lm-eval's tasks, or 'paper'")
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch)
    results = simple_evaluate(
        model=harness, tasks=names, task_manager=manager, limit=limit, bootstrap_iters=0
    )
    return {name: _accuracy(name, results["results"][name]) for name in names}


def _accuracy(name: str, metrics: dict[str, Any]) -> float:
    for metric in ("acc,none", "acc_norm,none", "exact_match,none"):
        if metric in metrics:
            return float(metrics[metric])
    numbers = {k: v for k, v in metrics.items() if isinstance(v, float)}
    return reject("tasks", f"{name} with {sorted(numbers)}", "tasks that measure accuracy")
