"""The progress bar of a run, on its first process."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback


def dead_of(logs: Mapping[str, float], prefix: str = "") -> str:
    """The share of dead neurons, with the window it was counted in: the share depends on the window."""
    return f"dead {logs[f'{prefix}dead']:.1%} in {logs[f'{prefix}dead_window']:,} tokens"


class ProgressBar(TrainerCallback):
    """Loss, active and dead neurons, tokens per second and time left: a bar, or lines without a terminal."""

    def __init__(self, tokens_per_step: int, console: Console) -> None:
        self.tokens_per_step, self.console = tokens_per_step, console
        self.bar: Progress | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero or not self.console.is_terminal:
            return
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}"),
        )
        self.bar = Progress(*columns, console=self.console)
        self._task = self.bar.add_task("", total=state.max_steps, completed=state.global_step, status="")
        self.bar.start()

    def on_step_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.update(self._task, completed=state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs:
            return
        if "eval_loss" in logs:
            sparse = ""
            if "eval_nnz" in logs:
                sparse = f", nnz {logs['eval_nnz']:.1f}, {dead_of(logs, 'eval_')}"
            self._say(f"step {state.global_step}: held-out cross-entropy {logs['eval_loss']:.4f}{sparse}")
        elif "ce_loss" in logs:
            rate = logs["tokens_per_second"]
            status = f"cross-entropy {logs['ce_loss']:.3f}"
            if "nnz" in logs:
                status += f"  nnz {logs['nnz']:.1f}  {dead_of(logs)}"
            status += f"  {rate:,.0f} tokens/s"
            if self.bar is not None:
                self.bar.update(self._task, status=status)
            else:
                left = (state.max_steps - state.global_step) * self.tokens_per_step / max(rate, 1e-9)
                self._say(f"step {state.global_step}/{state.max_steps}  {status}  {left:,.0f} s left")

    def on_train_end(self, args, state, control, **kwargs):
        self.close()

    def close(self) -> None:
        """Remove the bar, also after an error, which a live bar would hide."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)  # stays one line in a file
