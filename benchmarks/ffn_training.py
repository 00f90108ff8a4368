"""Dense against sparse feed-forward training; writes benchmarks/results/ffn_training.jsonl.

bf16, D 2048, H 5632, gated, skewed synthetic gates (30% dead neurons, log-normal firing rates):

    times    GPU time of forward, backward and both, with the host running ahead, dense and ours interleaved;
             for the fewest tokens also the host's time to launch
    memory   bytes that the forward keeps for the backward, and the peak of both

x and all three weights need gradients. Outputs and gradients are compared with float32 in the same run. Run
it on an idle GPU:

    python benchmarks/ffn_training.py [--only SECTION ...] [--quick] [--commit HASH] [--out FILE]

--device cpu measures float32, D 1024, H 4096, into a file of its own. To try the script with small shapes and
without a GPU:

    python benchmarks/ffn_training.py --device cpu --tiny --out FILE
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from _ffn import Weights, console, layer, measured_nnz, save, shape_of, tokens
from twell import Plan, ffn, reference
from twell.measure import Record, Timing, compare, make_record, peak_bytes, saved_bytes
from twell.measure.ffn import BASELINE, COMPILED, stock_dense

RESULTS = Path(__file__).parent / "results" / "ffn_training.jsonl"
CPU_RESULTS = RESULTS.with_name("ffn_training_cpu.jsonl")
OPERANDS = ("x", "up", "down", "gate")
LONG = 65536  # from this many tokens on, fewer repetitions are enough
SETTLING = 40  # training calls after which automatic plans have read how active the layer is
CHUNK = 1024  # tokens that the oracle computes at a time


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is measured: memory and (nnz 24) compiled dense at `tokens[1]`, errors at `tokens[0]`."""

    hidden: int
    neurons: int
    dtype: torch.dtype
    nnz: tuple[int, ...]
    tokens: tuple[int, ...]
    plan: Plan
    compiler: str

    @property
    def memory_nnz(self) -> tuple[int, int]:
        return 24, self.nnz[-1]


FULL = Setting(
    hidden=2048,
    neurons=5632,
    dtype=torch.bfloat16,
    nnz=(12, 24, 39, 64, 256, 2800),
    tokens=(4096, 16384, 65536),
    plan=Plan(path="block"),
    compiler="inductor",
)
CPU = Setting(
    hidden=1024,
    neurons=4096,
    dtype=torch.float32,
    nnz=(12, 41, 123, 410, 1229),  # 0.3 to 30%
    tokens=(512, 2048),
    plan=Plan(path="row"),
    compiler="inductor",
)
TINY = Setting(
    hidden=64,
    neurons=256,
    dtype=torch.float32,
    nnz=(4, 24, 100),
    tokens=(32, 64, 128),
    plan=Plan(path="auto"),
    compiler="aot_eager",
)


class Step:
    """Forward and backward of one candidate; each call records when its two parts began and ended."""

    def __init__(self, function: Callable[..., Tensor], operands: tuple[Tensor, ...], grad_y: Tensor) -> None:
        self.function, self.operands, self.grad_y = function, operands, grad_y
        self.marks: list[tuple[object, object, object]] = []

    def forward(self) -> Tensor:
        return self.function(*self.operands)

    def run(self) -> tuple[Tensor, ...]:
        """y and the gradients of the operands."""
        y = self.forward()
        return y.detach(), *torch.autograd.grad(y, self.operands, self.grad_y)

    def __call__(self) -> None:
        start = self._mark()
        y = self.forward()
        middle = self._mark()
        gradients = torch.autograd.grad(y, self.operands, self.grad_y)
        self.marks.append((start, middle, self._mark()))
        del y, gradients  # freed after the last mark

    def timings(self, last: int) -> dict[str, Timing]:
        """Times of the parts of the last calls; a GPU must have finished them."""
        marks = self.marks[-last:]
        return {
            "forward": Timing(tuple(self._seconds(a, b) for a, b, _ in marks)),
            "backward": Timing(tuple(self._seconds(b, c) for _, b, c in marks)),
            "total": Timing(tuple(self._seconds(a, c) for a, _, c in marks)),
        }

    def _mark(self) -> object:
        if not self.grad_y.is_cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: object, end: object) -> float:
        return start.elapsed_time(end) * 1e-3 if self.grad_y.is_cuda else end - start


