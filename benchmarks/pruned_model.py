"""A model trained by the recipe at the paper's width, pruned; writes benchmarks/results/pruned_model.jsonl.

Trains D 2048, H 5632 for some minutes, with a penalty that leaves neurons without work. Removes those that
never fired on 8,192 tokens (1,024 on a CPU) of which none was trained on, and compares on these tokens:

    cross-entropy  in float32; shape has both values
    block          the feed-forward blocks of all layers on their real inputs, all tokens at once: bf16 on a
                   GPU (4 layers), float32 on a CPU (one layer)

On an idle machine:

    python benchmarks/pruned_model.py --text FILE [--steps N] [--device cpu] [--run FOLDER] [--commit HASH]

--tiny tries the script with small shapes on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import gc
import tempfile
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from _ffn import console, save
from twell import prune_
from twell.evaluation import evaluate_windows, load_model, text_windows
from twell.measure import Record, compare, make_record
from twell.pruning.firing import counts_of, recorded_firing
from twell.sparsify.blocks import named_blocks

RESULTS = Path(__file__).parent / "results" / "pruned_model.jsonl"
WIDE = (
    "model.layers=4",
    "data.sequence_length=1024",
    "data.tokenizer=train",
    "data.vocab_size=16384",
    "data.held_out=0",
    "train.batch=32",
    "train.micro_batch=32",
    "train.checkpointing=false",
    "train.warmup=30",
    "train.lr=6e-4",
    "recipe.l1=5e-3",
    "recipe.l1_start=0",
    "recipe.l1_end=60",
    "train.eval_every=0",
    "train.save_every=0",
    "train.log_every=20",
    "train.workers=2",
)
ON_CPU = (
    "model.layers=1",
    "model.heads=16",
    "data.sequence_length=128",
    "data.tokenizer=train",
    "data.vocab_size=2048",
    "data.held_out=0",
    "train.batch=8",
    "train.micro_batch=8",
    "train.checkpointing=false",
    "train.precision=float32",
    "train.warmup=10",
    "train.lr=1e-3",
    "recipe.l1=3e-3",
    "recipe.l1_start=0",
    "recipe.l1_end=60",
    "train.eval_every=0",
    "train.save_every=0",
    "train.log_every=5",
    "train.workers=0",
)
TINY = ("train.eval_every=0", "train.save_every=0")
HELD_OUT = 0.2  # of the text, its end


def train(text: Path, folder: Path, steps: int, tiny: bool, device: str) -> Path:
    from twell.cli.train import run_train

    preset, settings = ("tiny", TINY) if tiny else ("paper-0.5b", WIDE if device == "cuda" else ON_CPU)
    overrides = [f"data.source={text}", f"data.max_tokens={steps * 32 * 1024}", f"train.steps={steps}"]
    run_train(overrides=[*settings, *overrides], preset=preset, config=None, out=folder, resume=None)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return folder


def inputs_of(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """What every block gets, [..., D]."""
    found: list[Tensor] = []
    hooks = [
        block.register_forward_pre_hook(lambda _, given: found.append(given[0].clone()))
        for _, block in named_blocks(model)
    ]
    model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


@torch.no_grad()
def measure(folder: Path, held_out: str, device: str, tokens: int) -> Record:
    model, tokenizer = load_model(str(folder), dtype="float32", device=device)
    length = 1024 if device == "cuda" else 128
    windows = list(islice(text_windows(model, tokenizer, [held_out], length), tokens // length))
    with recorded_firing(model) as firing:
        before = evaluate_windows(model, windows, batch=8)
    whole = copy.deepcopy(model)
    report = prune_(model, counts_of(firing, "text"), min_fires=1)
    after = evaluate_windows(model, windows, batch=8)
    console.print(str(report), highlight=False)
    precision = torch.bfloat16 if device == "cuda" else torch.float32
    whole, model = whole.to(precision), model.to(precision)
    ids = torch.tensor(windows, device=device)
    inputs = inputs_of(whole, ids)
    pairs = [
        [(block, x) for (_, block), x in zip(named_blocks(one), inputs, strict=True)]
        for one in (whole, model)
    ]

    def run(blocks: list[tuple[nn.Module, Tensor]]) -> list[Tensor]:
        return [block(x) for block, x in blocks]

    for _ in range(8):  # until the layers know how active they are
        results = [run(blocks) for blocks in pairs]
    difference = max(
        (ours.float() - theirs.float()).norm().item() / max(theirs.float().norm().item(), 1e-30)
        for theirs, ours in zip(*results, strict=True)
    )
    timings = compare(
        {"whole": lambda: run(pairs[0]), "pruned": lambda: run(pairs[1])},
        device=device,
        warmup=4,
        repetitions=15,
    )
    sizes = [block.up_proj.weight.shape[0] for block, _ in pairs[1]]
    neurons = pairs[0][0][0].up_proj.weight.shape[0]
    record = make_record(
        "pruned_model/block",
        timings["pruned"],
        unit="s",
        baseline="the same blocks before pruning",
        baseline_timing=timings["whole"],
        shape={
            "M": ids.numel(),
            "D": inputs[0].shape[-1],
            "H": neurons,
            "layers": len(sizes),
            "kept": ", ".join(map(str, sizes)),
            "dtype": str(precision).removeprefix("torch."),
            "tokens": before.tokens,
            "cross_entropy": f"{before.cross_entropy:.8f}",
            "cross_entropy_pruned": f"{after.cross_entropy:.8f}",
        },
        sparsity={"nnz": sum(before.l0) / len(before.l0)},
        error=difference,
        device=device,
    )
    gain = timings["whole"].median / timings["pruned"].median
    pruned = 1 - sum(sizes) / (neurons * len(sizes))
    console.print(
        f"{pruned:.1%} of the neurons pruned, blocks {gain:.2f}x as fast; cross-entropy "
        f"{before.cross_entropy:.7f} -> {after.cross_entropy:.7f} on {before.tokens:,} tokens",
        highlight=False,
    )
    return record


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--run", type=Path, help="folder of a run: its model, or where to train one")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes on a CPU, to try the script")
    parser.add_argument("--commit", default=None, help="what to record where git cannot say")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    text = options.text.read_text()
    cut = round(len(text) * (1 - HELD_OUT))
    device = "cpu" if options.tiny else options.device
    with tempfile.TemporaryDirectory() as folder:
        trained = options.run or Path(folder) / "run"
        if not (trained / "model").exists():
            shown = Path(folder) / "trained.txt"
            shown.write_text(text[:cut])
            train(shown, trained, options.steps, options.tiny, device)
        tokens = 512 if options.tiny else 8192 if device == "cuda" else 1024
        save([measure(trained, text[cut:], device, tokens)], options.out, options.commit)


if __name__ == "__main__":
    main()
