"""What users get with default settings; writes benchmarks/results/defaults.jsonl.

bf16, D 2048, H 5632, gated, skewed synthetic gates (30% dead neurons, log-normal firing rates):

    host          host time of a call on an idle GPU: sparse (with numbers of tokens seen before and new ones)
                  and dense, against three nn.Linear modules with relu and product
    forward       eager modules with an automatic plan, against those modules
    steps         forward and backward with an automatic plan, synchronised after every step
    prefill       a forward pass of a 24-layer Llama in transformers, against its stock twin
    generate      default `generate` of the same models, token by token
    checkpointed  training steps of 8 layers, compiled and checkpointed, against stock

Outputs are compared with dense in the same run. Run it on an idle GPU:

    python benchmarks/defaults.py [--only SECTION ...] [--quick] [--commit HASH] [--out FILE]

--device cpu measures host and forward of a small block (D 64, H 256, float32), into a file of its own.
--device cpu --tiny --out FILE tries the script with small shapes and without a GPU.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn

from _ffn import console, layer, save, shape_of, tokens
from _turns import Turns
from twell import Plan, SparseMLP, reference
from twell.measure import Record, Timing, compare, make_record
from twell.measure.models import ModelSize, build_pair

RESULTS = Path(__file__).parent / "results" / "defaults.jsonl"
CPU_RESULTS = RESULTS.with_name("defaults_cpu.jsonl")
MODULES = "nn.Linear modules, eager"
STOCK = "stock Llama, eager"
WARM = 3  # samples that do not count
STEPS = 6  # generation steps per turn
STOCK_COMPILED = "stock Llama, compiled and checkpointed"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is measured. vocabulary, layers, prompt and new_tokens belong to the models."""

    hidden: int = 2048
    neurons: int = 5632
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    few: tuple[int, ...] = (1, 8, 64)
    middle: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    unseen: int = 2048  # the largest new number of tokens
    nnz: tuple[int, ...] = (24, 64, 5632)
    steps: tuple[int, ...] = (1024, 2048, 4096, 16384)
    prefill: tuple[int, ...] = (1024, 2048, 4096)
    vocabulary: int = 32000
    layers: int = 24
    trained: tuple[int, int, int] = (8, 32, 1024)  # layers, sequences, tokens of each
    prompt: int = 128
    new_tokens: int = 32
    compiler: str = "inductor"


CPU = Setting(
    hidden=64,
    neurons=256,
    dtype=torch.float32,
    device="cpu",
    few=(1, 8),
    middle=(64,),
    unseen=64,
    nnz=(24, 256),
)
TINY = Setting(
    hidden=64,
    neurons=128,
    dtype=torch.float32,
    device="cpu",
    few=(1,),
    middle=(16,),
    unseen=16,
    nnz=(24, 128),
    steps=(16,),
    prefill=(16,),
    vocabulary=64,
    layers=2,
    trained=(2, 2, 8),
    prompt=4,
    new_tokens=4,
    compiler="aot_eager",
)


