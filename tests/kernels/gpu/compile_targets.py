"""Compiles what the launchers launch, for GPUs that are not there; run by test_compile.py in its own process.

Calls run on CPU tensors as far as their launches, with a `Gpu` in place of the device's own. Prints one line
per kernel: name, shared memory, spilled bytes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

from twell import Plan, accumulate_in_place, ffn, ffn_with_stats
from twell.activations import Activation
from twell.backends import BACKENDS
from twell.kernels.gpu import launch as launching
from twell.kernels.gpu import sizes
from twell.kernels.gpu import token as token_kernels
from twell.kernels.gpu import training as training_step
from twell.kernels.gpu.dense import fused_hidden
from twell.kernels.gpu.device import Gpu
from twell.kernels.gpu.row import run as rows

from ...backends import added

HIDDEN, NEURONS = 2048, 5632
MANY = 2048  # tokens that give every processor large tiles
# With the shared memory that one program may use. Hopper's own kernels take 16-bit types only.
GPUS = {
    "80": Gpu(name="A100", capability=(8, 0), processors=108, shared_memory=166_912),
    "89": Gpu(name="L40S", capability=(8, 9), processors=142, shared_memory=101_376),
    "90": Gpu(name="H100", capability=(9, 0), processors=132, shared_memory=232_448),
    "100": Gpu(name="B200", capability=(10, 0), processors=148, shared_memory=232_448),
    "120": Gpu(name="RTX PRO 6000", capability=(12, 0), processors=188, shared_memory=101_376),
}


class Driver:
    """What Triton asks its driver for when it compiles, and nothing that takes a device."""

    def __init__(self, gpu: Gpu) -> None:
        self._target = GPUTarget("cuda", 10 * gpu.capability[0] + gpu.capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, *given) -> None:
        """A compiled kernel makes its launcher at once."""


class Compiler:
    """Takes the place of `launch`: compiles, prints, and launches nothing."""

    def __init__(self) -> None:
        self._seen: set[tuple] = set()

    def __call__(self, kind, kernel, grid, arguments, constants, **options) -> None:
        real = [launching.through_triton(argument) for argument in arguments]
        self.compile(kernel, grid, real, constants | options)

    def compile(self, kernel, grid, arguments, constants) -> None:
        kinds = [getattr(argument, "dtype", None) for argument in arguments]
        key = kernel.__name__, repr(sorted(constants.items(), key=str)), repr(kinds)
        if key not in self._seen:
            self._seen.add(key)
            compiled = kernel.warmup(*arguments, grid=grid, **constants)
            print(f"{kernel.__name__} | {compiled.metadata.shared} | {spilled_bytes(compiled)}", flush=True)


class FrontDoor:
    """Takes the place of a kernel that is launched as Triton's documentation does."""

    def __init__(self, kernel, compiler: Compiler) -> None:
        self._kernel, self._compiler = kernel, compiler

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self._compiler.compile(
            self._kernel, grid, arguments, constants
        )


def spilled_bytes(kernel) -> int:
    """Stack frame of the machine code, where spilled registers live, from the assembler's own report."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return sum(map(int, re.findall(r"STACK:(\d+)", report.stdout + report.stderr)))


@contextmanager
def pretended(gpu: Gpu):
    """Calls of backend "compiled" compile for `gpu`."""
    triton.runtime.driver.set_active(Driver(gpu))
    real, compiler = launching.launch, Compiler()
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("twell.kernels.gpu"):
                if getattr(module, "launch", None) is real:
                    stack.enter_context(mock.patch.object(module, "launch", compiler))
                if hasattr(module, "gpu_of"):
                    stack.enter_context(mock.patch.object(module, "gpu_of", return_value=gpu))
        for kernel in ("pack_rows", "apply_rows"):
            stack.enter_context(mock.patch.object(rows, kernel, FrontDoor(getattr(rows, kernel), compiler)))
        backend = replace(BACKENDS["gpu"], name="compiled", refusal=lambda site: None)
        stack.enter_context(added(backend))
        yield


def call(
    tokens: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    gated: bool = True,
    biased: bool = False,
    activation: str = "relu",
    path: str = "block",
    rows: int = 0,
    recorded: bool = False,
    trained: bool = False,
    added_up: bool = False,
    hidden: int = HIDDEN,
    neurons: int = NEURONS,
) -> None:
    """added_up: the step adds 16-bit gradients to float32 ones."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype).requires_grad_(trained)

    operands = {"x": empty(tokens, hidden), "up": empty(neurons, hidden)}
    operands["down"] = torch.empty(neurons, hidden, dtype=dtype).mT.requires_grad_(trained)
    if gated:
        operands["gate"] = empty(neurons, hidden)
    if biased:
        operands |= {"up_bias": empty(neurons), "down_bias": empty(hidden)}
        if gated:
            operands["gate_bias"] = empty(neurons)
    plan = Plan(path=path, block_rows=rows, backend="compiled")
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(trained))
        if added_up:
            for operand in operands.values():
                operand.grad_dtype = torch.float32
                operand.grad = torch.empty_like(operand, dtype=torch.float32)
            stack.enter_context(accumulate_in_place())
        if recorded:
            y, stats = ffn_with_stats(**operands, activation=activation, plan=plan)
            loss = y.float().sum() + stats.l1
        else:
            loss = ffn(**operands, activation=activation, plan=plan).float().sum()
        if trained:
            loss.backward()