class Bench:
    """Collects records; `quick` takes few repetitions."""

    def __init__(self, setting: Setting, device: str, quick: bool) -> None:
        self.setting, self.device, self.quick = setting, device, quick
        self.records: list[Record] = []
        self._weights: dict[int, Weights] = {}

    @cached_property
    def stream(self) -> Tensor:
        setting = self.setting
        return tokens(max(setting.tokens), setting.hidden, dtype=setting.dtype, device=self.device)

    @cached_property
    def grad_y(self) -> Tensor:
        return torch.randn_like(self.stream)

    @cached_property
    def compiled(self) -> Callable[..., Tensor]:
        return torch.compile(stock_dense, fullgraph=True, dynamic=False, backend=self.setting.compiler)

    def weights(self, nnz: int) -> Weights:
        """Cached: automatic plans recognise layers by their weights."""
        if nnz not in self._weights:
            setting = self.setting
            made = layer(setting.hidden, setting.neurons, nnz, dtype=setting.dtype, device=self.device)
            self._weights[nnz] = tuple(weight.requires_grad_() for weight in made)
        return self._weights[nnz]

    def repetitions(self, count: int) -> int:
        if self.device == "cpu":
            return 3 if self.quick else 7
        if self.quick:
            return 3 if count >= LONG else 5
        return 9 if count >= LONG else 15

    def steps(self, count: int, nnz: int, *, compiled: bool) -> dict[str, Step]:
        """The candidates, each with its own layout of `down`; the automatic plan has settled."""
        up, down, gate = self.weights(nnz)
        x = self.stream[:count].detach().requires_grad_()
        grad_y = self.grad_y[:count]
        stock = (x, up, down.detach().contiguous().requires_grad_(), gate)
        ours = (x, up, down, gate)
        plan = self.setting.plan
        steps = {BASELINE: Step(stock_dense, stock, grad_y)}
        if compiled:
            steps[COMPILED] = Step(self.compiled, stock, grad_y)
        steps["sparse"] = Step(lambda *operands: ffn(*operands, plan=plan), ours, grad_y)
        steps["auto"] = Step(ffn, ours, grad_y)
        for call in range(SETTLING if self.device != "cpu" else 2):
            steps["auto"].run()
            if call % 8 == 7:
                self.wait()  # readings arrive after their kernels
        return steps

    def wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def add(
        self,
        part: str,
        candidate: str,
        measured: Timing | float,
        baseline: Timing | float,
        step: Step,
        nnz: int,
        *,
        unit: str = "s",
        error: float | None = None,
        shape: dict[str, str] | None = None,
        more: dict[str, float] | None = None,
    ) -> None:
        x, *weights = step.operands
        setting = self.setting
        sizes = shape_of(x.shape[0], setting.hidden, setting.neurons, dtype=setting.dtype)
        record = make_record(
            f"ffn_training/{part}/{candidate.removeprefix('dense ')}",
            measured,
            unit=unit,
            baseline=BASELINE,
            baseline_timing=baseline,
            shape=sizes | (shape or {}),
            sparsity={"nnz": measured_nnz(x, tuple(weights)), "wanted_nnz": float(nnz)} | (more or {}),
            error=error,
            device=self.device,
            seed=0,
            repository=__file__,
        )
        self.records.append(record)
        show(record)


def show(record: Record) -> None:
    shape, scale, unit = record.shape, 1e6, "us"
    if record.unit != "s":
        scale, unit = 2**-20, "MiB"
    ratio = "" if record.ratio is None else f"{record.ratio:.2f}x"
    error = "" if record.error is None else f"error {record.error:.1e}"
    console.print(
        f"{record.what:32s} M {shape['M']:6d} D {shape['D']} H {shape['H']} "
        f"nnz {record.sparsity['nnz']:7.1f}: {record.baseline_value * scale:9.1f} -> "
        f"{record.value * scale:9.1f} {unit}  {ratio}  {error}"
    )


def times(bench: Bench) -> None:
    short, middle, *_ = bench.setting.tokens
    for nnz in bench.setting.nnz:
        for count in bench.setting.tokens:
            compiled = (count, nnz) == (middle, 24)
            measure_times(bench, count, nnz, compiled=compiled, checked=compiled or count == short)


def measure_times(bench: Bench, count: int, nnz: int, *, compiled: bool, checked: bool) -> None:
    """Time eager steps of all candidates, interleaved. checked: compare with the oracle."""
    steps = bench.steps(count, nnz, compiled=compiled)
    repetitions = bench.repetitions(count)
    # The steps time themselves; `compare` adds the order, the warm-up and the wait at the end. In training
    # the host runs ahead of the GPU, so launching is timed separately.
    compare(
        steps,
        device=bench.device,
        warmup=2,
        repetitions=repetitions,
        calls_per_sample=1,
        queued=bench.device != "cpu",
    )
    timings = {name: step.timings(repetitions) for name, step in steps.items()}
    if bench.device != "cpu" and count == bench.setting.tokens[0]:
        for name, step in steps.items():
            timings[name]["host"] = launch_times(step, repetitions)
    errors = errors_of(steps) if checked else {}
    for name, step in steps.items():
        if name == BASELINE:
            continue
        for part, timing in timings[name].items():
            found, dense = errors.get(name), errors.get(BASELINE)
            bench.add(
                part,
                name,
                timing,
                timings[BASELINE][part],
                step,
                nnz,
                error=max(found[of] for of in COMPARED[part]) if checked and part in COMPARED else None,
                more=error_entries(found, dense) if checked and part == "total" else None,
            )


