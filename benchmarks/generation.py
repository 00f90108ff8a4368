"""Tokens of `generate` one after the other; writes benchmarks/results/generation.jsonl.

The paper's 2B model (38 layers, D 2048, H 5632), random weights whose gates have about 24 active neurons on
every layer's real input, bf16, prompts of 128 tokens, 128 new ones, greedy:

    captured   our model with captured steps, over a stock Llama with relu and the same weights in the same
               engine (`accelerate_`), batches of 1, 8, 32 and 128 unrelated sequences
    stock      over transformers' own loops with that Llama: its default cache, and its static one

Seconds are per token of a sequence, from the 17th new one on. Outputs are compared in the same
run, as the share of equal tokens. On an idle GPU:

    python benchmarks/generation.py [--batch N ...] [--stock default static] [--layers N] [--commit HASH]

--tiny tries the script with a small model on a CPU.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn

from _ffn import console, save
from defaults import Setting, models
from twell import recorded_paths
from twell.generation import accelerate_, generate
from twell.measure import Record, Timing, make_record

RESULTS = Path(__file__).parent / "results" / "generation.jsonl"
PROMPT, NEW, FIRST = 128, 112, 16
DENSE, DEFAULT, STATIC = "dense, captured steps", "transformers, default cache", "transformers, static cache"

LOOPS = {"default": DEFAULT, "static": STATIC}


def seconds_per_token(run: Callable[[int], Tensor], device: str, rounds: int, new: int) -> Timing:
    """run: makes so many tokens. The time of a few is taken off that of many."""

    def timed(tokens: int) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        began = perf_counter()
        run(tokens)
        if device == "cuda":
            torch.cuda.synchronize()
        return perf_counter() - began

    for _ in range(2):
        began = perf_counter()
        timed(FIRST + new)
        console.print(f"    warm-up {perf_counter() - began:.1f} s", highlight=False)
    return Timing(tuple(max(timed(FIRST + new) - timed(FIRST), 1e-9) / new for _ in range(rounds)))


def compare(
    records: list[Record], dense: nn.Module, sparse: nn.Module, batch: int, stock: list[str], tiny: bool
) -> None:
    device, new = dense.device.type, 16 if tiny else NEW
    ids = torch.randint(3, dense.config.vocab_size, (batch, PROMPT), device=device)
    outputs: dict[str, Tensor] = {}

    def run(name: str, model: nn.Module, **options: object) -> Callable[[int], Tensor]:
        def tokens(count: int) -> Tensor:
            # Room for all is asked for at once, so that few and many run in the same memory.
            out = model.generate(
                ids, max_new_tokens=count, do_sample=False, eos_token_id=[], pad_token_id=0, **options
            )
            outputs[name] = out
            return out

        return tokens

    timings: dict[str, Timing] = {}
    with recorded_paths() as ran:
        timings["ours"] = seconds_per_token(run("ours", sparse), device, 5, new)
    sparse_share = sum(p.path != "dense" for p in ran if p.tokens == batch) / max(
        sum(p.tokens == batch for p in ran), 1
    )
    timings[DENSE] = seconds_per_token(run(DENSE, dense), device, 5, new)
    kept, generate.DEVICES = generate.DEVICES, ()
    for name in stock:
        options = {"cache_implementation": "static"} if name == STATIC else {}
        timings[name] = seconds_per_token(run(name, dense, **options), device, 2, new)
    generate.DEVICES = kept
    for baseline in list(timings)[1:]:
        same = (outputs["ours"][:, PROMPT:] == outputs[baseline][:, PROMPT:]).float().mean().item()
        record = make_record(
            f"generation/{'captured' if baseline == DENSE else 'stock'}",
            timings["ours"],
            unit="s",
            baseline=baseline,
            baseline_timing=timings[baseline],
            shape={
                "M": batch,
                "prompt": PROMPT,
                "new": new,
                "D": dense.config.hidden_size,
                "H": dense.config.intermediate_size,
                "layers": dense.config.num_hidden_layers,
                "dtype": str(dense.dtype).removeprefix("torch."),
                "same_tokens": f"{same:.3f}",
                "sparse_calls": f"{sparse_share:.2f}",
            },
            sparsity={"nnz": 24.0},
            device=device,
        )
        records.append(record)
        ours, theirs = timings["ours"].median, timings[baseline].median
        console.print(
            f"batch {batch:4}: {baseline:28} {theirs * 1e3:7.3f} -> {ours * 1e3:7.3f} ms  "
            f"{theirs / ours:.2f}x  same tokens {same:.2f}, sparse {sparse_share:.0%}",
            highlight=False,
        )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--layers", type=int, default=38)
    parser.add_argument(
        "--stock", nargs="*", choices=list(LOOPS), default=list(LOOPS), help="transformers' loops"
    )
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU, to try the script")
    parser.add_argument("--commit", default=None, help="what to record where git cannot say")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    setting = Setting(vocabulary=32_000)
    if options.tiny:
        small = {"hidden": 64, "neurons": 256, "vocabulary": 500, "nnz": (8,)}
        setting = Setting(**small, dtype=torch.float32, device="cpu")
        generate.DEVICES = ("cpu",)
    began = perf_counter()
    dense, sparse = models(setting, options.layers)
    accelerate_(dense)
    console.print(f"built in {perf_counter() - began:.1f} s", highlight=False)
    records: list[Record] = []
    for batch in options.batch:
        stock = [LOOPS[name] for name in options.stock] if batch == 1 else []
        compare(records, dense, sparse, batch, stock, options.tiny)
        save(records, options.out, options.commit)
        for model in (dense, sparse):
            model.__dict__.pop("_twell_steps", None)  # the next batch needs the memory of its caches
        gc.collect()


if __name__ == "__main__":
    main()
