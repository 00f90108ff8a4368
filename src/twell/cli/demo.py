"""`twell demo`: trains a small language model twice on the CPU, with and without the L1 penalty; checks it,
times it, lets it write, and ends in a report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .. import reference
from .._errors import reject
from .._files import make_folder, needs_space, write_atomically, write_json
from .._interval import Interval, paired_gain
from .._log import Ran, recorded_paths
from ..kernels.cpu.measurements import was_doubted
from ..measure import Record, compare, write_records
from ..measure.contest import Setting
from ..measure.inference import Batch, bench_forward, bench_generation
from ..measure.models import ModelPair
from ..measure.records import source
from ..measure.results import Measured, merge, records_of
from ..plan import Plan
from ..plots import figure_class, speedup_bars, training_curves
from .next_steps import after_training, own_command
from .progress import NOISY, Bar, Progress
from .status import INTERRUPTED
from .train import stopping_at_once

_ROUNDS = 7
_BATCH = 4  # sequences of the timed forward pass
_PROMPT_TOKENS, _NEW_TOKENS = 16, 32  # of the timed generation
_PROFILED = 8192  # tokens
_BLOCK_REPETITIONS = 9
_PROMPT = "def read_file(path):\n    "
_NAME = "demo"  # of the model in records
_PENALTY, _NONE = "with penalty", "without"
_MOSTLY = 0.5
_PLAIN = {"highlight": False, "markup": False, "soft_wrap": True}


@dataclass(frozen=True)
class _Trained:
    """A run: its folder, settings, log lines and summary.

    sparse_share:  the share of its training that took a sparse path (`_sparse_share`).
    """

    folder: Path
    config: Any
    logs: list[dict]
    summary: dict
    sparse_share: float

    @property
    def text(self) -> str:
        """What `figures` are of."""
        return "training" if self.summary["held_out_ce_loss"] is None else "held-out"

    @property
    def figures(self) -> tuple[float, float]:
        """Cross-entropy and active neurons per token: held-out, or training's if no text is held out."""
        if self.summary["held_out_ce_loss"] is None:
            return self.summary["train_ce_loss"], self.summary["nnz"]
        return self.summary["held_out_ce_loss"], self.summary["held_out_nnz"]


def run_demo(*, output: Path, overrides: list[str]) -> None:
    """Train, check, time, generate, report; write everything to `output`."""
    figure_class()  # raises before the work starts
    console = Console()
    folder = _new_folder(output)

    console.rule("1. Train it twice: with an L1 penalty, and without")
    sparse, dense = _train_both(console, folder, overrides)
    _show_training(console, sparse, dense)
    (loss, active), (reference_loss, _) = sparse.figures, dense.figures
    share = active / sparse.config.model.intermediate_size
    training_curves(
        {_PENALTY: sparse.logs, _NONE: dense.logs},
        output / "training.png",
        title=f"{share:.1%} of the neurons active, cross-entropy {loss / reference_loss - 1:+.1%}",
        subtitle=f"Llama with ReLU, {sparse.summary['parameters'] / 1e6:.1f}M parameters. Title: "
        f"{sparse.text} text; curves: training text",
        reference=_NONE,
    )

    console.rule("2. Is sparse as exact as dense?")
    from ..reproduction.speed import held_out_batch, model_pair

    pair = model_pair(sparse.folder, "float32", torch.device("cpu"))
    length = min(sparse.config.data.sequence_length, sparse.config.model.positions)
    tokens, origin = held_out_batch(sparse.config, (_BATCH, length))
    _check(console, pair, tokens)

    console.rule("3. Is it faster?")
    speedups, records = _time(console, pair, Batch(ids=tokens, origin=origin))
    _show_training_speed(console, sparse, dense, busy=was_doubted())
    speedup_bars(
        speedups,
        output / "speedup.png",
        title="The trained model, sparse over dense",
        subtitle=f"CPU, float32, {share:.1%} of {sparse.config.model.intermediate_size:,} neurons active",
    )
    write_records(folder / "records.jsonl", records)

    console.rule("4. What it writes")
    _write_text(console, pair.sparse, sparse)

    console.rule("5. Its report")
    report = _report(console, pair.sparse, sparse, dense, folder, output)
    found = {
        **sparse.summary,
        "without_penalty": dense.summary,
        "speedups": speedups,
        "training_sparse_share": sparse.sparse_share,
    }
    write_json(output / "demo.json", found)
    console.print(f"plots:  {output / 'training.png'}, {output / 'speedup.png'}", **_PLAIN)
    console.print(f"model:  {sparse.folder / 'model'}", **_PLAIN)
    console.print(f"report: {report} (open it in a browser)", **_PLAIN)
    _show_next_steps(console, sparse)