def launch_times(step: Step, repetitions: int) -> Timing:
    """Host time to launch forward and backward on an idle GPU."""
    seconds = []
    for _ in range(repetitions):
        torch.cuda.synchronize()
        start = perf_counter()
        step.run()
        seconds.append(perf_counter() - start)
    return Timing(tuple(seconds))


COMPARED = {"forward": ("y",), "backward": OPERANDS, "total": ("y", *OPERANDS)}
"""A record's `error` is the largest of these: the output and the gradients by operand."""


def error_entries(found: dict[str, float], dense: dict[str, float]) -> dict[str, float]:
    """Each relative error, dense's own, and the largest ratio between them."""
    entries = {f"error_{of}": error for of, error in found.items()}
    entries |= {f"dense_error_{of}": error for of, error in dense.items()}
    ratios = [error / dense[of] for of, error in found.items() if dense[of]]
    return entries | {"error_over_dense": max(ratios)} if ratios else entries


def errors_of(steps: dict[str, Step]) -> dict[str, dict[str, float]]:
    """candidate -> relative error of y and of each gradient."""
    exact = exact_step(steps[BASELINE])
    return {
        name: {
            of: reference.relative_error(result, exact[of])
            for of, result in zip(("y", *OPERANDS), step.run(), strict=True)
        }
        for name, step in steps.items()
    }


def exact_step(step: Step) -> dict[str, Tensor]:
    """y and gradients in float32 (float64 for float32 operands), over all tokens."""
    x, *weights = step.operands
    dtype = torch.float64 if x.dtype == torch.float32 else torch.float32
    wide = [weight.detach().to(dtype).requires_grad_() for weight in weights]
    outputs, of_x, of_weights = [], [], [torch.zeros_like(weight) for weight in wide]
    for part, grad_y in zip(x.detach().split(CHUNK), step.grad_y.split(CHUNK), strict=True):
        part = part.to(dtype).requires_grad_()
        y = reference.ffn(part, *wide, dtype=dtype).y
        grad_part, *grad_weights = torch.autograd.grad(y, (part, *wide), grad_y.to(dtype))
        outputs.append(y.detach())
        of_x.append(grad_part)
        for total, grad in zip(of_weights, grad_weights, strict=True):
            total += grad
    return dict(zip(("y", *OPERANDS), (torch.cat(outputs), torch.cat(of_x), *of_weights), strict=True))


def memory(bench: Bench) -> None:
    count = bench.setting.tokens[1]
    for nnz in bench.setting.memory_nnz:
        steps = bench.steps(count, nnz, compiled=True)
        saved, peak = {}, {}
        for name, step in steps.items():
            for _ in range(2):  # lasting workspaces of libraries do not belong to a step
                step.run()
            saved[name] = saved_for_backward(step)
            peak[name] = peak_bytes(step.run, bench.device)
        for name, step in steps.items():
            if name != BASELINE:
                # "B" allows 0: a path that recomputes everything keeps nothing.
                bench.add("saved", name, saved[name], saved[BASELINE], step, nnz, unit="B")
                before = {"before": "weights, x, grad_y"}
                bench.add("peak", name, peak[name], peak[BASELINE], step, nnz, unit="bytes", shape=before)


def saved_for_backward(step: Step) -> int:
    """Bytes that the forward leaves allocated, without y, x and the weights.

    On a GPU the allocator's count, which misses nothing; on a CPU what autograd saved.
    """
    if not step.grad_y.is_cuda:
        return saved_bytes(step.forward, exclude=step.operands)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = step.forward()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before - y.untyped_storage().nbytes()


SECTIONS = {"times": times, "memory": memory}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="*", choices=SECTIONS, help="sections to run; others keep their records"
    )
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--commit", help="commit to write where git is not available")
    parser.add_argument("--out", type=Path, help="file for the records; default in benchmarks/results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small float32 shapes, to try the script")
    options = parser.parse_args(arguments)
    if options.tiny and options.out is None:
        parser.error("--tiny needs --out: its records are not results.")
    if options.tiny:
        torch.set_num_threads(1)  # too small for more
    torch.manual_seed(0)
    on_cpu = options.device == "cpu"
    out = options.out or (CPU_RESULTS if on_cpu else RESULTS)
    setting = TINY if options.tiny else CPU if on_cpu else FULL
    bench = Bench(setting, options.device, options.quick)
    for name, run in SECTIONS.items():
        if setting is CPU and run is memory:
            continue
        if not options.only or name in options.only:
            run(bench)
            # After every section, so that an interrupted run keeps its records.
            save(bench.records, out, options.commit)


if __name__ == "__main__":
    main()
