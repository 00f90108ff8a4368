"""The progress bar of a run says everything that it has to, on narrow terminals too."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

pytest.importorskip("transformers")

from twell.train.metrics import ProgressBar

LOGS = {
    "ce_loss": 10.123,
    "nnz": 5632.4,
    "dead": 0.123,
    "dead_window": 1_048_576,
    "tokens_per_second": 1_234_567.0,
}


@pytest.mark.parametrize("width", [80, 120, 150, 200])
def test_the_bar_shows_steps_time_and_figures(width):
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=width, color_system=None)
    bar = ProgressBar(1024, console)
    state = SimpleNamespace(is_world_process_zero=True, max_steps=40_000, global_step=12_345)
    bar.on_train_begin(None, state, None)
    bar.on_log(None, state, None, logs=LOGS)
    bar.on_step_end(None, state, None)
    bar.close()
    *_, last = (line for line in re.split(r"[\r\n]|\x1b\[\d*\w", written.getvalue()) if "training" in line)
    assert len(last.rstrip()) <= width
    for shown in ("12345/40000", "-:--:--", "10.123", "nnz 5632.4", "1,234,567 tok"):
        assert shown in last
    assert ("dead 12.3% in 1,048,576 tokens" in last) == (width >= 150)