def _new_folder(output: Path) -> Path:
    """A new folder name for the runs: running the demo again deletes nothing."""
    make_folder(output, "output")
    return next(run for number in count(1) if not (run := output / f"run-{number}").exists())


def _train_both(console: Console, folder: Path, overrides: list[str]) -> tuple[_Trained, _Trained]:
    from ..reproduction.recipes import RECOMMENDED
    from ..train.presets import preset
    from ..train.settings import run_config, with_overrides

    settings = with_overrides(preset("demo"), overrides)
    config = run_config(settings)
    if config.model.dense:
        reject(
            "model.activation",
            repr(config.model.activation),
            "relu | relu2 | fatrelu(T) | drelu: the demo is sparse",
        )
    without = run_config(with_overrides(settings, ["recipe.l1=0", "model.plan=dense"]))
    make_folder(folder, "output")
    console.print(
        f"With the penalty, lambda {config.recipe.l1:g}. The paper's is {RECOMMENDED:g}, over billions of\n"
        "tokens; a run this short needs more to become as sparse.",
        **_PLAIN,
    )
    sparse = _train(console, config, folder / "with-penalty")
    console.print("Without the penalty:", **_PLAIN)
    return sparse, _train(console, without, folder / "without-penalty")


def _train(console: Console, config: Any, folder: Path) -> _Trained:
    from ..train.metrics import read_metrics
    from ..train.run import train
    from ..train.run_folder import METRICS

    with stopping_at_once(folder, console), recorded_paths() as ran:
        result = train(config, folder, console=console)
    if not result.finished:
        console.print(f"Stopped. Resume with: twell train --resume {folder}", **_PLAIN)
        raise typer.Exit(INTERRUPTED)
    logs = [line for line in read_metrics(folder / METRICS) if "ce_loss" in line]
    share = _sparse_share(ran, result.summary["tokens"] * config.model.layers)
    return _Trained(folder, config, logs, result.summary, share)


def _sparse_share(ran: list[Ran], tokens: int) -> float:
    """The share of a run's forward passes that took a sparse path.

    tokens:  of its training, times layers. What ran after them were evaluations, which count for nothing.
    """
    sparse = seen = 0
    for piece in ran:
        if piece.phase != "forward" or seen >= tokens:
            continue
        seen += piece.tokens
        sparse += piece.tokens * (piece.path != "dense")
    return sparse / max(seen, 1)


def _show_training(console: Console, sparse: _Trained, dense: _Trained) -> None:
    table = Table("tokens", "cross-entropy", "active per token", "without penalty", "active")
    places = [round(i * (len(sparse.logs) - 1) / 5) for i in range(6)]
    for place in dict.fromkeys(places):
        cells = []
        for line in (sparse.logs[place], dense.logs[place]):
            cells += [f"{line['ce_loss']:.3f}", f"{line['nnz']:.1f}"]
        table.add_row(f"{sparse.logs[place]['tokens']:,}", *cells)
    console.print(table)
    neurons = sparse.config.model.intermediate_size
    for name, run in ((_PENALTY, sparse), (_NONE, dense)):
        loss, active = run.figures
        console.print(
            f"{run.text} text, {name}: cross-entropy {loss:.3f}, {active:.1f} of {neurons:,} neurons active",
            highlight=False,
        )


