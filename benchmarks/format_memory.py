"""Bytes of each sparse format against dense; writes benchmarks/results/format_memory.jsonl.

The paper's width (H 5632), skewed synthetic gates, 4096 tokens, bf16 values. Every packed matrix is unpacked
and compared bit by bit in the same run.

    python benchmarks/format_memory.py
"""

from __future__ import annotations

from pathlib import Path

import torch

from twell import BlockTwELL, Hybrid, TwELL
from twell.measure import make_record, write_records
from twell.synthetic import make_ffn

RESULTS = Path(__file__).parent / "results" / "format_memory.jsonl"
TOKENS, NEURONS, HIDDEN = 4096, 5632, 64
NNZ = (12, 24, 39, 64, 128, 512)
PACKERS = {
    "twell_c8": lambda dense: TwELL.pack(dense, 256, 8, overflow="spill"),
    "twell_c4": lambda dense: TwELL.pack(dense, 256, 4, overflow="spill"),
    "block_128": lambda dense: BlockTwELL.pack(dense, 128),
    "block_64": lambda dense: BlockTwELL.pack(dense, 64),
    "hybrid_128": lambda dense: Hybrid.pack(dense, 128, 1 / 8),
}


def main() -> None:
    records = []
    for nnz in NNZ:
        block = make_ffn(TOKENS, HIDDEN, NEURONS, nnz)
        dense = torch.relu(block.x @ block.gate.mT).to(torch.bfloat16)
        mean_nnz = (dense != 0).sum().item() / TOKENS
        for name, pack in PACKERS.items():
            packed = pack(dense)
            if not torch.equal(packed.unpack().view(torch.int16), dense.view(torch.int16)):
                raise AssertionError(f"{name} at nnz {nnz} did not unpack to what was packed")
            records.append(
                make_record(
                    f"format_memory/{name}",
                    packed.memory_bytes(),
                    unit="bytes",
                    baseline="dense bf16",
                    baseline_timing=packed.dense_bytes(),
                    shape={"M": TOKENS, "H": NEURONS, "dtype": "bfloat16"},
                    sparsity={"nnz": mean_nnz, "density": mean_nnz / NEURONS, "wanted_nnz": nnz},
                    error=0.0,
                    seed=0,
                    repository=__file__,
                )
            )
            print(f"nnz {nnz:4} {name:12} {records[-1].value / records[-1].baseline_value:.1%} of dense")
    write_records(RESULTS, records)


if __name__ == "__main__":
    main()
