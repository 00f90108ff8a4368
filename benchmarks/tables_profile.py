"""The table of a profile on a GPU, for tables.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results" / "profile_small.json"


def small() -> str:
    """Layer by layer, and the correlation of nnz with speed where there are layers enough."""
    from twell.profiling import read_profile  # needs transformers, which takes seconds

    profile = read_profile(RESULTS)
    lines = [
        "| layer | nnz | p99 | max | first token | union 128 | overflow | sparse | auto |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for number, layer in enumerate(profile.layers):
        nnz, speed = layer.nnz, layer.speed
        union = layer.union[profile.union_sizes.index(128)]
        lines.append(
            f"| {number} | {nnz.mean:.1f} | {nnz.p99} | {nnz.max:,} | {layer.nnz_by_position[0]:,.0f} "
            f"| {union:,.0f} | {layer.overflow.by_compression[-1].rows:.2%} | {speed.sparse_speedup:.2f}x "
            f"| {speed.auto_speedup:.2f}x |"
        )
    where = f"{profile.hardware['gpu']}, torch {profile.versions['torch']}, {profile.dtype}"
    said = f"{profile.tokens:,} tokens of unseen text; {where}."
    if profile.correlation is not None and profile.correlation.sparse is not None:
        said += f" Correlation of nnz with the sparse speed-up: {profile.correlation.sparse:.3f}."
    return "\n".join([*lines, "", said])


TABLES: dict[str, Callable[[], str]] = {"profile-small": small}
