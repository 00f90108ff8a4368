"""Tokens of `generate` one after the other; writes benchmarks/results/generation.jsonl.

The paper's 2B model (38 layers, D 2048, H 5632), random weights whose gates have about 24 active neurons on
every layer's real input, bf16, prompts of 128 tokens, 128 new ones, greedy:

    captured   our model with captured steps, over a stock Llama with relu and the same weights in the same
               engine (`accelerate_`), batches of 1, 8, 32 and 128 unrelated sequences
    stock      over transformers' own loops with that Llama: its default cache, and its static one
    first      seconds to the first token, prompt and all, over the same Llama
    energy     millijoules per token of whole calls of `generate`, over the same Llama
    start      seconds from the start of a process to its first token, the model on disk: with empty caches
               of compiled kernels, and again
    text       as captured, with a model that `twell train` made and prompts from all over a text that it has
               not seen: `--run FOLDER --text FILE`

Seconds are per token of a sequence, from the 17th new one on. Outputs are compared in the same
run, as the share of equal tokens. On an idle GPU:

    python benchmarks/generation.py [--batch N ...] [--stock default static] [--start]
    python benchmarks/generation.py [--batch N ...] --run FOLDER --text FILE

--tiny tries the script with a small model on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
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
from twell.measure.energy import PowerSource, energy_of, power_source

RESULTS = Path(__file__).parent / "results" / "generation.jsonl"
PROMPT, NEW, FIRST = 128, 112, 16
DENSE, DEFAULT, STATIC = "dense, captured steps", "transformers, default cache", "transformers, static cache"

LOOPS = {"default": DEFAULT, "static": STATIC}


def seconds_per_token(run: Callable[[int], Tensor], device: str, rounds: int, new: int) -> Timing:
    """run: makes so many tokens. The time of a few is taken off that of many."""

    for _ in range(2):
        console.print(f"    warm-up {timed(run, FIRST + new, device):.1f} s", highlight=False)
    times = [(timed(run, FIRST + new, device), timed(run, FIRST, device)) for _ in range(rounds)]
    return Timing(tuple(max(many - few, 1e-9) / new for many, few in times))


def timed(run: Callable[[int], Tensor], tokens: int, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    began = perf_counter()
    run(tokens)
    if device == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - began


class Bench:
    """part: of the records' names; nnz: active neurons of the model; tiny: less of everything."""

    def __init__(self, dense: nn.Module, sparse: nn.Module, part: str, nnz: float, tiny: bool) -> None:
        self.dense, self.sparse, self.part, self.nnz = dense, sparse, part, nnz
        self.new, self.rounds = (4, 2) if tiny else (NEW, 5)
        self.device = dense.device.type
        self.records: list[Record] = []

    def compare(self, ids: Tensor, stock: list[str], source: PowerSource | None) -> None:
        batch, outputs = ids.shape[0], {}

        def run(name: str, model: nn.Module, **options: object) -> Callable[[int], Tensor]:
            def tokens(count: int) -> Tensor:
                outputs[name] = model.generate(
                    ids, max_new_tokens=count, do_sample=False, eos_token_id=[], pad_token_id=0, **options
                )
                return outputs[name]

            return tokens

        runs = {"ours": run("ours", self.sparse), DENSE: run(DENSE, self.dense)}
        with recorded_paths() as ran:
            timings = {"ours": seconds_per_token(runs["ours"], self.device, self.rounds, self.new)}
        steps = [p for p in ran if p.tokens == batch]
        sparse_share = sum(p.path != "dense" for p in steps) / max(len(steps), 1)
        timings[DENSE] = seconds_per_token(runs[DENSE], self.device, self.rounds, self.new)
        kept, generate.DEVICES = generate.DEVICES, ()
        for name in stock:
            options = {"cache_implementation": "static"} if name == STATIC else {}
            timings[name] = seconds_per_token(run(name, self.dense, **options), self.device, 2, self.new)
        generate.DEVICES = kept
        # Equal tokens say little of a model that writes the same one over and over.
        distinct = [len(set(row)) for row in outputs["ours"][:, PROMPT:].tolist()]
        shape = {"sparse_calls": f"{sparse_share:.2f}", "distinct": f"{sum(distinct) / batch:.0f}"}
        for baseline in list(timings)[1:]:
            same = (outputs["ours"][:, PROMPT:] == outputs[baseline][:, PROMPT:]).float().mean().item()
            shape["same_tokens"] = f"{same:.3f}"
            part = self.part if baseline == DENSE else "stock"
            self.record(part, batch, timings["ours"], "s", baseline, timings[baseline], shape)
        first = [
            Timing(tuple(timed(runs[name], 1, self.device) for _ in range(2 * self.rounds))) for name in runs
        ]
        self.record("first", batch, first[0], "s", DENSE, first[1], {})
        if source is not None:
            spent = [self.millijoules(runs[name], batch, source) for name in ("ours", DENSE)]
            if None not in spent:
                self.record("energy", batch, spent[0], "mJ", DENSE, spent[1], {})

    def millijoules(self, run: Callable[[int], Tensor], batch: int, source: PowerSource) -> float | None:
        """Per new token, of whole calls."""
        new = FIRST + self.new
        spent = energy_of(lambda: run(new), source, wait=torch.cuda.synchronize)
        return None if spent is None else 1e3 * spent.joules / (batch * new)

    def record(
        self,
        part: str,
        batch: int,
        ours: Timing | float,
        unit: str,
        baseline: str,
        theirs: Timing | float,
        more: dict[str, str],
    ) -> None:
        config = self.dense.config
        self.records.append(
            make_record(
                f"generation/{part}",
                ours,
                unit=unit,
                baseline=baseline,
                baseline_timing=theirs,
                shape={
                    "M": batch,
                    "prompt": PROMPT,
                    "new": self.new,
                    "D": config.hidden_size,
                    "H": config.intermediate_size,
                    "layers": config.num_hidden_layers,
                    "dtype": str(self.dense.dtype).removeprefix("torch."),
                    **more,
                },
                sparsity={"nnz": self.nnz},
                device=self.device,
            )
        )
        values = [1e3 * t.median if isinstance(t, Timing) else t for t in (theirs, ours)]
        console.print(
            f"{part:9} batch {batch:4}: {baseline:28} {values[0]:8.3f} -> {values[1]:8.3f} "
            f"{'ms' if isinstance(ours, Timing) else unit}  {values[0] / values[1]:.2f}x  "
            + ", ".join(f"{name} {value}" for name, value in more.items()),
            highlight=False,
        )