def _show_training_speed(console: Console, sparse: _Trained, dense: _Trained, *, busy: bool) -> None:
    """Tokens per second of both runs, or why they say nothing.

    busy:  whether other programs kept twell from measuring this CPU when training began.
    """
    mine, theirs = (run.summary["tokens_per_second"] for run in (sparse, dense))
    if not mine or not theirs:  # nothing was logged
        return
    mostly_dense = sparse.sparse_share < _MOSTLY
    ran_sparse = f"{sparse.sparse_share:.0%} of its forward passes ran sparse"
    if busy and mostly_dense:
        console.print(
            "Training speed is not compared: other programs were busy when training began, and the run with\n"
            f"the penalty trained mostly dense ({ran_sparse}). Run the demo again on a quiet machine.",
            style="yellow",
            **_PLAIN,
        )
        return
    table = Table("", _NONE, _PENALTY, "speed-up")
    table.add_row("training, tokens/s", f"{theirs:,.0f}", f"{mine:,.0f}", f"{mine / theirs:.2f}x")
    console.print(table)
    console.print("Medians of the two runs, one after the other; both begin dense.", **_PLAIN)
    if mostly_dense:
        console.print(
            f"The run with the penalty trained mostly dense ({ran_sparse}): its blocks are small, or many\n"
            "neurons were active for most of it.",
            **_PLAIN,
        )
    if busy:
        console.print("Other programs were busy when training began.", style="yellow", **_PLAIN)


def _show_next_steps(console: Console, run: _Trained) -> None:
    source = run.config.data.sources[0]
    known = None if run.config.data.prepared is not None else source
    for step in after_training(run.folder, sparse=True, source=known):
        console.print(f"next:   {step}", **_PLAIN)
    console.print(f"your own text: {own_command()} train --preset tiny data.source=FOLDER", **_PLAIN)


@torch.inference_mode()
def _check(console: Console, pair: ModelPair, tokens: Tensor) -> None:
    """Logits against float64, as dense PyTorch computes them and on our paths."""
    from ..hf import sparse_mlps

    def logits(model: torch.nn.Module) -> Tensor:
        return model(input_ids=tokens, use_cache=False).logits

    dense = logits(pair.dense)
    exact = logits(pair.dense.double())
    pair.dense.float()
    dense_error = reference.relative_error(dense, exact)
    table = Table("feed-forward", "error of the logits", "same next token")
    table.add_row("dense PyTorch", f"{dense_error:.1e}", "")
    blocks = sparse_mlps(pair.sparse)
    for path in ("row", "auto"):
        for block in blocks:
            block.plan = Plan(path=path)
        found = logits(pair.sparse)
        error = reference.relative_error(found, exact)
        same = (found.argmax(-1) == dense.argmax(-1)).double().mean().item()
        if not error <= 2 * dense_error + 1e-6:
            raise AssertionError(f"{path}: error {error:.1e}, dense has {dense_error:.1e}")
        table.add_row(path, f"{error:.1e}", f"{same:.2%}")
    for block in blocks:
        block.plan = None
    console.print(table)
    console.print("Errors are against float64; tokens as dense PyTorch predicts them.", **_PLAIN)


def _time(console: Console, pair: ModelPair, batch: Batch) -> tuple[dict[str, float], list[Record]]:
    """Case -> times faster than dense, for a feed-forward block and for the whole model, and records of the
    whole model, as `twell bench` makes them. Dense is transformers' own Llama with the same weights."""
    shown, tokens = Progress(console), batch.ids
    rows = [_timed_block(console, pair, tokens)]
    found: dict[tuple, Measured] = {}  # a contender is emitted again when more is known
    setting = Setting(
        device=torch.device("cpu"),
        rounds=_ROUNDS,
        memory=False,
        emit=lambda measured: found.__setitem__(measured.key, measured),
        say=shown.show,
    )
    prompt = Batch(ids=tokens[:1, :_PROMPT_TOKENS], origin=batch.origin)
    try:
        bench_forward(pair, _NAME, batch, ["dense-eager", "ours-eager"], setting, calibrated=False)
        bench_generation(pair, _NAME, prompt, _NEW_TOKENS, ["dense-eager", "ours-eager"], setting)
    finally:
        shown.clear()
    for workload, title in (
        ("forward", f"model, {tokens.numel():,} tokens at once"),
        ("generation", "model, token by token"),
    ):
        dense, ours = merge(one for one in found.values() if one.workload == workload)
        if ours.gain is None:
            console.print(f"Not timed: {title}: {ours.failure or dense.failure}.", style="yellow", **_PLAIN)
        else:
            rows.append((title, median(dense.seconds), median(ours.seconds), ours.gain))
    table = Table("", "dense", "sparse", "speed-up", "95%")
    for title, theirs, mine, gain in rows:
        interval = f"{gain.low:.2f} to {gain.high:.2f}"
        times = (f"{1e3 * one:.{1 if one > 0.1 else 2}f} ms" for one in (theirs, mine))
        table.add_row(title, *times, f"{gain.middle:.2f}x", interval)
    console.print(table)
    console.print("Dense is transformers' own Llama, the same weights, timed in turn.", **_PLAIN)
    console.print(_widths(pair.dense.config), **_PLAIN)
    if any(gain.is_wide for *_, gain in rows):
        console.print(NOISY, style="yellow", **_PLAIN)
    records = records_of("bench_inference", found.values(), source=source("cpu", None), seed=0)
    return {title: gain.middle for title, *_, gain in rows}, records


