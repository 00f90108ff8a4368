"""Workloads, shapes and saving, shared by the feed-forward benchmarks on a GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from _records import replace_records
from twell.measure import Record
from twell.synthetic import make_ffn

CHECKED = 256  # tokens compared with float32
Weights = tuple[Tensor, Tensor, Tensor | None]  # up, down, gate
console = Console(width=150)


def layer(
    hidden: int,
    neurons: int,
    nnz: float,
    gated: bool = True,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
) -> Weights:
    """up, down (neuron-major), gate."""
    block = make_ffn(1, hidden, neurons, nnz, gated=gated, dtype=dtype, device=device)
    return block.up, block.down.mT.contiguous().mT, block.gate


def tokens(count: int, hidden: int, *, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Tensor:
    """Tokens as `make_ffn` draws them: feature 0 constant, the others normal."""
    x = torch.randn(count, hidden, device=device, dtype=torch.float32)
    x[:, 0] = 8.0
    return x.to(dtype)


@torch.no_grad()
def measured_nnz(x: Tensor, weights: Weights) -> float:
    up, _, gate = weights
    some = x[: 8 * CHECKED] @ (up if gate is None else gate).mT
    return (some > 0).sum().item() / some.shape[0]


def shape_of(
    count: int, hidden: int, neurons: int, gated: bool = True, *, dtype: torch.dtype = torch.bfloat16
) -> dict[str, int | str | bool]:
    return {
        "M": count,
        "D": hidden,
        "H": neurons,
        "dtype": str(dtype).removeprefix("torch."),
        "gated": gated,
    }


def save(records: list[Record], path: Path, commit: str | None) -> None:
    """Write `records` in place of those that `path` has of the same parts, the second word of their names.

    commit: written to them where git is not available.
    """
    if commit:
        records = [dataclasses.replace(r, commit=commit) for r in records]
    parts = {part_of(record) for record in records}
    total = replace_records(path, records, lambda old: part_of(old) in parts)
    console.print(f"{len(records)} records in {path}, {total - len(records)} of other sections kept")


def part_of(record: Record) -> str:
    return record.what.split("/")[1]