class StockMlp(nn.Module):
    """The block as transformers' LlamaMLP runs it, with relu."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        like = {"bias": False, "device": setting.device, "dtype": setting.dtype}
        self.gate_proj = nn.Linear(setting.hidden, setting.neurons, **like)
        self.up_proj = nn.Linear(setting.hidden, setting.neurons, **like)
        self.down_proj = nn.Linear(setting.neurons, setting.hidden, **like)
        self.act_fn = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Bench:
    """Collects records; `quick` takes few repetitions."""

    def __init__(self, setting: Setting, quick: bool) -> None:
        self.setting, self.quick = setting, quick
        self.records: list[Record] = []

    @property
    def repetitions(self) -> int:
        return 6 if self.quick else 30

    def modules(self, nnz: float) -> tuple[StockMlp, SparseMLP]:
        """The same weights in both."""
        s = self.setting
        up, down, gate = layer(s.hidden, s.neurons, nnz, dtype=s.dtype, device=s.device)
        weights = {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": down.contiguous()}
        stock, sparse = StockMlp(s), SparseMLP(s.hidden, s.neurons, device=s.device, dtype=s.dtype)
        stock.load_state_dict(weights)
        sparse.load_state_dict(weights)
        return stock, sparse

    def tokens(self, count: int) -> Tensor:
        return tokens(count, self.setting.hidden, dtype=self.setting.dtype, device=self.setting.device)

    def add(
        self,
        what: str,
        timing: Timing,
        baseline: str,
        baseline_timing: Timing,
        count: int,
        nnz: float,
        error: float | None = None,
        **more: float,
    ) -> None:
        s = self.setting
        record = make_record(
            f"defaults/{what}",
            timing,
            unit="s",
            baseline=baseline,
            baseline_timing=baseline_timing,
            shape=shape_of(count, s.hidden, s.neurons, dtype=s.dtype),
            sparsity={"wanted_nnz": float(nnz), **more},
            error=error,
            device=s.device,
            seed=0,
        )
        self.records.append(record)
        console.print(
            f"{what:28s} M {count:6d} nnz {nnz:5g}: {record.baseline_value * 1e6:10.1f} -> "
            f"{record.value * 1e6:10.1f} us  {record.ratio:.2f}x"
            + ("" if error is None else f"  difference {error:.1e}")
        )

    def wait(self) -> None:
        if self.setting.device == "cuda":
            torch.cuda.synchronize()


@torch.no_grad()
def host(bench: Bench) -> None:
    s = bench.setting
    stock, sparse = bench.modules(s.nnz[0])
    dense = SparseMLP(s.hidden, s.neurons, plan=Plan(path="dense"), device=s.device, dtype=s.dtype)
    dense.load_state_dict(stock.state_dict())
    named = SparseMLP(s.hidden, s.neurons, plan=Plan(path="block"), device=s.device, dtype=s.dtype)
    named.load_state_dict(stock.state_dict())
    candidates = {MODULES: stock, "auto": sparse, "dense": dense, "block": named}
    for count in (*s.few, *s.middle[:4]):
        xs = [bench.tokens(count)] * 10
        warm_up(sparse, xs[0], bench)
        timings = host_times(bench, {name: (module, xs) for name, module in candidates.items()})
        for name in list(candidates)[1:]:
            bench.add(f"host/{name}", timings[name], MODULES, timings[MODULES], count, s.nnz[0])
    # New numbers of tokens: every candidate meets each once.
    for low, high in ((2, s.few[-1]), (s.middle[0], s.unseen)):
        x = bench.tokens(high)
        unseen = [x[: low + int(more)] for more in torch.randperm(max(high - low, 0))]
        if len(unseen) > 5 * WARM:
            timings = host_times(bench, {MODULES: (stock, unseen), "block": (named, unseen)}, once=True)
            bench.add("host/unseen", timings["block"], MODULES, timings[MODULES], high, s.nnz[0])


def host_times(
    bench: Bench, candidates: Mapping[str, tuple[nn.Module, list[Tensor]]], once: bool = False
) -> dict[str, Timing]:
    """Host seconds per call, ten calls a sample, on an idle GPU. once: use every x once."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    rounds = bench.repetitions + WARM
    for turn in range(rounds):
        for name, (module, xs) in candidates.items():
            some = xs[5 * turn : 5 * turn + 5] if once else xs
            if not some:
                continue
            bench.wait()
            start = perf_counter()
            for x in some:
                module(x)
            seconds[name].append((perf_counter() - start) / len(some))
            bench.wait()
    return {name: Timing(tuple(found[WARM:])) for name, found in seconds.items()}


@torch.no_grad()
def warm_up(module: nn.Module, x: Tensor, bench: Bench) -> None:
    """Compile, and let automatic plans learn."""
    for _ in range(70):
        module(x)
    bench.wait()


@torch.no_grad()
def forward(bench: Bench) -> None:
    s = bench.setting
    for nnz in s.nnz:
        stock, sparse = bench.modules(nnz)
        for count in (*s.few, *s.middle):
            x = bench.tokens(count)
            warm_up(sparse, x, bench)
            timings = compare(
                {MODULES: lambda x=x, f=stock: f(x), "auto": lambda x=x, f=sparse: f(x)},
                device=s.device,
                repetitions=4 * bench.repetitions,
                calls_per_sample=10,
            )
            error = reference.relative_error(sparse(x), stock(x).float())
            bench.add("forward/auto", timings["auto"], MODULES, timings[MODULES], count, nnz, error)


