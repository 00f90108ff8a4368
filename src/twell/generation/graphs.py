"""CUDA graphs of what a generation repeats, and which paths the blocks inside took."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from ..block_table import state_of
from ..nn import SparseMLP

Result = TypeVar("Result")


def captured_graph(
    run: Callable[[], Result], device: torch.device
) -> tuple[torch.cuda.CUDAGraph, Result] | tuple[None, str]:
    """A graph of `run` and what it returned, whose tensors a replay fills; or None and why not."""
    graph = torch.cuda.CUDAGraph()
    try:
        stream = torch.cuda.Stream(device)  # torch's own is of the first device it served
        # Other threads go on using the device meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            result = run()
    except Exception as error:
        return None, str(error).splitlines()[0]
    return graph, result


def paths_of(blocks: Iterable[SparseMLP]) -> tuple[str, ...]:
    """How the blocks ran last."""
    return tuple(map(_path, blocks))


def _path(block: SparseMLP) -> str:
    state = state_of(block)
    return "" if state is None else state.ran["forward"].path
