"""Settings of the whole suite: a CPU that survives it, fixed choices, Triton's interpreter, Hypothesis."""

import atexit
import os
import shutil
import signal
import tempfile

import pytest
import torch

from twell._processor import cpu_name, make_products_safe

# A shell's background jobs ignore Ctrl-C, and so would every process that these tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before anything multiplies; workers and child processes inherit both.
VERDICT = make_products_safe()
if "TWELL_CACHE" not in os.environ:
    os.environ["TWELL_CACHE"] = tempfile.mkdtemp(prefix="twell-tests-")
    atexit.register(shutil.rmtree, os.environ["TWELL_CACHE"], ignore_errors=True)

if not torch.cuda.is_available():
    # Before anything imports Triton: the kernels then run on the CPU, in its interpreter.
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


def pytest_report_header() -> list[str]:
    cap = os.environ.get("ONEDNN_MAX_CPU_ISA", "none")
    lines = [f"cpu: {cpu_name()}, {torch.get_num_threads()} threads; {VERDICT.words} (oneDNN cap: {cap})"]
    if settings is None:
        lines.append(f"hypothesis is not installed; left out: {', '.join(collect_ignore)}")
    return lines


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


class CpuChoices:
    """What tests take this CPU for: the same one everywhere. Change it to see what another outcome does.

    native:      whether 16-bit matrices are multiplied in hardware.
    row_limit:   the share of active neurons up to which the row path is taken.
    block_gain:  dense time over the block path's.
    form_gain:   F.linear's time over the other form's: above 1.1 the other form is taken.
    """

    def __init__(self) -> None:
        self.native = False
        self.row_limit, self.block_gain, self.form_gain = 0.13, 2.0, 0.5

    def measured(self, name, measure, *, otherwise, usual=0.0):
        kinds = {
            "row limit": self.row_limit,
            "dense over block": self.block_gain,
            "linear over": self.form_gain,
        }
        return next(value for kind, value in kinds.items() if name.startswith(kind))


@pytest.fixture(autouse=True)
def cpu_choices(monkeypatch, request):
    """No test depends on what the machine at hand measures or has, but those marked `real_cpu`."""
    from twell import layer_state, policy
    from twell.kernels.cpu import gemm, measurements

    layer_state._temporaries.cache_clear()  # what other tests' weights, each of one call, have come to share
    policy.resolve_cached.cache_clear()  # what thresholds of another test have decided
    monkeypatch.setattr(measurements, "is_busy", lambda: False)  # as the machine may be meanwhile
    if request.node.get_closest_marker("real_cpu"):
        return None
    choices = CpuChoices()
    monkeypatch.setattr(measurements, "measured", choices.measured)
    monkeypatch.setattr(gemm, "has_native_gemm", lambda dtype: choices.native)
    return choices


@pytest.fixture(autouse=True)
def one_pace(monkeypatch, request):
    """All layers are read after the same numbers of calls, but in tests marked `real_pace`."""
    from twell import layer_state

    if not request.node.get_closest_marker("real_pace"):
        monkeypatch.setattr(layer_state, "_next_pace", lambda: 1.0)