def steps(bench: Bench) -> None:
    s = bench.setting
    for nnz in s.nnz[:2]:
        stock, sparse = bench.modules(nnz)
        for count in s.steps:
            x = bench.tokens(count).requires_grad_()
            grad_y = torch.randn_like(x)

            def step(module: nn.Module, x: Tensor = x, grad_y: Tensor = grad_y) -> tuple[Tensor, ...]:
                y = module(x)
                return torch.autograd.grad(y, (x, *module.parameters()), grad_y)

            candidates = {MODULES: stock, "auto": sparse}
            for module in candidates.values():
                for _ in range(40):
                    step(module)
            bench.wait()
            waited: dict[str, list[float]] = {name: [] for name in candidates}
            launched: dict[str, list[float]] = {name: [] for name in candidates}
            for _ in range(bench.repetitions):
                for name, module in candidates.items():
                    start = perf_counter()
                    step(module)
                    launched[name].append(perf_counter() - start)
                    bench.wait()
                    waited[name].append(perf_counter() - start)
            expected, found = step(stock), step(sparse)
            error = max(reference.relative_error(a, b.float()) for a, b in zip(found, expected, strict=True))
            for what, seconds in (("steps/waited", waited), ("steps/host", launched)):
                timings = {name: Timing(tuple(values)) for name, values in seconds.items()}
                bench.add(what, timings["auto"], MODULES, timings[MODULES], count, nnz, error)
            del x, grad_y, expected, found
            release(bench)


def release(bench: Bench) -> None:
    gc.collect()
    if bench.setting.device == "cuda":
        torch.cuda.empty_cache()


def models(setting: Setting, layers: int) -> tuple[nn.Module, nn.Module]:
    """A stock Llama with relu and ours with the same weights; about nnz[0] active neurons per layer."""
    size = ModelSize(
        hidden=setting.hidden,
        neurons=setting.neurons,
        layers=layers,
        vocabulary=setting.vocabulary,
        nnz=setting.nnz[0],
    )
    pair = build_pair(size, dtype=setting.dtype, device=setting.device)
    return pair.dense, pair.sparse


@torch.no_grad()
def prefill(bench: Bench) -> None:
    s = bench.setting
    stock, sparse = models(s, s.layers)
    for count in s.prefill:
        ids = torch.randint(s.vocabulary, (1, count), device=s.device)
        for _ in range(3):
            sparse(ids, use_cache=False)
        for _ in range(20):
            sparse.model(ids, use_cache=False)
        timings = compare(
            {
                STOCK: lambda ids=ids, model=stock.model: model(ids, use_cache=False),
                "auto": lambda ids=ids, model=sparse.model: model(ids, use_cache=False),
            },
            device=s.device,
            repetitions=bench.repetitions // 2,
            calls_per_sample=3,
        )
        found = sparse.model(ids, use_cache=False).last_hidden_state
        error = reference.relative_error(found, stock.model(ids, use_cache=False).last_hidden_state.float())
        bench.add("prefill/auto", timings["auto"], STOCK, timings[STOCK], count, s.nnz[0], error)
    del stock, sparse
    release(bench)


