"""Compiles every kernel for GPUs that are not there; run by test_compile.py in a process of its own.

Prints one line per kernel and target: name, capability, shared memory, spilled bytes.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from twell.kernels.gpu.decode import decode_tiles
from twell.kernels.gpu.device import Gpu
from twell.kernels.gpu.row import apply, pack
from twell.kernels.gpu.row.run import row_tiles
from twell.kernels.gpu.tiles import block_tiles
from twell.kernels.gpu.triton import decode, products, select, statistics, sums

from . import compile_backward

POINTERS = {
    "bias": "*bf16", "select_bias": "*bf16", "up_bias": "*bf16", "x": "*bf16", "w": "*bf16",
    "select": "*bf16", "up": "*bf16", "values": "*bf16", "hidden": "*bf16", "y": "*bf16",
    "active": "*u8", "lists": "*i32",
    "counts": "*i32", "neurons": "*i32", "work": "*i32", "counter": "*i32", "firing": "*i64",
    "sums": "*fp64", "words": "*i32", "down": "*bf16", "down_bias": "*bf16",
    "out": "*bf16", "rest": "*bf16", "weights": "*bf16", "more_weights": "*bf16", "spans": "*i32",
}  # fmt: skip
NUMBERS = {
    "M": "i32", "H": "i32", "D": "i32", "E": "i32", "threshold": "fp32", "chunks_per_block": "i32",
    "padded": "i32", "blocks": "i32", "per_program": "i32", "tiles": "i32",
    "width": "i32", "rows": "i32",
}  # fmt: skip


NOT_ALIGNED = ("M", "blocks", "tiles", "tokens", "limit", "units", "processors", "plane", "planes", "counter")


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
        if name not in constants and signature[name] not in ("fp32",)
        if name not in NOT_ALIGNED and not signature[name].startswith("tensordesc")
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


def portable_target(capability):
    """With the shared memory of A100, H100 and B200."""
    memory = {80: 166_912, 90: 232_448, 100: 232_448}[capability]
    return Gpu(name="", capability=divmod(capability, 10), processors=100, shared_memory=memory)


def portable(capability):
    target = portable_target(capability)  # tiles are what the launchers would choose there
    tiles = block_tiles(target, torch.bfloat16, 1 << 16, 5632, 0)
    x = f"tensordesc<bf16[{tiles.rows}, {tiles.select_depth}]>"
    w = f"tensordesc<bf16[{tiles.select_neurons}, {tiles.select_depth}]>"
    hidden = f"tensordesc<bf16[{tiles.down_depth}, {tiles.rows}]>"

    constants = {"HAS_BIAS": False, "PLAIN": True, "SQUARE": False, "NEURONS": tiles.select_neurons}
    constants |= {"ROWS": tiles.rows, "DEPTH": tiles.select_depth}
    options = {"num_warps": tiles.select_warps, "num_stages": tiles.select_stages}
    descriptors = {"x_desc": x, "w_desc": w}
    kernel = compiled(select.select_blocks, constants, descriptors, capability, **options)
    yield "select_blocks", kernel

    constants = {"CHUNK": tiles.up_chunk, "WIDTH": 8192, "FILL": 256}
    yield "list_active", compiled(select.list_active, constants, {}, capability, num_warps=8)

    constants = {"HAS_BIAS": True, "CHUNK": tiles.up_chunk, "ROWS": tiles.rows, "DEPTH": tiles.up_depth}
    options = {"num_warps": tiles.up_warps, "num_stages": tiles.up_stages}
    yield "up_blocks", compiled(products.up_blocks, constants, {"x_desc": x}, capability, **options)

    for packed in (True, False):
        constants = {"PLANES": 1, "SPANS": 0, "PACKED": packed, "HAS_BIAS": False, "LATER": 0}
        constants |= {"HAS_REST": False, "OVERFLOWED_ONLY": False}
        constants |= {"WIDTH": tiles.down_width, "ROWS": tiles.rows, "DEPTH": tiles.down_depth}
        options = {"num_warps": tiles.down_warps, "num_stages": tiles.down_stages}
        descriptors = {"v_desc": hidden if packed else "*bf16"}
        kernel = compiled(sums.gathered_sums, constants, descriptors, capability, **options)
        yield f"gathered_sums packed={packed}", kernel

    for tokens in (1, 16, 64):
        few_ = decode_tiles(target, torch.bfloat16, tokens, 5632, 2048)
        shared = {"NEURONS": few_.neurons, "ROWS": few_.rows, "CHAINED": capability >= 90}
        constants = {"HAS_SELECT_BIAS": False, "HAS_UP_BIAS": False, "GATED": True, "SQUARE": False}
        constants |= shared | {"DEPTH": few_.depth}
        options = {"num_warps": few_.warps, "num_stages": few_.stages}
        kernel = compiled(decode.decode_select_up, constants, {}, capability, **options)
        yield f"decode_select_up tokens={tokens}", kernel
        constants = {"HAS_BIAS": False, "TILES": few_.side, "WIDTH": few_.width, **shared}
        options = {"num_warps": few_.down_warps, "num_stages": few_.down_stages}
        yield (
            f"decode_down tokens={tokens}",
            compiled(decode.decode_down, constants, {}, capability, **options),
        )

    yield from rows_kernels(target, capability)
    tile = {"NEURONS": 32, "ROWS": tiles.rows}
    yield "count_firing", compiled(statistics.count_firing, tile, {}, capability)
    yield "sum_magnitudes", compiled(statistics.sum_magnitudes, {**tile, "PACKED": True}, {}, capability)


def rows_kernels(target, capability):
    tiles = row_tiles(target, 2048, 2048)
    words = {"TILE": tiles.tile, "WORDS": tiles.tile // 8}
    constants = {"HOPPER": tiles.pack_hopper, "IN_PLACE": True, "HAS_BIAS": False, "PLAIN": True}
    constants |= {"SQUARE": False, "EVEN": True, "TOKENS": tiles.pack_tokens, "DEPTH": tiles.pack_depth}
    sources = {}
    if tiles.pack_hopper:
        shapes = {"x": [tiles.pack_tokens, tiles.pack_depth], "w": [tiles.tile, tiles.pack_depth]}
        sources = {name: f"tensordesc<bf16{shape}>" for name, shape in shapes.items()}
    options = {"num_warps": tiles.pack_warps, "num_stages": tiles.pack_stages}
    yield "pack_rows", compiled(pack.pack_rows, constants | words, sources, capability, **options)
    uneven = constants | {"PLAIN": False, "EVEN": False}  # fatrelu
    yield "pack_rows uneven", compiled(pack.pack_rows, uneven | words, sources, capability, **options)
    constants = {"HAS_SELECT_BIAS": False, "HAS_UP_BIAS": False, "HAS_DOWN_BIAS": False, "GATED": True}
    constants |= {"SQUARE": False, "TILES": 32, "GROUP": tiles.apply_group, "DEPTH": tiles.apply_depth}
    constants |= words | {"WIDTH": tiles.apply_width}
    options = {"num_warps": tiles.apply_warps}
    yield "apply_rows", compiled(apply.apply_rows, constants, {}, capability, **options)


def layout(*shape):
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout.get_default_for(list(shape), gl.bfloat16)


def descriptor(*shape):
    return f"tensordesc<bf16{list(shape)},{layout(*shape)!r}>"


def hopper():
    from twell.kernels.gpu.hopper import decode_down, decode_select, products, select, sums
    from twell.kernels.gpu.hopper.decode import hopper_decode_tiles

    target = Gpu(name="", capability=(9, 0), processors=132, shared_memory=232_448)
    options = {"gluon": True, "num_warps": 4}
    for rows, bias in ((128, False), (128, True), (64, False)):
        name = f"rows={rows} bias={bias}"
        constants = {"ROWS": rows, "HAS_BIAS": bias, "PLAIN": not bias, "SQUARE": bias, "STAGES": 4}
        sources = {"x_desc": descriptor(2 * rows, 64), "w_desc": descriptor(16384 // rows, 64)}
        kernel = compiled(select.select_blocks_hopper, constants, sources, 90, **options)
        yield f"select_blocks_hopper {name}", kernel
        constants = {"CHUNK": 128, "W_LAYOUT": layout(128, 64), "HAS_BIAS": bias, "STAGES": 6}
        sources = {"x_desc": descriptor(rows, 64)}
        yield (
            f"up_blocks_hopper {name}",
            compiled(products.up_blocks_hopper, constants, sources, 90, **options),
        )
    for planes, spans, bias, later in ((1, 0, False, 0), (1, 0, True, 0), (2, 1, False, 0), (2, 1, False, 1)):
        constants = {"PLANES": planes, "SPANS": spans, "HAS_BIAS": bias, "LATER": later}
        constants |= {"W_LAYOUT": layout(64, 256), "STAGES": 3}
        sources = {"v_desc": descriptor(64, 128), "out_desc": descriptor(64, 256)}
        kernel = compiled(sums.gathered_sums_hopper, constants, sources, 90, **options)
        yield f"gathered_sums_hopper planes={planes} bias={bias} later={later}", kernel
    for tokens, features, bias in ((1, 2048, False), (32, 2048, True), (32, 4096, True), (64, 2048, False)):
        few_ = hopper_decode_tiles(target, tokens, features, features)
        constants = {"HAS_SELECT_BIAS": bias, "HAS_UP_BIAS": bias, "GATED": True, "SQUARE": bias}
        constants |= {"X_TILES": few_.x_tiles, "GATHERED": few_.gathered, "STAGES": few_.stages}
        constants["RESIDENT"] = few_.resident
        sources = {name: descriptor(64, 128) for name in ("select_desc", "up_desc")}
        sources["x_desc"] = descriptor(few_.rows, 128)
        kernel = compiled(decode_select.decode_select_up_hopper, constants, sources, 90, **options)
        yield f"decode_select_up_hopper tokens={tokens} features={features} bias={bias}", kernel
        constants = {"HAS_BIAS": bias, "ROWS": few_.rows, "PART": few_.part, "WIDTH": few_.width}
        constants |= {"TILES": few_.side}
        kernel = compiled(decode_down.decode_down_hopper, constants, {}, 90, gluon=True, num_warps=8)
        yield f"decode_down_hopper tokens={tokens} features={features} bias={bias}", kernel


def backward(target):
    if target == "hopper":
        return compile_backward.hopper(compiled, layout, descriptor)
    if target == "90":
        return ()  # Hopper's own are above; what runs on the generations before and after stands for it
    return compile_backward.portable(compiled, portable_target(int(target)), int(target))


def main(target: str) -> None:
    kernels = hopper() if target == "hopper" else portable(int(target))
    for name, kernel in itertools.chain(kernels, backward(target)):
        print(f"{name} | {target} | {kernel.metadata.shared} | {spilled_bytes(kernel)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