def _widths(config: Any) -> str:
    """The demo's blocks are wide, so that a CPU gains with single tokens: other models may not."""
    hidden, neurons = config.hidden_size, config.intermediate_size
    return (
        f"Sizes of its blocks: D {hidden:,}, H {neurons:,} ({neurons / hidden:.3g} x D). The paper's models\n"
        "have 2.75 x D; token by token, wider blocks gain more."
    )


@torch.inference_mode()
def _timed_block(console: Console, pair: ModelPair, tokens: Tensor) -> tuple[str, float, float, Interval]:
    """(case, dense seconds, sparse seconds, gain) of the last block, on what it gets from `tokens`.

    With one token, again and again, its active rows would stay in the cache: that says nothing.
    """
    from ..hf import sparse_mlps

    inputs: list[Tensor] = []
    ours, stock = sparse_mlps(pair.sparse)[-1], pair.dense.model.layers[-1].mlp
    hook = ours.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach().clone()))
    pair.sparse(input_ids=tokens, use_cache=False)
    hook.remove()
    hidden = inputs[0]
    title = f"block, {tokens.numel():,} tokens at once"
    calls: dict[str, Callable[[], object]] = {"dense": lambda: stock(hidden), "sparse": lambda: ours(hidden)}
    with Bar(console, f"timing: {title}", _BLOCK_REPETITIONS, "rounds") as bar:
        timings = compare(calls, warmup=3, repetitions=_BLOCK_REPETITIONS, progress=bar.advance)
    dense, sparse = timings["dense"], timings["sparse"]
    return title, dense.median, sparse.median, paired_gain([dense.samples], [sparse.samples])


@torch.inference_mode()
def _write_text(console: Console, model: Any, run: _Trained) -> None:
    from ..evaluation import load_tokenizer

    tokenizer = load_tokenizer(str(run.folder))
    torch.manual_seed(0)
    prompt = tokenizer(_PROMPT, return_tensors="pt", add_special_tokens=False).input_ids
    written = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=48,
        do_sample=True,
        temperature=0.7,
        top_k=20,
        pad_token_id=tokenizer.eos_token_id,
    )
    console.print(tokenizer.decode(written[0]), markup=False, highlight=False)
    read = run.logs[-1]["tokens"]
    console.print(f"(It has read {read:,} tokens: the shape of code, no sense yet.)", **_PLAIN)


def _report(
    console: Console, model: Any, sparse: _Trained, dense: _Trained, folder: Path, output: Path
) -> Path:
    from ..evaluation import load_tokenizer
    from ..profiling import profile_model
    from ..report import make_report
    from ..train.data import DataConfig
    from ..train.data.sources import documents

    with Bar(console, "counting how its neurons behave", _PROFILED) as bar:
        profile = profile_model(
            model,
            load_tokenizer(str(sparse.folder)),
            documents(DataConfig(source=sparse.config.data.source)),
            name=str(sparse.folder),
            text=sparse.config.data.sources,
            sequence_length=sparse.config.data.sequence_length,
            max_tokens=_PROFILED,
            repetitions=_BLOCK_REPETITIONS,
            progress=bar.advance,
        )
    with needs_space(str(folder)):
        (folder / "profile").mkdir()
        profile.save(folder / "profile" / "profile.json")
    made = make_report([sparse.folder, dense.folder, folder / "profile", folder / "records.jsonl"])
    path = output / "report.html"
    write_atomically(path, made.html())
    console.print(made.headline.claim or made.headline.title, **_PLAIN)
    return path