@torch.no_grad()
def generate(bench: Bench) -> None:
    from transformers import StoppingCriteria, StoppingCriteriaList

    s = bench.setting
    stock, sparse = models(s, s.layers)
    ids = torch.randint(s.vocabulary, (1, s.prompt), device=s.device)

    def run(model: nn.Module, turns: Turns | None = None) -> tuple[list[float], Tensor]:
        """Seconds of every step, and the tokens. Skips the first step of a turn: its caches are cold."""
        seconds: list[float] = []
        began, step = 0.0, 0

        class Clock(StoppingCriteria):
            def __call__(self, input_ids: Tensor, scores: Tensor, **options: object) -> Tensor:
                nonlocal began, step
                bench.wait()
                if step and step % STEPS != 1:
                    seconds.append(perf_counter() - began)
                if step % STEPS == 0 and turns is not None:
                    turns.next(model)
                step += 1
                began = perf_counter()
                return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

        if turns is not None:
            turns.wait(model)
        try:
            out = model.generate(
                ids,
                max_new_tokens=s.new_tokens,
                min_new_tokens=s.new_tokens,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([Clock()]),
            )
        finally:
            if turns is not None:
                turns.leave(model)
        return seconds, out

    run(stock)
    run(sparse)  # compiles
    seconds: dict[str, list[float]] = {"stock": [], "auto": []}
    outs: dict[str, Tensor] = {}
    models_by_name = {"stock": stock, "auto": sparse}
    with ThreadPoolExecutor(2) as threads:
        for turn in range(1 if bench.quick else 8):
            order = list(models_by_name)[:: -1 if turn % 2 else 1]
            turns = Turns([models_by_name[name] for name in order])
            running = {name: threads.submit(run, models_by_name[name], turns) for name in order}
            for name, result in running.items():
                found, outs[name] = result.result()
                seconds[name] += found
    timings = {name: Timing(tuple(values)) for name, values in seconds.items()}
    same = float((outs["stock"] == outs["auto"]).float().mean())
    worst = max(seconds["auto"]) / timings["auto"].median
    stock_worst = max(seconds["stock"]) / timings["stock"].median
    bench.add(
        "generate/auto",
        timings["auto"],
        STOCK,
        timings["stock"],
        1,
        s.nnz[0],
        same_tokens=same,
        slowest_over_median=worst,
        stock_slowest_over_median=stock_worst,
    )
    console.print(f"    same tokens {same:.2f}, slowest over median {worst:.2f}, stock {stock_worst:.2f}")
    del stock, sparse
    release(bench)


def checkpointed(bench: Bench) -> None:
    from twell.hf import compile_inside_checkpoints
    from twell.hf.layers import enable_checkpoints

    s = bench.setting
    layers, sequences, length = s.trained
    stock, sparse = models(s, layers)
    ids = torch.randint(s.vocabulary, (sequences, length), device=s.device)
    candidates: dict[str, Callable[[], Tensor]] = {}
    for name, model in ((STOCK_COMPILED, stock), ("auto", sparse)):
        model.train()
        model.config.use_cache = False
        enable_checkpoints(model)
        if name == "auto":
            compile_inside_checkpoints(model, backend=s.compiler)
            run = model.model
        else:
            run = torch.compile(model.model, backend=s.compiler)

        def step(run: Callable = run, model: nn.Module = model) -> Tensor:
            hidden = run(ids, use_cache=False).last_hidden_state
            loss = hidden.float().square().mean()
            loss.backward()
            model.zero_grad(set_to_none=True)
            return loss.detach()

        candidates[name] = step
        for _ in range(1 if s.device == "cpu" else 12):
            step()
    timings = compare(
        candidates, device=s.device, warmup=1, repetitions=max(bench.repetitions // 3, 1), calls_per_sample=1
    )
    losses = [step() for step in candidates.values()]
    error = abs(float(losses[1] - losses[0])) / float(losses[0])
    count = sequences * length
    bench.add(
        "checkpointed/auto", timings["auto"], STOCK_COMPILED, timings[STOCK_COMPILED], count, s.nnz[0], error
    )
    del stock, sparse, candidates
    release(bench)


SECTIONS = {
    "host": host,
    "forward": forward,
    "steps": steps,
    "prefill": prefill,
    "generate": generate,
    "checkpointed": checkpointed,
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="*", choices=list(SECTIONS), help="sections to run; others keep their records"
    )
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, on a CPU")
    parser.add_argument("--commit", help="commit to write where git is not available")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.tiny and options.out is None:
        parser.error("--tiny needs --out: its records are not results.")
    on_cpu = options.device == "cpu"
    setting = TINY if options.tiny else CPU if on_cpu else Setting()
    only = options.only or (["host", "forward"] if setting is CPU else list(SECTIONS))
    bench = Bench(setting, options.quick)
    torch.manual_seed(0)
    for name, section in SECTIONS.items():
        if name in only:
            section(bench)
            # After every section, so that an interrupted run keeps its records.
            save(bench.records, options.out or (CPU_RESULTS if on_cpu else RESULTS), options.commit)


if __name__ == "__main__":
    main()
