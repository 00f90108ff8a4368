"""Dense against sparse feed-forward inference on a GPU; writes benchmarks/results/ffn_inference.jsonl.

bf16, skewed synthetic gates (30% dead neurons, log-normal firing rates), D 2048, H 5632 and other shapes:

    prefill   many tokens, eager calls, dense and ours interleaved
    decode    few tokens, CUDA graphs over enough layers that weights are cold in L2
    graphs    numbers of tokens in between, in CUDA graphs
    plain     blocks without a gate, from few to all active: where the block path stops paying
    kernels   each kernel of the block path alone: TFLOP/s against the GPU's own matmul in the same run
    traces    recorded activations of real text (--traces DIRECTORY): up and down on those active sets

Outputs are compared with float32 in the same run. Run it on an idle GPU:

    python benchmarks/ffn_inference.py [--only SECTION ...] [--quick] [--commit HASH] [--out FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from _ffn import CHECKED, console, layer, measured_nnz, save, shape_of, tokens
from twell import Plan, ffn, reference
from twell.activations import Activation
from twell.kernels.gpu.block_launches import BlockLaunches
from twell.kernels.gpu.operands import prepare
from twell.measure import Record, Timing, compare, make_record
from twell.measure.ffn import BASELINE, COMPILED, stock_dense
from twell.problem import FfnArgs
from twell.synthetic import load_trace

RESULTS = Path(__file__).parent / "results" / "ffn_inference.jsonl"
HIDDEN, NEURONS = 2048, 5632
ALL = NEURONS
NNZ = (0, 12, 24, 39, 64, 128, 512, ALL)
PREFILL, DECODE = (1024, 4096, 8192, 16384, 65536, 131072), (1, 8, 32, 64)
GRAPHS = (256, 1024, 2048, 4096)
SHAPES = ((1024, 4096), (4096, 11008), (5120, 14336))
PLAIN, PLAIN_TOKENS = ((2048, 8192), (3072, 9216)), (2048, 8192)
PLAIN_SHARES = (0.01, 0.05, 0.1, 0.2, 0.4, 1.0)  # of the neurons, active per token
COLD_BYTES = 1 << 30  # weights of the decode graphs: twenty times the L2 cache


class Bench:
    """Collects records; `quick` takes few repetitions."""

    def __init__(self, quick: bool) -> None:
        self.records: list[Record] = []
        self.large, self.small = (5, 11) if quick else (15, 25)

    def add(self, what: str, measured: Timing | float, *, unit: str = "s", **fields: object) -> Record:
        record = make_record(
            f"ffn_inference/{what}", measured, unit=unit, device="cuda", repository=__file__, **fields
        )
        self.records.append(record)
        return record


def shuffled(weights: tuple[Tensor, Tensor, Tensor | None], copies: int) -> list[tuple[Tensor, ...]]:
    """Layers with the same neurons in other orders; caches see them as different layers."""
    up, down, gate = weights
    orders = [torch.randperm(up.shape[0], device="cuda") for _ in range(copies)]
    return [(up[o], down.mT[o].mT, gate[o]) for o in orders]


def error(y: Tensor, x: Tensor, weights: tuple[Tensor, Tensor, Tensor | None]) -> float:
    """Relative error of the first and last rows against float32."""
    rows = torch.arange(x.shape[0], device="cuda")
    rows = torch.cat([rows[:CHECKED], rows[-CHECKED:]]).unique()
    up, down, gate = weights
    return reference.relative_error(y[rows], reference.ffn(x[rows], up, down, gate, dtype=torch.float32).y)


def show(record: Record) -> None:
    shape = record.shape
    console.print(
        f"{record.what:32s} M {shape['M']:6d} D {shape['D']} H {shape['H']} gated={shape['gated']} "
        f"nnz {record.sparsity.get('nnz', 0):7.1f}: {record.baseline_value * 1e6:9.1f} -> "
        f"{record.value * 1e6:9.1f} us  {record.ratio:.2f}x  error {record.error or 0:.1e}"
    )


def prefill(bench: Bench) -> None:
    stream = tokens(max(PREFILL), HIDDEN)
    compiled = torch.compile(stock_dense, fullgraph=True, dynamic=False)
    for nnz in NNZ:
        weights = layer(HIDDEN, NEURONS, nnz)
        for count in PREFILL:
            plans: dict[str, Plan | None] = {"auto": None, "block": Plan(path="block")}
            if 0 < nnz <= 64 and count in (16384, 65536):
                plans["row"] = Plan(path="row")
            extra = {COMPILED: compiled} if (nnz, count) == (24, 65536) else {}
            measure(bench, "prefill", stream[:count], weights, nnz, plans, extra)
    weights = layer(HIDDEN, NEURONS, 24, gated=False)
    measure(bench, "prefill", stream[:65536], weights, 24, {"auto": None}, {})
    for hidden, neurons in SHAPES:
        for share in (0.005, 0.02):
            weights = layer(hidden, neurons, share * neurons)
            measure(bench, "prefill", tokens(16384, hidden), weights, share * neurons, {"auto": None}, {})


def plain(bench: Bench) -> None:
    for hidden, neurons in PLAIN:
        for share in PLAIN_SHARES:
            weights = layer(hidden, neurons, share * neurons, gated=False)
            for count in PLAIN_TOKENS:
                x = tokens(count, hidden)
                first = len(bench.records)
                measure(bench, "plain", x, weights, share * neurons, {"block": Plan(path="block")}, {})
                active = (x @ weights[0].mT > 0).view(-1, 128, neurons).any(1)
                union = active.float().mean().item()
                bench.records[first:] = [
                    replace(record, sparsity=record.sparsity | {"union": union})
                    for record in bench.records[first:]
                ]


def measure(
    bench: Bench,
    section: str,
    x: Tensor,
    weights: tuple[Tensor, Tensor, Tensor | None],
    nnz: float,
    plans: dict[str, Plan | None],
    extra: dict[str, Callable[..., Tensor]],
) -> None:
    """Time eager calls of dense and ours on the same operands, interleaved."""
    up, down, gate = weights
    stock_down = down.contiguous()
    candidates = {BASELINE: lambda: stock_dense(x, up, stock_down, gate)}
    candidates |= {
        name: (lambda fn=function: fn(x, up, stock_down, gate)) for name, function in extra.items()
    }
    candidates |= {name: (lambda p=plan: ffn(x, up, down, gate, plan=p)) for name, plan in plans.items()}
    # Short calls follow each other, as layers do, so that the host runs ahead of the GPU.
    large = x.shape[0] >= 16384
    timings = compare(
        candidates,
        device="cuda",
        warmup=3,
        repetitions=bench.large if large else bench.small,
        calls_per_sample=1 if large else 10,
    )
    shape = shape_of(x.shape[0], *reversed(up.shape), gate is not None)
    for name, timing in timings.items():
        if name != BASELINE:
            record = bench.add(
                f"{section}/{name.removeprefix('dense ')}",
                timing,
                baseline=BASELINE,
                baseline_timing=timings[BASELINE],
                shape=shape,
                sparsity={"nnz": measured_nnz(x, weights), "wanted_nnz": float(nnz)},
                error=error(candidates[name](), x, weights),
            )
            show(record)


def decode(bench: Bench) -> None:
    for nnz in NNZ:
        measure_graphs(bench, "decode", HIDDEN, NEURONS, nnz, DECODE)
    for hidden, neurons in SHAPES:
        for share in (0.005, 0.02, 1.0):
            measure_graphs(bench, "decode", hidden, neurons, share * neurons, DECODE)


def graphs(bench: Bench) -> None:
    for nnz in (24, 64, 512, ALL):
        measure_graphs(bench, "graphs", HIDDEN, NEURONS, nnz, GRAPHS)


def measure_graphs(
    bench: Bench, section: str, hidden: int, neurons: int, nnz: float, counts: tuple[int, ...]
) -> None:
    """Time CUDA graphs of a stack of layers, dense and ours; times are per layer."""
    layers = -(-COLD_BYTES // (3 * hidden * neurons * 2))
    stack = shuffled(layer(hidden, neurons, nnz), layers)
    stock = [(up, down.contiguous(), gate) for up, down, gate in stack]
    for count in counts:
        x = tokens(count, hidden)
        runs = {BASELINE: [lambda x=x, w=w: stock_dense(x, *w) for w in stock]}
        for name, plan in {"auto": None, "sparse": Plan(path="block")}.items():
            runs[name] = [lambda x=x, w=w, p=plan: ffn(x, *w, plan=p) for w in stack]
        captured = {name: graphed(calls) for name, calls in runs.items()}
        replays = {name: replay for name, (replay, _) in captured.items()}
        timings = compare(replays, device="cuda", warmup=2, repetitions=bench.small, calls_per_sample=1)
        per_layer = {n: Timing(tuple(s / layers for s in t.samples)) for n, t in timings.items()}
        for name in ("auto", "sparse"):
            record = bench.add(
                f"{section}/{name}",
                per_layer[name],
                baseline=f"{BASELINE}, CUDA graph",
                baseline_timing=per_layer[BASELINE],
                shape=shape_of(count, hidden, neurons) | {"layers": layers},
                sparsity={"nnz": measured_nnz(x, stack[-1]), "wanted_nnz": float(nnz)},
                error=error(captured[name][1], x, stack[-1]),
            )
            show(record)


def graphed(calls: list[Callable[[], Tensor]]) -> tuple[Callable[[], None], Tensor]:
    """The replay of one CUDA graph of all calls, and the tensor that holds its last result.

    Warm-up calls compile kernels and let automatic plans learn.
    """
    for _ in range(3):
        for call in calls:
            call()
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            last = call()
    return graph.replay, last


def kernels(bench: Bench) -> None:
    count = 65536
    x, y = tokens(count, HIDDEN), torch.empty(count, HIDDEN, device="cuda", dtype=torch.bfloat16)
    for nnz in (12, 24, 64, ALL):
        up, down, gate = layer(HIDDEN, NEURONS, nnz)
        stages = stages_of(x, up, down, gate)
        stages.select(x), stages.list(count), stages.up(x), stages.down(y)
        union = stages.workspace.counts.tensor().float().mean().item()
        timings = compare(
            {
                "matmul": lambda g=gate: x @ g.mT,
                "select": lambda s=stages: s.select(x),
                "select and list": lambda s=stages: (s.select(x), s.list(count)),
                "up": lambda s=stages: s.up(x),
                "down": lambda s=stages: s.down(y),
            },
            device="cuda",
            repetitions=bench.large,
            calls_per_sample=1,
        )
        matmul = timings["matmul"].median
        dense_flops, sparse_flops = 2 * count * HIDDEN * NEURONS, 2 * count * HIDDEN * union
        for name, timing in timings.items():
            flops = sparse_flops if name in ("up", "down") else dense_flops
            rate = flops / timing.median * 1e-12
            bench.add(
                f"kernels/{name.replace(' and ', '_')}",
                timing,
                baseline="x @ gate.T",
                baseline_timing=timings["matmul"],
                shape=shape_of(count, HIDDEN, NEURONS),
                sparsity={"nnz": float(nnz), "union": union, "tflops": rate},
            )
            ceiling = dense_flops / matmul * 1e-12
            console.print(f"nnz {nnz} union {union:.0f} {name:16s} {timing.median * 1e3:.3f} ms "
                          f"{rate:.0f} TFLOP/s, {rate / ceiling:.0%} of matmul")  # fmt: skip


def stages_of(x: Tensor, up: Tensor, down: Tensor, gate: Tensor) -> BlockLaunches:
    operands = prepare(FfnArgs(x, up, down, gate, None, None, None, Activation("relu")))
    return BlockLaunches(operands, x.shape[0], 0)


def traces(bench: Bench, directory: Path) -> None:
    """Time list, up and down on recorded active sets, against one warp per token at 9 TB/s."""
    up, down, gate = layer(HIDDEN, NEURONS, 24)
    for path in sorted(directory.glob("trace_*.npz")):
        trace = load_trace(path, NEURONS)
        count = trace.tokens
        x, y = tokens(count, HIDDEN), torch.empty(count, HIDDEN, device="cuda", dtype=torch.bfloat16)
        stages = stages_of(x, up, down, gate)
        workspace, rows = stages.workspace, stages.tiles.rows
        fired = trace.mask().cuda().view(-1, rows, NEURONS)
        activations = torch.where(fired, torch.rand(fired.shape, device="cuda"), 0.0).bfloat16()
        workspace.values.tensor().copy_(activations.transpose(1, 2))
        workspace.active.tensor().copy_(fired.any(1))

        def finish(s: BlockLaunches = stages, x: Tensor = x, y: Tensor = y) -> None:
            s.workspace.counter.tensor().zero_()
            s.list(x.shape[0])
            s.up(x)
            s.down(y)

        replay, _ = graphed([lambda f=finish, y=y: (f(), y)[1]])  # kernels, without the host's launches
        timing = compare({"ours": replay}, device="cuda", repetitions=bench.large, calls_per_sample=1)["ours"]
        nnz = trace.mean_nnz()
        bound = nnz * count * 2 * HIDDEN * 2 / 9e12
        part = slice(count - CHECKED, count)
        hidden = activations.view(count, NEURONS)[part].float() * (x[part].float() @ up.float().mT)
        exact = hidden @ down.float().mT
        record = bench.add(
            f"traces/{path.stem}",
            timing,
            baseline="one warp per token at 9 TB/s of L2 traffic",
            baseline_timing=bound,
            shape=shape_of(count, HIDDEN, NEURONS),
            sparsity={"nnz": nnz, "union": workspace.counts.tensor().float().mean().item()},
            error=reference.relative_error(y[part], exact),
        )
        show(record)


def sections(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[Bench], None]]]:
    yield "kernels", kernels
    yield "prefill", prefill
    yield "decode", decode
    yield "graphs", graphs
    yield "plain", plain
    if options.traces:
        yield "traces", lambda bench: traces(bench, options.traces)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="sections to run; others keep their records")
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--commit", help="commit to write where git is not available")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--traces", type=Path, help="directory with trace_*.npz")
    options = parser.parse_args()
    bench = Bench(options.quick)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, run in sections(options):
            if not options.only or name in options.only:
                run(bench)
                # After every section, so that an interrupted run keeps its records.
                save(bench.records, options.out, options.commit)


if __name__ == "__main__":
    main()
