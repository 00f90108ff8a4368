"""The backward kernels, compiled for `compile_targets.py`."""

from __future__ import annotations

import torch

from twell.kernels.gpu.tiles import backward_tiles
from twell.kernels.gpu.triton import combine, products, schedule, sums, weights

ROWS = 128
TYPES = {
    "pool": "*bf16", "grad": "*bf16", "grad_x": "*bf16", "grad_select": "*bf16", "grad_down": "*bf16",
    "grad_up": "*bf16", "target": "*bf16", "out": "*bf16", "grad_l1": "*fp32", "values": "*bf16",
    "places": "*i32", "spans": "*i32", "counters": "*i32", "bounds": "*i32", "frequent": "*i32",
    "overflow": "*i32", "how_many": "*i32", "offsets": "*i32", "before": "*i32", "tokens": "*i32",
    "firing": "*i32", "counts": "*i32", "rest": "*bf16",
    "rows": "i32", "chunks_per_round": "i32", "span_stride": "i32", "work_stride": "i32",
    "frequent_stride": "i32", "limit": "i32", "processors": "i32", "units": "i32", "plane": "i32",
    "planes": "i32",
}  # fmt: skip


def portable(compiled, target, capability):
    tiles = backward_tiles(target, torch.bfloat16)
    product = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    dot = {"ROWS": ROWS}

    def build(kernel, constants, descriptors=None, types=None, **options):
        shaped = {name: f"tensordesc<bf16{shape}>" for name, shape in (descriptors or {}).items()}
        sources = TYPES | (types or {}) | shaped
        return kernel.__name__, compiled(kernel, constants, sources, capability, **options)

    constants = {"ROUNDS": 3, "CHUNK": tiles.chunk, "WIDTH": 8192, "BLOCKS": 128}
    yield build(schedule.plan_rounds, constants, num_warps=8)
    constants = {"HAS_SELECT_BIAS": True, "HAS_UP_BIAS": True, "MATRICES": 3, "CHUNK": tiles.chunk}
    block = [ROWS, tiles.depth]
    descriptors = {"x_desc": block, "grad_desc": block}
    constants |= {"DEPTH": tiles.depth, **dot}
    yield build(products.gather_products, constants, descriptors, **product)
    yield build(schedule.count_tokens, {"NEURONS": 32, "GROUP": 128})
    constants = {"NEURONS": tiles.neurons, "CANDIDATES": 6, "WIDTH": 8192}
    yield build(schedule.order_neurons, constants, types={"tokens": "i32"}, num_warps=16)
    constants = {"HAS_L1": True, "GATED": True, "SQUARE": False, "RARE": True, "CHUNK": tiles.chunk}
    yield build(combine.combine, constants | {"ENTRIES": tiles.entries, "ROWS": ROWS}, num_warps=4)
    constants = {"PLANES": 2, "SPANS": 1, "PACKED": True, "HAS_BIAS": False, "LATER": 1, "HAS_REST": True}
    constants |= {"OVERFLOWED_ONLY": False, "WIDTH": tiles.width, "DEPTH": tiles.depth, **dot}
    yield build(sums.gathered_sums, constants, {"v_desc": [tiles.depth, ROWS]}, **product)
    constants = {"FIRST": 0, "MATRICES": 3, "NEURONS": tiles.neurons, "WIDTH": tiles.width, **dot}
    block = [ROWS, tiles.width]
    descriptors = {"x_desc": block, "grad_desc": block}
    totals = dict.fromkeys(("grad_select", "grad_down", "grad_up"), "*fp32")
    add = {"ADD": True}
    yield build(weights.frequent_weights, constants | {"ADD": False}, descriptors, **product)
    yield build(weights.frequent_weights, constants | add, descriptors, totals, **product)
    constants = {"HAS_SELECT": True, "HAS_DOWN": True, "HAS_UP": True, "WIDTH": tiles.rare_width}
    constants |= {"AHEAD": tiles.ahead}
    yield build(weights.rare_weights, constants | {"ADD": False}, num_warps=tiles.rare_warps)
    yield build(weights.rare_weights, constants | add, types=totals, num_warps=tiles.rare_warps)
    yield build(weights.bias_sums, {"NEURONS": 8, "ROWS": ROWS})


def hopper(compiled, layout, descriptor):
    from twell.kernels.gpu.hopper import combine, products, weights

    def build(kernel, constants, descriptors, types=None):
        sources = TYPES | (types or {}) | {name: descriptor(*shape) for name, shape in descriptors.items()}
        return kernel.__name__, compiled(kernel, constants, sources, 90, gluon=True, num_warps=4)

    for bias, rows in ((False, 128), (True, 128), (False, 64)):
        constants = {"HAS_SELECT_BIAS": bias, "HAS_UP_BIAS": bias, "MATRICES": 3, "CHUNK": 128}
        constants |= {"W_LAYOUT": layout(128, 64), "STAGES": 6}
        descriptors = {"x_desc": (rows, 64), "grad_desc": (rows, 64)}
        yield build(products.gather_products_hopper, constants, descriptors)
    for rare in (False, True):
        constants = {"HAS_L1": rare, "GATED": True, "SQUARE": False, "RARE": rare, "CHUNK": 128}
        yield build(combine.combine_hopper, constants | {"ENTRIES": 8, "ROWS": 128}, {})
    constants = {"MATRICES": 3, "NEURONS": 128, "V_LAYOUT": layout(128, 64), "STAGES": 4}
    descriptors = {"x_desc": (64, 256), "grad_desc": (64, 256)}
    sums = dict.fromkeys(("grad_select", "grad_down", "grad_up"), "*fp32")
    yield build(weights.frequent_weights_hopper, constants | {"ADD": False}, descriptors)
    yield build(weights.frequent_weights_hopper, constants | {"ADD": True}, descriptors, sums)
