"""Compiles every kernel for GPUs that are not there; run by test_compile.py in a process of its own.

Prints one line per kernel and target: name, capability, shared memory, spilled bytes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from twell.kernels.gpu import down, few, lists, select, statistics, up

POINTERS = {
    "bias": "*bf16", "select_bias": "*bf16", "up_bias": "*bf16", "x": "*bf16", "w": "*bf16",
    "select": "*bf16", "up": "*bf16", "values": "*bf16", "hidden": "*bf16", "y": "*bf16",
    "active": "*u8", "lists": "*i32",
    "counts": "*i32", "neurons": "*i32", "work": "*i32", "counter": "*i32", "firing": "*i64", "sums": "*fp32",
}  # fmt: skip
NUMBERS = {
    "M": "i32", "H": "i32", "D": "i32", "E": "i32", "threshold": "fp32", "chunks_per_block": "i32",
    "padded": "i32", "blocks": "i32", "per_program": "i32", "tiles": "i32",
}  # fmt: skip


def compiled(function, constants, descriptors, capability, *, gluon=False, **options):
    """The compiled kernel; every pointer and size is taken as a multiple of 16, as in real models."""
    names = function.arg_names
    signature = {}
    for name in names:
        if name in constants:
            signature[name] = "constexpr"
        else:
            signature[name] = descriptors.get(name) or POINTERS.get(name) or NUMBERS[name]
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name in POINTERS or (name in NUMBERS and name not in ("M", "threshold", "blocks", "tiles"))
        if name not in constants
    }
    source_type = ASTSource
    if gluon:
        from triton.experimental.gluon import _runtime

        source_type = _runtime.GluonASTSource
    source = source_type(function, signature, values, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def spilled_bytes(kernel) -> int:
    """Stack frame of the machine code, where spilled registers live, from the assembler's own report."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return sum(map(int, re.findall(r"STACK:(\d+)", report.stdout + report.stderr)))


def portable(capability):
    stages = 4 if capability >= 90 else 3
    dot = {"PRECISION": "ieee"}
    plain = {"PLAIN": True, "SQUARE": False}
    block = {"ROWS": 128, "DEPTH": 64}
    x, w = "tensordesc<bf16[128, 64]>", "tensordesc<bf16[256, 64]>"
    hidden = "tensordesc<bf16[64, 128]>"
    yield (
        "select_blocks",
        compiled(
            select.select_blocks,
            {"HAS_BIAS": False, "NEURONS": 256, **plain, **block, **dot},
            {"x_desc": x, "w_desc": w},
            capability,
            num_warps=8,
            num_stages=stages,
        ),
    )
    yield (
        "list_active",
        compiled(lists.list_active, {"CHUNK": 128, "WIDTH": 8192}, {}, capability, num_warps=8),
    )
    yield (
        "up_blocks",
        compiled(
            up.up_blocks,
            {"HAS_BIAS": True, "CHUNK": 128, **block, **dot},
            {"x_desc": x},
            capability,
            num_warps=4,
            num_stages=stages,
        ),
    )
    for packed in (True, False):
        yield (
            f"down_blocks packed={packed}",
            compiled(
                down.down_blocks,
                {"HAS_BIAS": False, "PACKED": packed, "WIDTH": 128, **block, **dot},
                {"hidden_desc": hidden if packed else "*bf16"},
                capability,
                num_warps=4,
                num_stages=stages,
            ),
        )
    for rows, neurons, depth in ((1, 8, 2048), (16, 32, 256)):
        chained = capability >= 90
        yield f"few_select_up rows={rows}", compiled(
            few.few_select_up,
            {
                "HAS_SELECT_BIAS": False, "HAS_UP_BIAS": False, "GATED": True, "SQUARE": False,
                "NEURONS": neurons, "ROWS": rows, "DEPTH": depth, "CHAINED": chained, **dot,
            },
            {},
            capability,
            num_warps=4,
            num_stages=stages if rows > 1 else 1,
        )  # fmt: skip
        yield f"few_down rows={rows}", compiled(
            few.few_down,
            {
                "HAS_BIAS": False, "NEURONS": neurons, "TILES": 256, "ROWS": rows, "WIDTH": 32,
                "CHAINED": chained, **dot,
            },
            {},
            capability,
            num_warps=4,
            num_stages=stages,
        )  # fmt: skip
    tile = {"NEURONS": 32, "ROWS": 128}
    yield "count_firing", compiled(statistics.count_firing, tile, {}, capability)
    yield "sum_magnitudes", compiled(statistics.sum_magnitudes, {**tile, "PACKED": True}, {}, capability)


def hopper():
    from triton.experimental.gluon import language as gl

    from twell.kernels.gpu import hopper_down, hopper_select, hopper_up

    layout = gl.NVMMASharedLayout(128, 16, 2)

    def descriptor(*shape):
        return f"tensordesc<bf16{list(shape)},{layout!r}>"

    flags = {"HAS_BIAS": False}
    yield (
        "select_blocks_hopper",
        compiled(
            hopper_select.select_blocks_hopper,
            {"ROWS": 128, "PLAIN": True, "SQUARE": False, "STAGES": 4, **flags},
            {"x_desc": descriptor(256, 64), "w_desc": descriptor(128, 64)},
            90,
            gluon=True,
            num_warps=4,
        ),
    )
    yield (
        "up_blocks_hopper",
        compiled(
            hopper_up.up_blocks_hopper,
            {"CHUNK": 256, "W_LAYOUT": layout, "STAGES": 4, **flags},
            {"x_desc": descriptor(128, 64)},
            90,
            gluon=True,
            num_warps=4,
        ),
    )
    yield (
        "down_blocks_hopper",
        compiled(
            hopper_down.down_blocks_hopper,
            {"W_LAYOUT": layout, "STAGES": 3, **flags},
            {"hidden_desc": descriptor(64, 128), "y_desc": descriptor(64, 256)},
            90,
            gluon=True,
            num_warps=4,
        ),
    )


def main(target: str) -> None:
    kernels = hopper() if target == "hopper" else portable(int(target))
    for name, kernel in kernels:
        print(f"{name} | {target} | {kernel.metadata.shared} | {spilled_bytes(kernel)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
