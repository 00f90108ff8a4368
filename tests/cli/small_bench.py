"""`twell bench` on a model that is small enough for tests."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from twell.cli.app import app
from twell.measure.models import ModelSize

SMALL = ModelSize(hidden=64, neurons=256, layers=2, vocabulary=300, positions=128, nnz=6)
QUICK = ("--rounds", "2", "--energy-seconds", "0", "--device", "cpu")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False)