CHILD = """
import sys, time
import torch, transformers
import twell.hf
class Streamer(transformers.generation.streamers.BaseStreamer):
    seen = 0
    def put(self, value):
        self.seen += 1
        if self.seen == 2:
            print(time.time(), flush=True)
    def end(self): pass
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).cuda().eval()
ids = torch.randint(3, 30000, (1, 128), device="cuda")
model.generate(ids, max_new_tokens=32, do_sample=False, eos_token_id=[], pad_token_id=0, streamer=Streamer())
"""


def start(bench: Bench) -> None:
    """Both starts find the checkpoint in memory, as files just written are."""
    from time import time

    with tempfile.TemporaryDirectory() as folder:
        bench.sparse.save_pretrained(folder)
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        seconds = []
        for _ in range(2):
            began = time()
            child = [sys.executable, "-c", CHILD, folder]
            done = subprocess.run(child, env=os.environ | caches, capture_output=True, text=True, check=True)
            seconds.append(float(done.stdout.split()[-1]) - began)
    bench.record("start", 1, seconds[1], "s", "empty caches", seconds[0], {})


def from_run(folder: Path, text: Path) -> tuple[nn.Module, nn.Module, float, Callable[[int], Tensor]]:
    """A trained model, a stock one with its weights, its active neurons, and prompts [B, PROMPT] from evenly
    spread places of the last fifth of a text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from twell.evaluation import evaluate_windows, load_model

    sparse, tokenizer = load_model(str(folder), dtype="bfloat16", device="cuda")
    names = LlamaConfig().to_dict().keys() & sparse.config.to_dict().keys()
    names -= {"model_type", "architectures", "hidden_act", "transformers_version"}
    config = LlamaConfig(**{name: getattr(sparse.config, name) for name in names}, hidden_act="relu")
    dense = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    dense.load_state_dict(sparse.state_dict())
    unseen = text.read_text()
    tokens = tokenizer(unseen[round(len(unseen) * 0.8) :], add_special_tokens=False).input_ids

    def prompts(batch: int) -> Tensor:
        apart = (len(tokens) - PROMPT) // batch
        return torch.tensor([tokens[i * apart : i * apart + PROMPT] for i in range(batch)], device="cuda")

    active = evaluate_windows(sparse, prompts(64).tolist(), batch=16).l0
    return dense, sparse, sum(active) / len(active), prompts


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--layers", type=int, default=38)
    parser.add_argument(
        "--stock", nargs="*", choices=list(LOOPS), default=list(LOOPS), help="transformers' loops"
    )
    parser.add_argument("--start", action="store_true", help="time the start of processes, too")
    parser.add_argument("--run", type=Path, help="folder of a training run, or of a model")
    parser.add_argument("--text", type=Path, help="what its prompts are from")
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
    if options.run is not None:
        dense, sparse, nnz, prompts = from_run(options.run, options.text)
    else:
        dense, sparse = models(setting, options.layers)
        nnz = float(setting.nnz[0])

        def prompts(batch: int) -> Tensor:
            return torch.randint(3, dense.config.vocab_size, (batch, PROMPT), device=dense.device)

    accelerate_(dense)
    console.print(f"built in {perf_counter() - began:.1f} s", highlight=False)
    part = "captured" if options.run is None else "text"
    bench = Bench(dense, sparse, part, nnz, options.tiny)
    source = power_source(dense.device)
    if isinstance(source, str):
        console.print(source, highlight=False)
        source = None
    for batch in options.batch:
        stock = [LOOPS[name] for name in options.stock] if batch == 1 and options.run is None else []
        bench.compare(prompts(batch), stock, source if options.run is None else None)
        save(bench.records, options.out, options.commit)
        for model in (dense, sparse):
            model.__dict__.pop("_twell_steps", None)  # the next batch needs the memory of its caches
        gc.collect()
    if options.start:
        start(bench)
        save(bench.records, options.out, options.commit)


if __name__ == "__main__":
    main()