def hopper() -> None:
    """Hopper's own kernels."""
    call(MANY)
    for tokens, hidden, biased in ((1, 2048, False), (32, 4096, True), (64, 2048, False)):
        call(tokens, hidden=hidden, biased=biased, activation="relu2" if biased else "relu")
    for tokens in (1, 64, MANY):
        call(tokens, hidden=4096 if tokens == 64 else HIDDEN, activation="drelu")
    call(MANY, trained=True, biased=True, recorded=True, rows=64)
    with mock.patch.object(sizes, "ONE_ROUND_BYTES", 0):
        call(MANY, trained=True, biased=True, activation="relu2")
        with mock.patch.object(training_step, "_expects_overflow", return_value=False):
            call(MANY, trained=True, added_up=True)
            call(MANY, trained=True, activation="drelu")


def portable() -> None:
    """Kernels for GPUs before and after Hopper; D is no multiple of 64, which Hopper's would want."""
    hidden = HIDDEN + 16
    call(MANY, hidden=hidden, recorded=True, biased=True)
    call(MANY, hidden=hidden, gated=False, biased=True)
    for tokens in (1, 64):
        call(tokens, hidden=hidden)
    call(MANY, hidden=hidden, path="row")
    call(MANY, hidden=hidden, path="row", activation="fatrelu(0.5)", neurons=NEURONS + 16)
    for tokens, path in ((1, "block"), (64, "block"), (MANY, "block"), (MANY, "row")):
        call(tokens, hidden=hidden, path=path, activation="drelu")


def training() -> None:
    with mock.patch.object(sizes, "ONE_ROUND_BYTES", 0):
        call(MANY, hidden=HIDDEN + 16, trained=True, biased=True, recorded=True)
    call(MANY, hidden=HIDDEN + 16, trained=True, added_up=True)
    call(MANY, hidden=HIDDEN + 16, trained=True, activation="drelu")


def generation() -> None:
    """What a token passes around its blocks; 128 keys and queries of 64 features, and 8 of 128."""
    for dtype, batch, heads, key_heads, size, columns in (
        (torch.bfloat16, 1, 32, 32, 64, 256),
        (torch.bfloat16, 8, 32, 8, 128, 1024),
        (torch.float32, 2, 4, 1, 96, 1024),
    ):

        def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype)

        x = empty(batch, HIDDEN)
        token_kernels.add_and_norm(x, empty(batch, HIDDEN), empty(HIDDEN), 1e-6)
        outputs = (heads + 2 * key_heads) * size
        projected = token_kernels.linear_of_few(x, empty(outputs, HIDDEN), empty(outputs))
        cache = empty(batch, key_heads, columns, size)
        column = empty(1, dtype=torch.int64)
        turns = empty(batch, size)
        token_kernels.attend(projected, turns, turns, empty(batch, columns), column, cache, cache, 0.1)


def dense() -> None:
    """What lies between the products of dense calls."""
    pre, up = (torch.empty(MANY, NEURONS, dtype=torch.bfloat16) for _ in range(2))
    for spec, gated in (("relu", True), ("drelu", True), ("relu2", False)):
        fused_hidden(Activation.parse(spec), pre.dtype, gated)(pre, up if gated else None)


CALLS = {"90": (portable, dense), "hopper": (hopper, generation)}
CALLS |= dict.fromkeys(("80", "89", "100", "120"), (portable, training, generation, dense))


def gpu_of_target(target: str) -> Gpu:
    return GPUS["90" if target == "hopper" else target]


def main(target: str) -> None:
    with pretended(gpu_of_target(target)):
        for calls in CALLS[target]:
            calls()


if __name__ == "__main__":
    main(sys.argv[1])
