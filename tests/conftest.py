"""Settings of the whole suite: Triton's interpreter where there is no GPU, Hypothesis' effort."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Before anything imports Triton: the kernels of tests/gpu then run on the CPU, in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

try:
    from hypothesis import settings
except ImportError:  # a GPU machine may hold torch and pytest only: its tests still run, these say so
    settings = None
    collect_ignore = [
        "formats/test_block.py",
        "formats/test_hybrid.py",
        "formats/test_row.py",
        "test_activations.py",
    ]


def pytest_report_header() -> str | None:
    return None if settings else f"hypothesis is not installed; left out: {', '.join(collect_ignore)}"


if settings:
    settings.register_profile(
        "ci",
        deadline=None,
        derandomize=False,
        print_blob=True,
        max_examples=int(os.environ.get("TWELL_HYPOTHESIS_EXAMPLES", "100")),
    )
    settings.load_profile("ci")


@pytest.fixture
def fresh_compiler():
    """Compiled code of other tests does not count towards the limit of recompilations."""
    torch._dynamo.reset()
